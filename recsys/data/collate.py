"""Collation: rows of windows are copied into one block of memory, the batch that travels from loader to model."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.data.batch import Batch, MicroBatches
from recsys.data.order import Position
from recsys.data.pool import Block, BlockPool, padded
from recsys.data.spec import BatchSpec, IdColumn
from recsys.data.window import Columns, Ragged

_LARGE_BYTES = 1 << 17  # NumPy joins smaller arrays in half the time


class Chunk(NamedTuple):
    """Rows `start` … `stop` - 1 of `columns`, which become rows `at` … of a batch."""

    columns: Columns
    start: int
    stop: int
    at: int


def collate(
    chunks: Sequence[Chunk],
    num_rows: int,
    spec: BatchSpec,
    position: Position,
    pool: BlockPool,
    micro_batches: MicroBatches,
    first_row: int = 0,
) -> Batch:
    """Join chunks into a batch of `num_rows` rows; rows that no chunk fills have weight 0 and empty lists.

    Args:
        chunks: in ascending order of `at`. spec: the one with which their columns were converted.
        position: where training stands after this batch. pool: gives the memory of the batch.
        first_row: place of the first row in the global batch.
    """
    rows = _Rows(chunks, num_rows)
    ids = _Jagged(spec.ids, "ids", rows, spec.dtype, spec.weighted)
    lists = _Jagged(spec.lists, "lists", rows, spec.dtype, weighted=False) if spec.lists else None
    widths = [spec.widths[0] + spec.vector_dim, *spec.widths[1:]]
    num_bytes = sum(padded(4 * num_rows * width) for width in widths)
    block = pool.take(ids.num_bytes + (lists.num_bytes if lists else 0) + num_bytes)
    numbers = [block.array((num_rows, width), np.float32) for width in widths]
    _copy_numbers(rows, spec.widths, numbers)
    floats, labels, *known, weights = map(torch.from_numpy, numbers)
    num_bad = sum(int(p.columns.bad[p.start : p.stop].sum()) for p in chunks if p.columns.bad is not None)
    keyed, lengths = ids.build(block)
    bounds = micro_batches.bounds(lengths)
    return Batch(
        ids=keyed,
        floats=floats,
        labels=labels,
        weights=weights[:, 0],
        known_labels=known[0] if known else None,
        lists=lists.build(block)[0] if lists else None,
        num_rows=rows.num_filled - num_bad,
        num_bad_rows=num_bad,
        micro_batches=bounds,
        position=position,
        fence=block.fence,
        id_bounds=_id_bounds(lengths, bounds) if len(bounds) > 2 else (),
        first_row=first_row,
        content=torch.from_numpy(block.used),
    )


def _copy_numbers(rows: "_Rows", widths: list[int], arrays: list[np.ndarray]) -> None:
    """Fill arrays, [rows, width] each, from `Columns.floats` split by these widths; rows without a chunk get 0.

    The first array has more columns, for `Columns.vectors`.
    """
    if rows.num_filled < rows.num_rows:
        for array in arrays:
            array[:] = 0
    if not rows.chunks:
        return
    at = 0
    for array, width in zip(arrays, widths, strict=True):
        columns = slice(at, at + width)
        parts = [chunk.columns.floats[columns, chunk.start : chunk.stop].T for chunk in rows.chunks]
        rows.fill(array[:, :width], parts)
        at += width
    if widths[0] < arrays[0].shape[1]:
        parts = [chunk.columns.vectors[chunk.start : chunk.stop] for chunk in rows.chunks]
        rows.fill(arrays[0][:, widths[0] :], parts)


def _join(parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Concatenate arrays into `out`; large ones by torch, since NumPy takes Python's lock again after each of them."""
    if out.nbytes < _LARGE_BYTES:
        np.concatenate(parts, out=out)
    else:
        torch.cat([torch.from_numpy(part) for part in parts], out=torch.from_numpy(out))


def _id_bounds(lengths: np.ndarray, bounds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    sizes = np.add.reduceat(lengths, bounds[:-1], axis=1, dtype=np.int64)
    return tuple((0, *ends) for ends in np.cumsum(sizes, axis=1).tolist())


class _Rows:
    """The rows of a batch that its chunks fill.

    Attributes:
        num_rows: rows of the batch. num_filled: rows of the chunks.
        places: index of the chunks' rows in the batch, in order; has no meaning without chunks.
    """

    def __init__(self, chunks: Sequence[Chunk], num_rows: int) -> None:
        self.chunks, self.num_rows = chunks, num_rows
        self.num_filled = sum(chunk.stop - chunk.start for chunk in chunks)
        self.places: slice | np.ndarray = slice(num_rows)
        if chunks and self.num_filled < num_rows:
            self.places = np.concatenate([np.arange(p.at, p.at + p.stop - p.start) for p in chunks])

    def fill(self, out: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Write the arrays, one for each chunk, end to end into the filled rows of `out`."""
        if self.num_filled == self.num_rows:
            _join(parts, out)
        else:
            out[self.places] = np.concatenate(parts)


class _Jagged:
    """A KeyedJaggedTensor under construction.

    It is feature-major: all rows of the first key, then all of the second … Neighbouring features that have one id in
    every row of the batch are copied together.
    """

    def __init__(
        self, columns: Sequence[IdColumn], which: Literal["ids", "lists"], rows: _Rows, dtype: np.dtype, weighted: bool
    ) -> None:
        self._keys, self._rows, self._dtype, self._weighted = [column.name for column in columns], rows, dtype, weighted
        self._columns: list[Sequence[int | Ragged]] = [getattr(chunk.columns, which) for chunk in rows.chunks]
        single = {chunk.columns.single[which] for chunk in rows.chunks}
        self._scalar = tuple(map(all, zip(*single, strict=True))) if single else (True,) * len(columns)
        self._runs = _find_runs(self._scalar)
        self._total = sum(self._num_values(run) for run in self._runs)

    @property
    def num_bytes(self) -> int:
        """Bytes that `build` needs from a block."""
        weights = padded(4 * self._total) if self._weighted else 0
        return padded(self._dtype.itemsize * self._total) + padded(4 * len(self._keys) * self._rows.num_rows) + weights

    def build(self, block: Block) -> tuple[KeyedJaggedTensor, np.ndarray]:
        """Return the tensor, and its lengths as an array [keys, rows] int32."""
        rows = self._rows
        values = block.array((self._total,), self._dtype)
        lengths = block.array((len(self._keys), rows.num_rows), np.int32)
        weights = block.array((self._total,), np.float32) if self._weighted else None
        if rows.num_filled < rows.num_rows:
            lengths[:] = 0
        at = 0
        for run in self._runs if rows.chunks else ():
            stop = at + self._num_values(run)
            if self._scalar[run.start]:
                self._copy_scalars(run, values[at:stop].reshape(len(run), rows.num_filled))
                lengths[run.start : run.stop, rows.places] = 1
                if weights is not None:
                    weights[at:stop] = 1
            else:
                self._copy_lists(
                    run.start, values[at:stop], lengths[run.start], None if weights is None else weights[at:stop]
                )
            at = stop
        has_one_each = all(self._scalar) and rows.num_filled == rows.num_rows
        keyed = KeyedJaggedTensor(
            keys=self._keys,
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths).view(-1),
            offsets=_numbered(self._total + 1) if has_one_each else None,
            # Passed here, because torchrec would otherwise sum the lengths on the GPU and wait for it.
            length_per_key=[rows.num_rows] * len(self._keys) if has_one_each else lengths.sum(axis=1).tolist(),
            weights=None if weights is None else torch.from_numpy(weights),
        )
        return keyed, lengths

    def _num_values(self, run: range) -> int:
        if self._scalar[run.start]:
            return len(run) * self._rows.num_filled
        total = 0
        for chunk, columns in zip(self._rows.chunks, self._columns, strict=True):
            lists = columns[run.start]
            if isinstance(lists, int):
                total += chunk.stop - chunk.start
            else:
                total += int(lists.offsets[chunk.stop] - lists.offsets[chunk.start])
        return total

    def _copy_scalars(self, run: range, values: np.ndarray) -> None:
        sources = []
        for chunk, columns in zip(self._rows.chunks, self._columns, strict=True):
            first = columns[run.start]
            assert isinstance(first, int)
            sources.append(chunk.columns.scalars[first : first + len(run), chunk.start : chunk.stop])
        np.concatenate(sources, axis=1, out=values)

    def _copy_lists(self, k: int, values: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None) -> None:
        """Fill in the values of a feature, the lengths of its lists, and its weights."""
        lists = [_lists(columns[k], chunk) for chunk, columns in zip(self._rows.chunks, self._columns, strict=True)]
        sources, list_lengths, id_weights = zip(*lists, strict=True)
        _join(sources, values)
        self._rows.fill(lengths, list_lengths)
        if weights is not None:
            _join(
                [np.ones(len(s), np.float32) if w is None else w for s, w in zip(sources, id_weights, strict=True)],
                weights,
            )


def _lists(lists: int | Ragged, chunk: Chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the ids of a chunk's rows, the lengths of their lists, and the ids' weights if they have any."""
    rows = slice(chunk.start, chunk.stop)
    if isinstance(lists, int):
        return chunk.columns.scalars[lists, rows], np.ones(chunk.stop - chunk.start, np.int32), None
    inside = slice(lists.offsets[chunk.start], lists.offsets[chunk.stop])
    return lists.values[inside], lists.lengths[rows], None if lists.weights is None else lists.weights[inside]


@lru_cache(maxsize=4)
def _numbered(number: int) -> torch.Tensor:
    """Return 0 … number - 1, int32: the offsets of lists with one id each. It is shared, so it must not be changed."""
    return torch.arange(number, dtype=torch.int32)


@lru_cache(maxsize=64)
def _find_runs(scalar: tuple[bool, ...]) -> list[range]:
    """Return runs of neighbouring features that are copied together."""
    runs: list[range] = []
    for k in range(len(scalar)):
        if runs and scalar[k] and scalar[k - 1]:
            runs[-1] = range(runs[-1].start, k + 1)
        else:
            runs.append(range(k, k + 1))
    return runs
