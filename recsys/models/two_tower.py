"""Two-tower retrieval with in-batch sampled softmax."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from recsys.config import TwoTowerConfig
from recsys.data.batch import Batch
from recsys.models.base import Task, Vectors
from recsys.models.blocks import mlp

# Of the loss, at once: what a core's cache holds, or enough for a GPU's many.
_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}
_MOST_PARTS = 128  # of a batch, however large


class Tower(nn.Module):
    """An MLP over the concatenated pooled embeddings and floats of one side."""

    def __init__(self, features: dict[str, int], floats: list[int], hidden: list[int], config: TwoTowerConfig) -> None:
        super().__init__()
        self.features = list(features)
        self.normalize = config.normalize
        self.floats = floats
        self.mlp = mlp(sum(features.values()) + len(floats), hidden, config.output_dim, config.dropout)

    def forward(self, pooled: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return vectors [rows, output_dim], of length 1 if the config says so."""
        inputs = [*(pooled[name] for name in self.features), *(floats[:, i : i + 1] for i in self.floats)]
        vectors = self.mlp(torch.cat(inputs, dim=1))
        return F.normalize(vectors, dim=1) if self.normalize else vectors


class TwoTower(nn.Module):
    """User tower and item tower.

    Args:
        dims: embedding_dim of every id feature.
        float_names: float features, in the order of a batch's columns.
    """

    def __init__(self, config: TwoTowerConfig, dims: dict[str, int], float_names: list[str]) -> None:
        super().__init__()
        self.user = self._tower(config, config.user_features, config.user_mlp, dims, float_names)
        self.item = self._tower(config, config.item_features, config.item_mlp, dims, float_names)

    @staticmethod
    def _tower(
        config: TwoTowerConfig, names: list[str], hidden: list[int], dims: dict[str, int], floats: list[str]
    ) -> Tower:
        ids = {name: dims[name] for name in names if name in dims}
        return Tower(ids, [floats.index(name) for name in names if name in floats], hidden, config)

    def forward(self, pooled: Vectors, floats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return user vectors and item vectors, each [rows, output_dim]."""
        return self.user(pooled, floats), self.item(pooled, floats)


class RetrievalTask(Task):
    """Softmax over the items of the global batch, whose rows all ranks see (Yi et al. 2019).

    Each row's own item is its positive and every other row's item a negative, except rows of weight 0 and rows with
    the same item (accidental hits). With logQ correction a score is lowered by the log of the item's share of
    the training rows, because popular items come up as negatives that much more often.

    Args:
        model: user and item vectors.
        item_id: the id feature whose first table row tells items apart.
        log_q: [num_embeddings of the item's table] float32, or None for no correction.
    """

    log_q: torch.Tensor | None
    loss_by_rows = False
    _scores: int | None = None  # that the loss makes at once; None: as many as suit the device
    _most_pieces: int | None = None

    def __init__(self, model: nn.Module, item_id: str, temperature: float, log_q: torch.Tensor | None) -> None:
        super().__init__()
        self.model = model
        self.item_id = item_id
        self.temperature = temperature
        self.register_buffer("log_q", log_q, persistent=False)

    def loss(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
        users, items = outputs
        keys = _first_ids(batch, self.item_id)
        everyones_items = _GatherRows.apply(items)
        others_keys = _gather(torch.where(batch.weights > 0, keys, -1))
        offsets = everyones_items.new_zeros(len(others_keys))
        if self.log_q is not None:
            offsets = -self.log_q[others_keys.clamp(min=0)]
        columns = users / self.temperature, everyones_items, offsets, keys, others_keys, batch.weights
        return _SoftmaxLoss.apply(*columns, self._scores or _SCORES[users.device.type], self._most_pieces)

    def rehearse(self, device: torch.device) -> None:
        self._scores, self._most_pieces = _SCORES[device.type], 2


def _first_ids(batch: Batch, feature: str) -> torch.Tensor:
    """Return the first table row of each list of a feature, -1 where it is empty: [rows] integers."""
    jagged = batch.ids[feature]
    padded = torch.cat([jagged.values(), jagged.values().new_full((1,), -1)])
    first = jagged.offsets()[:-1].long().clamp(max=len(padded) - 1)
    return torch.where(jagged.lengths() > 0, padded[first], -1)


class _SoftmaxLoss(torch.autograd.Function):
    """The cross-entropies of this rank's rows, each over all items that are not barred for it: their weighted sum.

    Scores, [rows, items of the global batch], are what takes memory. A few rows have theirs at a time, and their
    gradient is made where they lie, in the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        users: torch.Tensor,
        items: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        items_keys: torch.Tensor,
        weights: torch.Tensor,
        num_scores: int,
        most_pieces: int | None,
    ) -> torch.Tensor:
        own = torch.arange(len(users), device=users.device) + dist.get_rank() * len(users)
        losses, of_users, of_items = torch.empty_like(weights), torch.empty_like(users), torch.zeros_like(items)
        some = max(1, num_scores // len(items), len(users) // _MOST_PARTS)
        for rows in (slice(first, first + some) for first in range(0, len(users), some)[:most_pieces]):
            scores = torch.addmm(offsets, users[rows], items.T)
            positives = own[rows, None]
            barred = (items_keys == -1)[None, :] | (items_keys[None, :] == keys[rows, None])
            logs = scores.masked_fill_(barred.scatter_(1, positives, False), -torch.inf).log_softmax(dim=1)
            losses[rows] = -logs.gather(1, positives)[:, 0]
            gradient = logs.exp_().scatter_add_(1, positives, torch.full_like(positives, -1, dtype=logs.dtype))
            gradient.mul_(weights[rows, None])
            of_users[rows] = gradient @ items
            of_items.addmm_(gradient.T, users[rows])
        ctx.save_for_backward(of_users, of_items)
        return torch.where(weights > 0, losses * weights, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_users, of_items = ctx.saved_tensors
        return of_users * gradient, of_items * gradient, *[None] * 6


class _GatherRows(torch.autograd.Function):
    """The rows of all ranks, in order of rank; the gradient of a row is summed over the ranks that used it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return _gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)
