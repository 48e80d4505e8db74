"""Rows of the tables that training has looked up, and so may have changed, since it was last asked."""

from typing import Any

import torch
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.config import Config
from recsys.tables.module_names import config_name
from recsys.tables.spec import local_pieces
from recsys.tables.updates import kernels, table_tensors

Offsets = tuple[int, ...]

_MARKED_AT_ONCE = 1 << 17  # ids: those of single steps come to marks that other work has pushed out of the caches


class TouchedRows:
    """Marks rows of the tables on this rank as training looks them up, from now on; a byte for each row.

    A row that is marked may be as it was: by a step that was left out, or a gradient of 0. Of a table with a penalty on
    all rows, all are marked.
    """

    def __init__(self, model: DistributedModelParallel, config: Config) -> None:
        self._marks: dict[tuple[str, Offsets], torch.Tensor] = {}
        self._lookups: list[_Lookups] = []
        for table, value in table_tensors(model).items():
            for shard, offsets in local_pieces(value):
                self._marks[table, offsets] = torch.zeros(len(shard), dtype=torch.bool, device=shard.device)
        for kind in (FusedOptimizerModule, BatchedDenseEmbeddingBag):
            for kernel in kernels(model, kind):
                tables = kernel.config.embedding_tables
                marks = [self._marks[_place(table)] for table in tables for _ in range(table.num_features())]
                whole = [
                    self._marks[_place(table)] for table in tables if config.tables[config_name(table.name)].l2_all_rows
                ]
                self._lookups.append(_Lookups(marks, whole))
                kernel.register_forward_pre_hook(self._lookups[-1])

    def clear(self) -> None:
        """Forget what was touched."""
        self._mark()  # what waits is to be forgotten too
        for marks in self._marks.values():
            marks.zero_()

    def _mark(self) -> None:
        for lookups in self._lookups:
            lookups.mark()

    def take(self, table: str, value: Any, start: int, stop: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return the touched ones of some rows of a table, as far as they are on this rank, and forget them.

        Args:
            value: the table as `table_tensors` gives it. start, stop: of the rows.

        Returns:
            For each piece of the table the column where it begins; the rows, int64 [n], ascending; their weights in
            host memory, [n, columns]. Of a table that every rank holds, the rows that this one has looked up.
        """
        self._mark()
        taken = []
        for shard, offsets in local_pieces(value):
            first = offsets[0]
            some = slice(max(0, start - first), max(0, stop - first))
            marks = self._marks[table, offsets][some]
            rows = marks.nonzero().squeeze(1) + some.start
            if len(rows):
                taken.append((offsets[1], (rows + first).cpu(), shard.detach()[rows].cpu()))
                marks.zero_()
        return taken


def _place(table: Any) -> tuple[str, Offsets]:
    shard = table.local_metadata  # None of a table that every rank holds
    return config_name(table.name), (0, 0) if shard is None else tuple(shard.shard_offsets)


class _Lookups:
    """Keeps the rows that a kernel looks up in training until there are many, and marks them; a forward pre-hook.

    Args:
        marks: of each feature's table. whole: of tables of which all rows are trained.
    """

    def __init__(self, marks: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
        self._marks, self._whole = marks, whole
        self._waiting: list[tuple[torch.Tensor, list[int]]] = []
        self._num_ids = 0

    def __call__(self, _: Any, inputs: tuple[KeyedJaggedTensor]) -> None:
        """Take the rows of a lookup, by feature."""
        if not torch.is_grad_enabled():
            return
        rows = inputs[0].values()
        self._waiting.append((rows.clone(), inputs[0].offset_per_key()))
        self._num_ids += len(rows)
        if self._num_ids >= _MARKED_AT_ONCE:
            self.mark()

    def mark(self) -> None:
        """Mark what has been looked up."""
        for of_table in self._whole if self._waiting else ():
            of_table.fill_(True)
        for feature, of_table in enumerate(self._marks):
            for rows, bounds in self._waiting:
                of_table.index_fill_(0, rows[slice(*bounds[feature : feature + 2])].long(), True)
        self._waiting, self._num_ids = [], 0
