"""Updates of tables by rules in torch, if FBGEMM lacks the optimizer; they run in the backward pass of its kernel."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.config import SparsityConfig, TableOptimizerConfig
from recsys.tables import rules
from recsys.tables.lookup import Cut
from recsys.tables.rules import Touched

# Elements updated at a time: on CPUs so few that temporaries stay in the cache.
_ELEMENTS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}


@dataclass
class TorchTable:
    """A table, or a shard of one, in this rank's memory, with the state of its optimizer.

    Attributes:
        weights: [rows, columns] FP32 or FP16, the lookup's own memory.
        offset: row and column of the table where this part begins.
        sparsity: penalties that make rows 0, if any.
        l2_all_rows: for a replicated table, the factor of the penalty on all its rows; see `TableConfig`.
        features: for a replicated table, the features that look it up.
        learning_rate: that of the next update; num_updates: how many were done before it.
        state: FP32, [rows] or [rows, columns] each.
    """

    name: str
    weights: torch.Tensor
    settings: TableOptimizerConfig
    sparsity: SparsityConfig | None = None
    offset: tuple[int, ...] = (0, 0)
    features: Sequence[str] = ()
    l2_all_rows: float = 0.0
    learning_rate: float = 0.0
    num_updates: int = 0
    state: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shape, rule = self.weights.shape, self.settings.name.value
        shapes = [shape[:1]] * rule.row_state + [shape] * rule.element_state
        self.state = [torch.zeros(size, device=self.weights.device) for size in shapes]

    def add_penalty(self, gradient: torch.Tensor) -> None:
        """Add the gradient of the penalty on all rows, [rows, columns] FP32, to that of the loss."""
        at_once = self._rows_at_once(gradient.device)
        # In parts, since a CPU makes an FP32 copy of any FP16 tensor that it adds.
        for part, weights in zip(gradient.split(at_once), self.weights.split(at_once), strict=True):
            part.add_(weights, alpha=self.l2_all_rows)

    def update(self, rows: torch.Tensor, gradient: torch.Tensor, places: torch.Tensor) -> None:
        """Update the rows of a batch and no others.

        Args:
            rows: [n], distinct. gradient: of the mean loss, [m, columns] FP32. places: [n], where each row's is in it.
        """
        at_once = self._rows_at_once(rows.device)
        for chunk, at in zip(rows.split(at_once), places.split(at_once), strict=True):
            self._apply(chunk, gradient[at])

    def update_looked_up(self, gradient: torch.Tensor, marks: torch.Tensor) -> None:
        """Update the rows whose mark, [rows], is not 0, by a gradient for all rows, [rows, columns] FP32."""
        small = self.weights.numel() <= _ELEMENTS_AT_ONCE[gradient.device.type]
        if small and self.settings.name.value.leaves_idle_rows and self.sparsity is None:
            self._apply(slice(None), gradient)  # faster than picking rows, with the same result
        else:
            rows = marks.nonzero().squeeze(1)
            self.update(rows, gradient, rows)

    def _rows_at_once(self, device: torch.device) -> int:
        return max(1, _ELEMENTS_AT_ONCE[device.type] // self.weights.shape[1])

    def _apply(self, rows: torch.Tensor | slice, gradient: torch.Tensor) -> None:
        rule, state = getattr(rules, self.settings.name.name), [values[rows] for values in self.state]
        touched = Touched(self.weights[rows], gradient, state, self.settings, self.learning_rate, self.num_updates + 1)
        trained = rule(touched)
        if self.sparsity is not None:
            trained = rules.shrunk(trained, self.sparsity, self.learning_rate)
        self.weights[rows] = trained.to(self.weights.dtype)
        if isinstance(rows, torch.Tensor):  # for a slice, the rule has changed the state itself
            for values, changed in zip(self.state, state, strict=True):
                values[rows] = changed


def update_in_torch(kernel: Any, tables: list[TorchTable]) -> None:
    """Have the backward pass of an FBGEMM kernel update its tables by rules in torch; FBGEMM gets no gradient.

    Args:
        kernel: torchrec's module around FBGEMM's. tables: its tables, in their order.
    """

    def cut(_: Any, inputs: tuple[KeyedJaggedTensor], vectors: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and vectors.requires_grad):
            return vectors
        update = partial(_update, kernel.emb_module, tables, inputs[0])
        trained: torch.Tensor = Cut.apply(vectors.new_empty(0, requires_grad=True), vectors.detach(), update)
        return trained

    kernel.register_forward_hook(cut)


@torch.no_grad()
def _update(fbgemm: Any, tables: list[TorchTable], ids: KeyedJaggedTensor, gradient: torch.Tensor) -> None:
    """Update tables from the gradient of their output, [rows, columns of all features] or [ids, columns]."""
    owners, counts = fbgemm.feature_table_map, ids.length_per_key()
    if fbgemm.pooling_mode is PoolingMode.NONE:
        gradients = [part.float for part in gradient.split(counts)]
    else:
        columns = gradient.split([tables[owner].weights.shape[1] for owner in owners], dim=1)
        lengths = ids.lengths().view(len(owners), -1)
        weights = ids.weights_or_none()
        weights_by_feature = [None] * len(owners) if weights is None else weights.split(counts)
        of_features = zip(columns, lengths, weights_by_feature, counts, strict=True)
        gradients = [partial(gradient_by_id, *of_feature) for of_feature in of_features]
    values = ids.values().split(counts)
    for number, table in enumerate(tables):
        features = [feature for feature, owner in enumerate(owners) if owner == number]
        rows, places = torch.cat([values[feature] for feature in features]).unique(return_inverse=True)
        sums = torch.zeros(len(rows), table.weights.shape[1], device=rows.device)
        for feature, where in zip(features, places.split([counts[feature] for feature in features]), strict=True):
            sums.index_add_(0, where, gradients[feature]())  # one feature at a time, since they are large
        table.update(rows, sums, torch.arange(len(rows), device=rows.device))


def gradient_by_id(
    gradient: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, num_ids: int
) -> torch.Tensor:
    """Return the gradients of ids' vectors, [ids, columns] FP32, from those of sums over lists, [rows, columns]."""
    by_id = gradient.float().repeat_interleave(lengths, dim=0, output_size=num_ids)
    return by_id if weights is None else by_id.mul_(weights[:, None])
