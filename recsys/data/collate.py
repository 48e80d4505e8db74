"""Slices of windows to a `Batch`: every value is copied once, into one block of memory that is used again."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.data.batch import Batch
from recsys.data.buffers import Block, BlockPool, padded
from recsys.data.order import Position
from recsys.data.window import BatchSpec, Columns, Ragged


@dataclass(frozen=True)
class Piece:
    """Rows `start` … `stop` - 1 of some columns, which go to rows `at` … of a batch."""

    columns: Columns
    start: int
    stop: int
    at: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """Its rows in the batch."""
        return slice(self.at, self.at + self.num_rows)


@dataclass(frozen=True)
class MicroBatches:
    """How many rows, and how many ids in their lists, the dense part computes together at most; None: any number."""

    max_rows: int | None = None
    max_ids: int | None = None

    def bounds(self, lengths: np.ndarray) -> tuple[int, ...]:
        """Return the bounds of micro-batches in order, as few as can be; a row with more ids is one of its own.

        Args:
            lengths: ids of each feature and row, [features, rows].
        """
        num_rows = lengths.shape[1]
        if self.max_ids is None:
            step = self.max_rows or num_rows
            return (*range(0, num_rows, step), num_rows)
        ends, bounds = np.cumsum(lengths.sum(axis=0), dtype=np.int64), [0]
        while bounds[-1] < num_rows:
            start = bounds[-1]
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + self.max_ids, side="right")))
            bounds.append(min(stop, num_rows, start + (self.max_rows or num_rows)))
        return tuple(bounds)


def collate(
    pieces: Sequence[Piece],
    num_rows: int,
    spec: BatchSpec,
    position: Position,
    pool: BlockPool,
    micro_batches: MicroBatches,
) -> Batch:
    """Join pieces into a batch of `num_rows` rows; rows that no piece fills have weight 0 and empty lists.

    Args:
        pieces: in ascending order of `at`.
        num_rows: rows of the batch.
        spec: the one that the columns were converted with.
        position: where training stands after this batch.
        pool: where the memory of the batch is taken from.
        micro_batches: bounds of what the dense part computes together.
    """
    kept = pieces, num_rows, spec.dtype
    ids = _Jagged([part.name for part in spec.ids], [p.columns.ids for p in pieces], *kept, spec.weighted)
    lists = _Jagged([part.name for part in spec.lists], [p.columns.lists for p in pieces], *kept, False)
    num_floats = len(spec.floats)
    block = pool.take(ids.num_bytes + lists.num_bytes + padded(4 * num_rows * num_floats) + 2 * padded(4 * num_rows))
    floats = block.array((num_rows, num_floats), np.float32)
    labels, weights = (block.array((num_rows,), np.float32) for _ in range(2))
    if sum(piece.num_rows for piece in pieces) < num_rows:
        for array in (floats, labels, weights):
            array[:] = 0
    for piece in pieces:
        source = piece.columns.floats[:, piece.start : piece.stop]
        floats[piece.rows] = source[:-2].T
        labels[piece.rows], weights[piece.rows] = source[-2:]
    num_bad = sum(int(p.columns.bad[p.start : p.stop].sum()) for p in pieces if p.columns.bad is not None)
    keyed = ids.build(block)
    lengths = keyed.lengths().numpy().reshape(len(spec.ids), num_rows)
    bounds = micro_batches.bounds(lengths)
    return Batch(
        ids=keyed,
        floats=torch.from_numpy(floats),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(weights),
        lists=lists.build(block) if spec.lists else None,
        num_rows=sum(piece.num_rows for piece in pieces) - num_bad,
        num_bad_rows=num_bad,
        micro_batches=bounds,
        position=position,
        fence=block.fence,
        id_bounds=_id_bounds(lengths, bounds) if len(bounds) > 2 else (),
    )


def _id_bounds(lengths: np.ndarray, bounds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    sizes = np.add.reduceat(lengths, bounds[:-1], axis=1, dtype=np.int64)
    return tuple((0, *ends) for ends in np.cumsum(sizes, axis=1).tolist())


class _Jagged:
    """A KeyedJaggedTensor under construction.

    It is feature-major: all rows of the first key, then of the second … Neighbouring features that have one id in
    every row of the batch are copied as one.
    """

    def __init__(
        self,
        keys: list[str],
        columns: Sequence[Sequence[int | Ragged]],
        pieces: Sequence[Piece],
        num_rows: int,
        dtype: np.dtype,
        weighted: bool,
    ) -> None:
        self._keys, self._columns, self._pieces, self._num_rows = keys, columns, pieces, num_rows
        self._dtype = dtype
        self._filled = sum(piece.num_rows for piece in pieces)
        self._weighted = weighted
        kinds = {tuple([type(part) is int for part in parts]) for parts in columns}
        self._scalar = tuple(map(all, zip(*kinds, strict=True))) if pieces else (True,) * len(keys)
        self._runs = _find_runs(self._scalar)
        self._total = sum(self._num_values(run) for run in self._runs)

    @property
    def num_bytes(self) -> int:
        """What `build` takes of a block."""
        weights = padded(4 * self._total) if self._weighted else 0
        return padded(self._dtype.itemsize * self._total) + padded(4 * len(self._keys) * self._num_rows) + weights

    def build(self, block: Block) -> KeyedJaggedTensor:
        values = block.array((self._total,), self._dtype)
        lengths = block.array((len(self._keys), self._num_rows), np.int32)
        weights = block.array((self._total,), np.float32) if self._weighted else None
        if self._filled < self._num_rows:
            lengths[:] = 0
        at = 0
        for run in self._runs:
            stop = at + self._num_values(run)
            if self._scalar[run.start]:
                self._copy_scalars(run, values[at:stop].reshape(len(run), self._filled), lengths)
                if weights is not None:
                    weights[at:stop] = 1
            else:
                self._copy_lists(
                    run.start, values[at:stop], lengths[run.start], None if weights is None else weights[at:stop]
                )
            at = stop
        return KeyedJaggedTensor(
            keys=self._keys,
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths.reshape(-1)),
            weights=None if weights is None else torch.from_numpy(weights),
        )

    def _num_values(self, run: range) -> int:
        if self._scalar[run.start]:
            return len(run) * self._filled
        total = 0
        for piece, columns in zip(self._pieces, self._columns, strict=True):
            part = columns[run.start]
            total += (
                piece.num_rows if isinstance(part, int) else int(part.offsets[piece.stop] - part.offsets[piece.start])
            )
        return total

    def _copy_scalars(self, run: range, values: np.ndarray, lengths: np.ndarray) -> None:
        at = 0
        for piece, columns in zip(self._pieces, self._columns, strict=True):
            first = columns[run.start]
            assert isinstance(first, int)
            source = piece.columns.scalars[first : first + len(run), piece.start : piece.stop]
            values[:, at : at + piece.num_rows] = source
            lengths[run.start : run.stop, piece.rows] = 1
            at += piece.num_rows

    def _copy_lists(self, k: int, values: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None) -> None:
        at = 0
        for piece, columns in zip(self._pieces, self._columns, strict=True):
            part = columns[k]
            if isinstance(part, int):
                source, given = piece.columns.scalars[part, piece.start : piece.stop], None
                lengths[piece.rows] = 1
            else:
                inside = slice(part.offsets[piece.start], part.offsets[piece.stop])
                source, given = part.values[inside], None if part.weights is None else part.weights[inside]
                lengths[piece.rows] = part.lengths[piece.start : piece.stop]
            values[at : at + len(source)] = source
            if weights is not None:
                weights[at : at + len(source)] = 1 if given is None else given
            at += len(source)


@lru_cache(maxsize=64)
def _find_runs(scalar: tuple[bool, ...]) -> list[range]:
    """Return the features that are copied together."""
    runs: list[range] = []
    for k in range(len(scalar)):
        if runs and scalar[k] and scalar[k - 1]:
            runs[-1] = range(runs[-1].start, k + 1)
        else:
            runs.append(range(k, k + 1))
    return runs
