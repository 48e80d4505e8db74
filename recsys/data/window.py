"""A window of rows, decoded, mapped and put into the order of training, column by column."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recsys.data.arrays import whole, with_nulls
from recsys.data.convert import Ids, convert_floats, convert_ids
from recsys.data.order import Segment, Window
from recsys.data.pool import BlockPool
from recsys.data.spec import BatchSpec, FloatColumn, Hidden, IdColumn
from recsys.data.storage import BadDataError
from recsys.errors import UserError, counted
from recsys.runtime.logs import logger
from recsys.runtime.loops import are_compiled, permute_lists, shuffle

_PERMUTED_AT_ONCE = 1 << 16  # lists
_JOINED_ROWS = 1 << 14  # segments of fewer rows are converted together
_SHORT = 16  # length of vectors; if they are longer, fewer rows are joined, since joining copies them

_Lists = tuple[np.ndarray, np.ndarray | None]  # values, and their weights


@dataclass(frozen=True)
class Ragged:
    """Lists of table rows: `values` [total], `lengths` int32 [rows], `offsets` int64 [rows + 1], `weights` [total]."""

    values: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None


@dataclass(frozen=True)
class Columns:
    """The rows of a window in their final order.

    Attributes:
        scalars: [features with one id per row, rows] int32 or int64, features in the order of the spec.
        ids, lists: for each feature its place in `scalars`, or its lists.
        floats: [sum of `BatchSpec.widths`, rows] float32: float features; labels; if some may be unknown, 1 for each
            label that is known and 0 for others; the weight.
        vectors: [rows, `BatchSpec.vector_dim`] float32: float features with several numbers per row.
        bad: bool [rows], rows that could not be read, or None if all could.
    """

    num_rows: int
    scalars: np.ndarray
    ids: list[int | Ragged]
    lists: list[int | Ragged]
    floats: np.ndarray
    vectors: np.ndarray
    bad: np.ndarray | None

    @cached_property
    def single(self) -> dict[str, tuple[bool, ...]]:
        """For `ids` and for `lists`: whether each feature has one id in every row."""
        return {name: tuple(isinstance(part, int) for part in getattr(self, name)) for name in ("ids", "lists")}

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        ragged = [part for part in (*self.ids, *self.lists) if isinstance(part, Ragged)]
        arrays = [self.scalars, self.floats, self.vectors]
        for part in ragged:
            arrays += [part.values, part.lengths, part.offsets]
            arrays += [] if part.weights is None else [part.weights]
        return sum(array.nbytes for array in arrays)


def load_window(
    window: Window, read: Callable[[Segment], pa.Table], spec: BatchSpec, pool: BlockPool, skip_bad: bool = False
) -> Columns:
    """Decode a window's segments and convert them, one after the other.

    Args:
        read: decodes a segment. pool: gives the memory of the arrays.
        skip_bad: mark the rows of a segment that cannot be decoded, instead of raising its error.

    Raises:
        UserError: names the file, row group and column that cannot be read or whose values do not fit the spec.
    """
    conversion = _Conversion(window, spec, pool)
    for segment in window.segments:
        try:
            table = read(segment)
        except BadDataError as error:
            if not skip_bad:
                raise
            logger.warning("%s left out: %s", counted(segment.num_rows, "row"), error)
            conversion.skip(segment.num_rows)
        else:
            conversion.add(segment, table)
    return conversion.columns()


def convert_table(table: pa.Table, spec: BatchSpec, of: Segment | None = None) -> Columns:
    """Convert rows in their order. Errors are those of `load_window`, and name the row group `of`, whose first rows
    these are."""
    segment = Segment("", 0, 0, table.num_rows) if of is None else replace(of, start=0, stop=table.num_rows)
    conversion = _Conversion(Window((segment,), None), spec, BlockPool())
    conversion.add(segment, table)
    return conversion.columns()


class _Conversion:
    """One window on its way from Arrow to `Columns`: converted segment by segment, then shuffled column by column.

    Small segments are converted together, because each conversion of a column takes some 50 microseconds.
    """

    def __init__(self, window: Window, spec: BatchSpec, pool: BlockPool) -> None:
        self._spec, self._pool, self._rows = spec, pool, window.num_rows
        self._joined_rows = _JOINED_ROWS // max(1, spec.vector_dim // _SHORT)
        self._permutation = window.permutation()
        # int32, because it takes half the memory of NumPy's int64, and torch accepts it.
        self._order = torch.from_numpy(np.zeros(0) if self._permutation is None else self._permutation).int()
        self._parts, self._dtype = [*spec.ids, *spec.lists], spec.dtype
        drawn = {part.hidden for part in spec.ids if part.hidden is not None and part.column is not None}
        self._hidden: dict[Hidden | None, np.ndarray] = {hidden: hidden.rows(window) for hidden in drawn}
        self._pieces: list[list[Ids]] = [[] for _ in self._parts]
        self._places: dict[int, int] | None = None  # part that may have one id per row → its place in `_scalars`
        self._scalars = np.empty((0, self._rows), self._dtype)
        self._floats = self._array((sum(spec.widths), self._rows), np.float32)
        self._vectors = self._array((self._rows, spec.vector_dim), np.float32)
        self._bad: list[slice] = []
        self._pending: list[tuple[Segment, pa.Table]] = []
        self._done = 0

    def add(self, segment: Segment, table: pa.Table) -> None:
        """Add the rows of the next segment."""
        if self._pending and (table.num_rows >= self._joined_rows or table.schema != self._pending[0][1].schema):
            self._convert_pending()
        self._pending.append((segment, table))
        if sum(len(rows) for _, rows in self._pending) >= self._joined_rows:
            self._convert_pending()

    def skip(self, num_rows: int) -> None:
        """Leave the next rows empty, because they cannot be read."""
        self._convert_pending()
        nothing = Ids(np.empty(0, self._dtype), np.zeros(num_rows, np.int32), None)
        for pieces in self._pieces:
            pieces.append(nothing)
        self._bad.append(slice(self._done, self._done + num_rows))
        self._done += num_rows

    def _convert_pending(self) -> None:
        pending, self._pending = self._pending, []
        try:
            for table in _joined_tables([table for _, table in pending]):
                self._convert(table)
        except (UserError, pa.ArrowException):
            for segment, table in pending:  # one by one, so that the message names the segment with the error
                with segment.named():
                    _Conversion(Window((segment,), None), self._spec, BlockPool())._convert(table)
            raise

    def _convert(self, table: pa.Table) -> None:
        rows = slice(self._done, self._done + table.num_rows)
        self._done = rows.stop
        places = self._place(table)
        for i, part in enumerate(self._parts):
            out = self._scalars[places[i], rows] if i in places else None
            self._pieces[i].append(self._convert_ids(part, table, rows, out))
        for columns, vector in self._spec.vectors:
            _fill_floats(vector, table, self._vectors[rows, columns])
        num_floats = len(self._spec.single_floats)
        for i, number in enumerate([*self._spec.single_floats, *self._spec.labels]):
            column = _fill_floats(number, table, self._floats[i, rows])
            if self._spec.has_unknown_labels and i >= num_floats:
                is_known = True if column is None else column.is_valid().to_numpy(zero_copy_only=False)
                self._floats[i + len(self._spec.labels), rows] = is_known
        weights = self._floats[-1, rows]
        weights[:] = 1
        if self._spec.weight is not None:
            _fill_floats(self._spec.weight, table, weights)
            if (least := weights.min(initial=0)) < 0:
                raise UserError(f"{self._spec.weight.title} holds {least}, but a weight must be 0 or more")
        if self._spec.negative_weight != 1:
            binary = [num_floats + i for i, part in enumerate(self._spec.labels) if part.binary]
            is_positive = (self._floats[binary, rows] > 0).any(axis=0)
            weights[~is_positive] *= self._spec.negative_weight

    def columns(self) -> Columns:
        """Return all rows added, shuffled into the order of the window."""
        self._convert_pending()
        bad = None
        if self._bad:
            bad = np.zeros(self._rows, np.bool_)
            for rows in self._bad:
                bad[rows] = True
                self._floats[:, rows] = 0  # with weight 0, so that they change nothing
                self._vectors[rows] = 0
            bad = bad if self._permutation is None else bad[self._permutation]
        features = [self._finished(i) for i in range(len(self._parts))]
        ids, lists = features[: len(self._spec.ids)], features[len(self._spec.ids) :]
        return Columns(
            self._rows,
            self._shuffled(self._scalars),
            ids,
            lists,
            self._shuffled(self._floats),
            self._shuffled_rows(self._vectors),
            bad,
        )

    def _array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self._pool.take(math.prod(shape) * np.dtype(dtype).itemsize).array(shape, dtype)

    def _place(self, table: pa.Table) -> dict[int, int]:
        if self._places is None:
            scalar = [i for i, part in enumerate(self._parts) if _may_be_scalar(part, table)]
            self._places = {i: place for place, i in enumerate(scalar)}
            self._scalars = self._array((len(scalar), self._rows), self._dtype)
        return self._places

    def _convert_ids(self, part: IdColumn, table: pa.Table, rows: slice, out: np.ndarray | None) -> Ids:
        if part.column is None and part.hidden is None:
            return Ids(np.empty(0, self._dtype), np.zeros(table.num_rows, np.int32), None)
        ids = pa.nulls(table.num_rows) if part.column is None else whole(table.column(part.column))
        if part.hidden in self._hidden:
            ids = with_nulls(ids, self._hidden[part.hidden][rows])
        weights = None if part.weights is None else whole(table.column(part.weights))
        return convert_ids(ids, part, self._dtype, out, weights, self._array)

    def _finished(self, i: int) -> int | Ragged:
        pieces = self._pieces[i]
        if self._places is not None and i in self._places and all(piece.lengths is None for piece in pieces):
            return self._places[i]
        lengths = _joined([np.ones(len(p.values), np.int32) if p.lengths is None else p.lengths for p in pieces])
        weighted = any(piece.weights is not None for piece in pieces)
        values, weights = _joined([piece.values for piece in pieces], self._array), None
        if weighted:
            weights = _joined([np.ones(len(p.values), np.float32) if p.weights is None else p.weights for p in pieces])
        if self._permutation is not None:
            into = self._array(values.shape, values.dtype), self._array(values.shape, np.float32) if weighted else None
            lengths = _permute_lists(self._order, lengths, (values, weights), into)
            values, weights = into
        offsets = self._array((len(lengths) + 1,), np.int64)
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(values, lengths, offsets, weights)

    def _shuffled_rows(self, vectors: np.ndarray) -> np.ndarray:
        if self._permutation is None or not vectors.size:
            return vectors
        shuffled = self._array(vectors.shape, vectors.dtype)
        torch.index_select(torch.from_numpy(vectors), 0, self._order, out=torch.from_numpy(shuffled))
        return shuffled

    def _shuffled(self, columns: np.ndarray) -> np.ndarray:
        if self._permutation is None:
            return columns
        shuffled = self._array(columns.shape, columns.dtype)
        near = self._array(columns.shape[1:], columns.dtype)
        if are_compiled():
            shuffle(columns, self._order.numpy(), near, shuffled)
            return shuffled
        for source, final in zip(columns, shuffled, strict=True):
            np.copyto(near, source)  # read in order, which brings the column into the cache for the random reads
            torch.index_select(torch.from_numpy(near), 0, self._order, out=torch.from_numpy(final))
        return shuffled


def _may_be_scalar(part: IdColumn, table: pa.Table) -> bool:
    if part.weights is not None or part.route is not None:
        return False
    if part.column is None:
        return part.hidden is not None
    return not pa.types.is_nested(table.schema.field(part.column).type)


def _fill_floats(part: FloatColumn, table: pa.Table, out: np.ndarray) -> pa.Array | None:
    """Convert a column, or the values of its condition, into `out`; return it unconverted, None if there is none."""
    if part.condition is not None:
        column = whole(part.condition.mask(table))
    elif part.column is not None:
        column = whole(table.column(part.column))
    else:
        out[:] = part.fill or 0.0
        return None
    convert_floats(column, part, out)
    return column


def _permute_lists(order: torch.Tensor, lengths: np.ndarray, source: _Lists, into: _Lists) -> np.ndarray:
    """Write lists in a new order into other memory; return their lengths in that order."""
    if are_compiled():
        return permute_lists(order.numpy(), lengths, source, into)
    import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm; processes with compiled loops never get here)

    tensors = [None if array is None else torch.from_numpy(array) for array in (lengths, *source)]
    values_out, weights_out = into
    lengths_out, at = np.empty_like(lengths), 0
    # The operator returns new tensors. For a block of lists, they are small enough for the allocator to reuse memory.
    for start in range(0, len(order), _PERMUTED_AT_ONCE):
        block = order[start : start + _PERMUTED_AT_ONCE]
        moved = torch.ops.fbgemm.permute_1D_sparse_data(block, *tensors, None)
        lengths_out[start : start + len(block)] = moved[0].numpy()
        stop = at + len(moved[1])
        values_out[at:stop] = moved[1].numpy()
        if weights_out is not None:
            weights_out[at:stop] = moved[2].numpy()
        at = stop
    return lengths_out


def _joined_tables(tables: list[pa.Table]) -> list[pa.Table]:
    """Return tables of one schema joined into one, if Arrow can: a dictionary's index type may be too small for all.

    Tables whose dictionaries have many entries are not joined. A dictionary is that of the whole row group, however few
    of its rows are read: joining two of 900,000 texts took 250 MiB and two seconds.
    """
    if len(tables) < 2 or sum(map(_num_entries, tables)) > _JOINED_ROWS:
        return tables
    try:
        return [pa.concat_tables(tables).combine_chunks()]
    except pa.ArrowException:
        return tables


def _num_entries(table: pa.Table) -> int:
    """Return how many entries the dictionaries of a table have in total."""
    chunks = (chunk for column in table.columns for chunk in column.chunks)
    arrays = (chunk.values if pa.types.is_list(chunk.type) else chunk for chunk in chunks)
    return sum(len(array.dictionary) for array in arrays if pa.types.is_dictionary(array.type))


def _joined(arrays: list[np.ndarray], allocate: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    total = sum(len(array) for array in arrays)
    return np.concatenate(arrays, out=allocate((total,), arrays[0].dtype))
