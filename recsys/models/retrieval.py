"""Base of retrieval models: config keys, predictions and metrics, and rows of all ranks for their losses."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from omegaconf import MISSING

from recsys.config import Config, ModelConfig
from recsys.config.bounds import bounded
from recsys.config.choices import RetrievalMetric
from recsys.config.model import Needs
from recsys.data.batch import Batch
from recsys.errors import UserError
from recsys.models.base import WIDEST, Model
from recsys.models.columns import take_rows
from recsys.models.halves import sum_of_rows
from recsys.models.items import ItemVectors, gather
from recsys.models.metrics import Evaluator, RetrievalEvaluator

# Scores that a loss computes at once: what fits into a core's cache, or enough to fill a GPU.
_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass
class RetrievalConfig(ModelConfig):
    """Keys of all retrieval models."""

    top_k: list[int] = bounded([10, 20], 1, 2**31 - 1)  # values of K for the metrics
    metrics: list[RetrievalMetric] = field(default_factory=lambda: [RetrievalMetric.recall, RetrievalMetric.ndcg])

    free: ClassVar[tuple[str, ...]] = ("top_k", "metrics")

    def metric_names(self, config: Config) -> list[str]:
        return [f"{metric.value}@{k}" for k in self.top_k for metric in self.metrics]

    def check(self, config: Config) -> None:
        for key in ("top_k", "metrics"):
            values = getattr(self, key)
            if len(set(values)) < max(1, len(values)):
                raise UserError(f"config key 'model.{key}' must name at least one entry, and each once")


@dataclass
class ListConfig(RetrievalConfig):
    """Keys of models whose rows of data.train are lists of users, compared with items of one table.

    Negatives are drawn from data.items, the same for all rows of a global batch.
    """

    history: str = MISSING  # the feature with the items of a user, the oldest first if their order counts
    item_id: str = MISSING  # the item feature that identifies items; it uses the same table
    dim: int = bounded(64, 1, WIDEST)  # the `embedding_dim` of the tables
    sampled_negatives: int = bounded(1024, 1, 2**24)  # items to draw from data.items for each global batch

    free: ClassVar[tuple[str, ...]] = (*RetrievalConfig.free, "sampled_negatives")

    def needs(self) -> Needs:
        return Needs(
            labels=False,
            sequences=(self.history,),
            item_id=self.item_id,
            item_features=(self.item_id,),
            items_in_rows=False,
            vector_dim=self.dim,
            sampled_items=self.sampled_negatives,
        )

    def check_lists(self, config: Config) -> None:
        """Raise a UserError if the features of lists and of items, which exist, do not fit each other."""
        history, item = config.features[self.history], config.features[self.item_id]
        if history.table != item.table:
            raise UserError(
                f"config key 'model.history': its items are compared with those of model.item_id, so both need the "
                f"same table, found tables.{history.table} and tables.{item.table}"
            )
        if history.weights is not None:
            raise UserError(f"config key 'features.{self.history}.weights': model {self.name} reads none; drop it")
        if not config.data.items:
            raise UserError("config key 'data.items' is not set, but negatives are sampled from a file of all items")


class RetrievalModel(Model):
    """Base of models with a vector for each user and for each item, whose dot product is their score.

    The loss is over the whole batch, since rows are compared with items of other rows, or drawn ones. In evaluation the
    outputs are vectors of users and of items, each [rows, vector_dim].
    """

    config: Any  # its section of a config, a RetrievalConfig
    loss_by_rows = False
    _scores: int | None = None  # that the loss computes at once; None: as many as suit the device
    _most_pieces: int | None = None

    def predictions(self, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        users, items = outputs
        return {"score": (users * items).float().sum(dim=1)}

    def evaluator(self, items: ItemVectors | None) -> Evaluator:
        assert items is not None
        return RetrievalEvaluator(items, self.config.top_k, self.config.metrics)

    def rehearse(self, device: torch.device) -> None:
        self._scores, self._most_pieces = _SCORES[device.type], 2

    def pieces_of_loss(self, device: torch.device) -> tuple[int, int | None]:
        """Return how many scores the loss computes at once, and how many pieces of them at most (None: all)."""
        return self._scores or _SCORES[device.type], self._most_pieces


class ListModel(RetrievalModel):
    """Base of models with a `ListConfig`: every item of a user's list is compared with drawn items."""

    def denominator(self, batch: Batch) -> torch.Tensor:
        return sum_of_rows(batch.weights * batch.ids[self.config.history].lengths(), self.num_parts)

    def drawn(self, items: torch.Tensor, batch: Batch) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return where a batch's drawn items begin, and vectors and table rows of all ranks' drawn items; collective.

        Both are sorted by table row, which is -1 for the filler of a rank that has drawn one item less.

        Args:
            items: vectors of the batch's items, [rows, dim].
        """
        start = len(items) if batch.sampled is None else batch.sampled.start
        keys, order = gather(first_ids(batch, self.config.item_id)[start:]).sort()
        return start, take_rows(gather_rows(items[start:]), order), keys


def check_vectors(outputs: Any, num_rows: int, dim: int) -> None:
    """Refuse outputs in evaluation that are not vectors of users and of items, [num_rows, dim] each.

    Raises:
        UserError: they have other shapes, as a user's own model may return.
    """
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    shapes = [list(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts]
    if shapes != [[num_rows, dim]] * 2:
        given = " and ".join(map(str, shapes))
        raise UserError(
            f"config key 'model.name': for {num_rows} rows the model's forward gave {given} in evaluation, but must "
            f"give vectors of users and of items, [rows, {dim}] each by Needs.vector_dim; return these, or set it"
        )


def pieces(num_rows: int, step: int, most: int | None) -> Iterator[slice]:
    """Yield slices of `step` rows each, at most `most` of them; None: all."""
    return (slice(start, start + step) for start in range(0, num_rows, step)[:most])


def first_ids(batch: Batch, feature: str) -> torch.Tensor:
    """Return the first table row of each list of a feature, -1 if it is empty: [rows] integers."""
    jagged = batch.ids[feature]
    padded = torch.cat([jagged.values(), jagged.values().new_full((1,), -1)])
    first = jagged.offsets()[:-1].long().clamp(max=len(padded) - 1)
    return torch.where(jagged.lengths() > 0, padded[first], -1)


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in order of rank; the gradient of a row is summed over the ranks that used it."""
    gathered: torch.Tensor = _GatherRows.apply(rows)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]
