"""Rows of the tables that training has looked up, and so may have changed, since `TouchedRows` was last read."""

from typing import Any

import torch
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.config import Config
from recsys.tables.spec import local_shards
from recsys.tables.updates import Offsets, kernels, place_of, table_tensors

_MARKED_AT_ONCE = 1 << 17  # ids: between steps the marks leave the CPU's caches, so marking after each would be slow


class TouchedRows:
    """Marks rows of the tables on this rank as training looks them up, from now on; a byte for each row.

    A marked row may be unchanged: its step was skipped, or its gradient was 0. A penalty on all rows of a table marks
    all of them.
    """

    def __init__(self, model: DistributedModelParallel, config: Config) -> None:
        self._marks: dict[tuple[str, Offsets], torch.Tensor] = {}
        self._lookups: list[_Lookups] = []
        for table, value in table_tensors(model).items():
            for shard, offsets in local_shards(value):
                self._marks[table, offsets] = torch.zeros(len(shard), dtype=torch.bool, device=shard.device)
        for kernel in (*kernels(model, FusedOptimizerModule), *kernels(model, BatchedDenseEmbeddingBag)):
            tables = kernel.config.embedding_tables
            marks = [self._marks[place_of(table)] for table in tables for _ in range(table.num_features())]
            places = [place_of(table) for table in tables]
            all_rows = [self._marks[table, offsets] for table, offsets in places if config.tables[table].l2_all_rows]
            self._lookups.append(_Lookups(marks, all_rows))
            kernel.register_forward_pre_hook(self._lookups[-1])

    def clear(self) -> None:
        """Forget what was touched."""
        self._mark()  # so that lookups not marked yet are forgotten too
        for marks in self._marks.values():
            marks.zero_()

    def _mark(self) -> None:
        for lookups in self._lookups:
            lookups.mark()

    def take(self, table: str, value: Any, start: int, stop: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return and forget the touched rows of this rank among rows `start` … `stop` - 1 of a table.

        Args:
            value: the table as returned by `table_tensors`.

        Returns:
            For each shard of the table: the column where it begins; the rows, int64 [n], ascending; their weights in
            host memory, [n, columns]. For a table that every rank holds, these are the rows looked up on this rank.
        """
        self._mark()
        touched = []
        for shard, offsets in local_shards(value):
            first = offsets[0]
            bounds = slice(max(0, start - first), max(0, stop - first))
            marks = self._marks[table, offsets][bounds]
            rows = marks.nonzero().squeeze(1) + bounds.start
            if len(rows):
                touched.append((offsets[1], (rows + first).cpu(), shard.detach()[rows].cpu()))
                marks.zero_()
        return touched


class _Lookups:
    """Collects the rows that a kernel looks up in training, and marks them when there are many; a forward pre-hook.

    Args:
        marks: for each feature those of its table. all_rows: marks of the tables with a penalty on all rows.
    """

    def __init__(self, marks: list[torch.Tensor], all_rows: list[torch.Tensor]) -> None:
        self._marks, self._all_rows = marks, all_rows
        self._waiting: list[tuple[torch.Tensor, list[int]]] = []
        self._num_ids = 0

    def __call__(self, _: Any, inputs: tuple[KeyedJaggedTensor]) -> None:
        """Note the rows of a lookup, by feature."""
        if not torch.is_grad_enabled():
            return
        rows = inputs[0].values()
        self._waiting.append((rows.clone(), inputs[0].offset_per_key()))
        self._num_ids += len(rows)
        if self._num_ids >= _MARKED_AT_ONCE:
            self.mark()

    def mark(self) -> None:
        """Mark what has been looked up."""
        if not self._waiting:
            return
        for marks in self._all_rows:
            marks.fill_(True)
        for feature, marks in enumerate(self._marks):
            for rows, bounds in self._waiting:
                marks.index_fill_(0, rows[slice(*bounds[feature : feature + 2])].long(), True)
        self._waiting, self._num_ids = [], 0
