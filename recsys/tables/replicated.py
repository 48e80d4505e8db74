"""Replicated tables: every rank holds them whole, and trains them by FBGEMM's rules."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys.config import TableOptimizerConfig

_STATE = "momentum1"  # FBGEMM's name for the sums of squares
# Of a table that is updated: on CPU so few that what it takes besides stays in the cache.
_ELEMENTS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}


@dataclass
class ReplicatedTable:
    """One replicated table with the state of its optimizer.

    Attributes:
        weights: [num_embeddings, embedding_dim] FP32 or FP16, the lookup's own memory.
        features: that it is looked up for.
        learning_rate: of the next update.
    """

    name: str
    weights: torch.Tensor
    features: list[str]
    optimizer: TableOptimizerConfig
    learning_rate: float = 0.0
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, columns = self.weights.shape
        rule = self.optimizer.name.value
        if rule.row_state or rule.element_state:
            shape = (rows,) if rule.row_state else (rows, columns)
            self.state[_STATE] = torch.zeros(shape, device=self.weights.device)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next updates."""
        self.learning_rate = rate


class ReplicatedTables:
    """Updates replicated tables from the gradients of their pooled embeddings.

    torchrec leaves such tables to the optimizer of the dense part, with gradients of the weights' own type, so that
    what is learned would depend on the plan. Here gradients are summed in FP32, over all ranks, and the rules are those
    of FBGEMM's optimizers (fbgemm_gpu/docs, `OptimType`). A step takes time in proportion to the tables, not to the
    batch.
    """

    def __init__(self, tables: Iterable[ReplicatedTable]) -> None:
        self.tables = list(tables)

    def update(self, ids: KeyedJaggedTensor, gradients: dict[str, torch.Tensor]) -> None:
        """Train the tables on one batch; collective.

        Args:
            ids: this rank's table rows.
            gradients: of the mean loss by the pooled embeddings of this rank, [rows, embedding_dim] by feature.
        """
        if not self.tables:
            return
        sizes = [table.weights.numel() for table in self.tables]
        total = torch.zeros(sum(sizes), device=self.tables[0].weights.device)
        sums = [flat.view(t.weights.shape) for flat, t in zip(total.split(sizes), self.tables, strict=True)]
        for table, into in zip(self.tables, sums, strict=True):
            for feature in table.features:
                _add_rows(into, ids[feature], gradients[feature])
        dist.all_reduce(total)
        for table, gradient in zip(self.tables, sums, strict=True):
            rows = max(1, _ELEMENTS_AT_ONCE[total.device.type] // table.weights.shape[1])
            for start in range(0, len(table.weights), rows):
                _apply(table, slice(start, start + rows), gradient[start : start + rows])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state, by `TABLE/STATE`."""
        return {f"{table.name}/{name}": value for table in self.tables for name, value in table.state.items()}


def _add_rows(into: torch.Tensor, jagged: JaggedTensor, gradient: torch.Tensor) -> None:
    """Add to `into`, [num_embeddings, embedding_dim], the gradient by the table of the sums of one feature's rows."""
    by_id = gradient.float().repeat_interleave(jagged.lengths(), dim=0, output_size=jagged.values().numel())
    if jagged.weights_or_none() is not None:
        by_id = by_id * jagged.weights()[:, None]
    into.index_add_(0, jagged.values(), by_id)


def _apply(table: ReplicatedTable, rows: slice, gradient: torch.Tensor) -> None:
    """Update some rows of a table by the gradient by them, [rows, embedding_dim]."""
    config, weights = table.optimizer, table.weights[rows]
    step = gradient * table.learning_rate
    if table.state:
        # Rows that no id touched have no gradient: nothing is added, and their step is 0 / (… + eps).
        squares, state = gradient.square(), table.state[_STATE][rows]
        rowwise = config.name.is_row_wise
        state += squares.mean(dim=1) if rowwise else squares
        root = state.sqrt().add_(config.eps)
        step /= root[:, None] if rowwise else root
    if config.name.value.element_state and weights.device.type == "cpu":
        step = step.to(weights.dtype)  # as FBGEMM's kernel does there, before it subtracts
    weights.copy_(weights.float().sub_(step))
