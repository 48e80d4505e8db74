"""Two-tower retrieval: vectors of users and items, trained against the batch's other items and drawn ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import MISSING
from torch import nn

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.config.choices import RetrievalLoss
from recsys.config.model import Needs
from recsys.config.names import one_of
from recsys.data.batch import Batch
from recsys.errors import UserError
from recsys.models.base import WIDEST, DenseInputs, Vectors, mlp
from recsys.models.items import gather
from recsys.models.retrieval import RetrievalConfig, RetrievalModel, first_ids, gather_rows, pieces

_MOST_PARTS = 128  # of a batch, however large


@dataclass
class TwoTowerConfig(RetrievalConfig):
    """Two-tower retrieval with in-batch softmax (Yi et al. 2019, doi:10.1145/3298689.3346996), or BPR of all pairs.

    The negatives of a row are the items of the other rows, all of which users came across. Items drawn from data.items
    may join them (Yang et al. 2020, doi:10.1145/3366424.3386195).
    """

    name: str = "two_tower"
    user_features: list[str] = MISSING  # features that the user tower reads
    item_features: list[str] = MISSING  # features that the item tower reads; they are also columns of data.items
    item_id: str = MISSING  # the item feature that identifies items
    user_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths of the user tower
    item_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths of the item tower
    output_dim: int = bounded(32, 1, WIDEST)  # width of the vectors that are compared
    dropout: float = bounded(0.0, 0, below=1)  # dropout after each hidden layer
    normalize: bool = True  # cosine instead of dot product
    loss: RetrievalLoss = RetrievalLoss.softmax  # `softmax` or `bpr`
    temperature: float = bounded(0.1, 1e-30, below=1e30)  # what scores are divided by, before the loss
    logq_correction: bool = True  # subtract from the score of an item the log of its share among compared items
    # Correct the score of the row's own item too, though it is compared whatever its share. `false`: "Correcting the
    # LogQ Correction" (Khrylchenko et al. 2025, arXiv:2507.09331).
    correct_own: bool = True
    sampled_negatives: int = bounded(0, 0, 2**24)  # items to draw from data.items for each global batch
    sampling_power: float = bounded(0.0, 0, 1)  # draw by count in data.train to this power; 0: all alike, 1: as in rows

    free: ClassVar = (*RetrievalConfig.free, "dropout", "user_features", "item_features")
    shapes: ClassVar = ("user_mlp", "item_mlp", "output_dim")
    mlps: ClassVar = {"user_mlp": "user.mlp", "item_mlp": "item.mlp"}
    deciding: ClassVar = {"correct_own": ("logq_correction", ()), "sampling_power": ("sampled_negatives", ())}

    def needs(self) -> Needs:
        return Needs(
            labels=False,
            item_id=self.item_id,
            item_features=tuple(self.item_features),
            vector_dim=self.output_dim,
            log_shares_of=self.item_id if self.logq_correction or self._draws_by_count else None,
            sampled_items=self.sampled_negatives,
            sampling_power=self.sampling_power if self._draws_by_count else 0.0,
        )

    @property
    def _draws_by_count(self) -> bool:
        return self.sampled_negatives > 0 and self.sampling_power > 0

    def layer_inputs(self, ids: Sequence[str], floats: Sequence[str]) -> dict[str, list[str]]:
        return {
            f"{tower}.mlp.0.weight": [*(n for n in names if n in ids), *(n for n in names if n in floats)]
            for tower, names in (("user", self.user_features), ("item", self.item_features))
        }

    def check(self, config: Config) -> None:
        super().check(config)
        for key in ("user_features", "item_features"):
            names = getattr(self, key)
            if not names:
                raise UserError(f"config key 'model.{key}' is empty, and needs at least one feature")
            for name in names:
                one_of(f"model.{key}", name, config.features, "feature")
                if names.count(name) > 1:
                    raise UserError(f"config key 'model.{key}' names '{name}' twice; name each feature once")
        one_of("model.item_id", self.item_id, self.item_features, "item feature")
        shared = set(self.user_features) & set(self.item_features)
        if shared:
            raise UserError(
                f"feature '{min(shared)}' is in both model.user_features and model.item_features; remove it from one"
            )
        unused = set(config.features) - set(self.user_features) - set(self.item_features)
        if unused:
            raise UserError(
                f"feature '{min(unused)}' is in neither model.user_features nor model.item_features; add it there, or "
                f"remove features.{min(unused)}"
            )
        if self.loss not in (RetrievalLoss.softmax, RetrievalLoss.bpr):
            raise UserError(f"config key 'model.loss': {self.loss.name} belongs to model simplex; use softmax or bpr")
        if self.loss is RetrievalLoss.bpr and self.logq_correction:
            raise UserError("config key 'model.logq_correction' corrects the softmax; with loss bpr, set it to false")
        if self.sampled_negatives and not config.data.items:
            raise UserError("config key 'model.sampled_negatives' samples items from data.items, which is not set")


class Tower(nn.Module):
    """An MLP over the concatenated pooled embeddings and floats of one side."""

    def __init__(
        self, features: dict[str, int], floats: list[tuple[int, int]], hidden: list[int], config: TwoTowerConfig
    ) -> None:
        super().__init__()
        self.features = list(features)
        self.normalize = config.normalize
        self.floats = floats  # columns of each feature, as (start, stop)
        width = sum(features.values()) + sum(stop - start for start, stop in floats)
        self.mlp = mlp(width, hidden, config.output_dim, config.dropout)

    def forward(self, pooled: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return vectors [rows, output_dim], of length 1 if the config says so."""
        inputs = [*(pooled[name] for name in self.features), *(floats[:, start:stop] for start, stop in self.floats)]
        vectors = self.mlp(torch.cat(inputs, dim=1))
        return F.normalize(vectors, dim=1) if self.normalize else vectors


class TwoTower(RetrievalModel):
    """User tower and item tower, trained by comparing each row with the items of the global batch, on all ranks.

    Each row's own item is its positive. The items of other rows and drawn items are its negatives, except those of rows
    of weight 0 and those equal to its own (accidental hits). With logQ correction, the log of an item's share of these
    is subtracted from its score, since popular items come up as negatives more often in this proportion.
    """

    Config = TwoTowerConfig
    log_shares: torch.Tensor | None

    def __init__(self, config: TwoTowerConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.config = config
        self.user = self._tower(config.user_features, config.user_mlp, inputs)
        self.item = self._tower(config.item_features, config.item_mlp, inputs)
        log_shares = inputs.log_shares if config.logq_correction else None
        self.register_buffer("log_shares", log_shares, persistent=False)

    def _tower(self, names: list[str], hidden: list[int], inputs: DenseInputs) -> Tower:
        ids = {name: inputs.dims[name] for name in names if name in inputs.dims}
        columns = inputs.float_columns()
        return Tower(ids, [columns[name] for name in names if name in columns], hidden, self.config)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return user vectors and item vectors, each [rows, output_dim]."""
        return self.user(vectors, floats), self.item(vectors, floats)

    def losses(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> dict[str, torch.Tensor]:
        users, items = outputs
        keys = first_ids(batch, self.config.item_id)
        everyones_items = gather_rows(items)
        end = len(users) if batch.sampled is None else batch.sampled.start
        is_item = torch.cat([batch.weights[:end] > 0, keys[end:] >= 0])
        others_keys = gather(torch.where(is_item, keys, -1))
        offsets, log_odds = everyones_items.new_zeros(len(others_keys)), None
        if self.log_shares is not None:
            offsets = -self.log_shares[others_keys.clamp(min=0)]
            if not self.config.correct_own:
                log_q = self.log_shares[keys[:end].clamp(min=0)]
                log_odds = log_q - torch.log1p(-log_q.exp().clamp(max=1 - 1e-6))
        own = users[:end] / self.config.temperature, keys[:end], batch.weights[:end]
        columns = own[0], everyones_items, offsets, own[1], others_keys, own[2], log_odds
        loss = self.config.loss
        return {loss.name: _LossOfRows.apply(*columns, loss, *self.pieces_of_loss(users.device))}


class _LossOfRows(torch.autograd.Function):
    """Weighted sum of the losses of this rank's rows, each over all items that are not barred for it.

    Scores, [rows, items of the global batch], take most memory. So they are computed for a few rows at a time, and
    overwritten by their gradient, in the forward pass.
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
        log_odds: torch.Tensor | None,
        loss: RetrievalLoss,
        num_scores: int,
        most_pieces: int | None,
    ) -> torch.Tensor:
        first = dist.get_rank() * len(items) // dist.get_world_size()
        own = torch.arange(first, first + len(users), device=users.device)
        losses, of_users, of_items = torch.empty_like(weights), torch.empty_like(users), torch.zeros_like(items)
        step = max(1, num_scores // len(items), len(users) // _MOST_PARTS)
        for rows in pieces(len(users), step, most_pieces):
            scores = torch.addmm(offsets, users[rows], items.T)
            positives = own[rows, None]
            barred = (items_keys == -1)[None, :] | (items_keys[None, :] == keys[rows, None])
            barred.scatter_(1, positives, False)
            if loss is RetrievalLoss.bpr:
                losses[rows], gradient = _of_pairs(scores, positives, barred)
            else:
                odds = None if log_odds is None else log_odds[rows, None]
                losses[rows], gradient = _of_softmax(scores, positives, barred, odds)
            gradient.mul_(weights[rows, None])
            of_users[rows] = gradient @ items
            of_items.addmm_(gradient.T, users[rows])
        ctx.save_for_backward(of_users, of_items)
        return torch.where(weights > 0, losses * weights, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_users, of_items = ctx.saved_tensors
        return of_users * gradient, of_items * gradient, *[None] * 8


def _of_softmax(
    scores: torch.Tensor, positives: torch.Tensor, barred: torch.Tensor, log_odds: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropies, [rows], and the gradients of the scores, [rows, items]."""
    if log_odds is not None:
        # The negatives are n draws from all items except the row's own, p. With log(n Q / (1 - Q(p))) instead of log Q
        # for them, and nothing for p, the cross-entropy has the gradient of the paper's loss.
        number = (~barred).sum(dim=1, keepdim=True) - 1
        scores.scatter_add_(1, positives, log_odds + number.clamp(min=1).log())
    logs = scores.masked_fill_(barred, -torch.inf).log_softmax(dim=1)
    losses = -logs.gather(1, positives)[:, 0]
    return losses, logs.exp_().scatter_add_(1, positives, torch.full_like(positives, -1, dtype=logs.dtype))


def _of_pairs(scores: torch.Tensor, positives: torch.Tensor, barred: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of BPR, [rows], and the gradients of the scores, [rows, items].

    A loss is the mean, over the negatives, of -log sigmoid(own score - negative's score).
    """
    barred.scatter_(1, positives, True)
    number = (~barred).sum(dim=1, keepdim=True).clamp(min=1)
    margins = (scores - scores.gather(1, positives)).masked_fill_(barred, -torch.inf)
    losses = F.softplus(margins).sum(dim=1) / number[:, 0]
    gradient = margins.sigmoid_().div_(number)
    return losses, gradient.scatter_(1, positives, -gradient.sum(dim=1, keepdim=True))
