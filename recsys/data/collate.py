"""Arrow columns to arrays, and slices of these to a `Batch`.

A list column becomes its values and offsets; ids are mapped a whole column at a time; nothing goes row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.config import NullPolicy
from recsys.data.batch import Batch
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.id_mapping import NULL_ROW, IdMapping


@dataclass(frozen=True)
class IdColumn:
    """How a column of ids, or of lists of ids, becomes table rows. `column` None: always empty."""

    name: str
    column: str | None
    mapping: IdMapping
    null: NullPolicy = NullPolicy.reserved
    max_length: int | None = None


@dataclass(frozen=True)
class FloatColumn:
    """How a column of numbers becomes float32. `column` None: always `fill`."""

    name: str
    column: str | None
    fill: float | None = 0.0  # of nulls; None refuses them
    binary: bool = False  # takes 0 and 1 only


@dataclass(frozen=True)
class BatchSpec:
    """What a batch is made of. Label and weight are None where the data have none (0 and 1 are used)."""

    ids: Sequence[IdColumn]
    floats: Sequence[FloatColumn]
    label: FloatColumn | None = None
    weight: FloatColumn | None = None
    lists: Sequence[IdColumn] = ()

    def columns(self) -> list[str]:
        """Return the names of the columns to read, each once."""
        ends = [part for part in (self.label, self.weight) if part]
        parts: list[IdColumn | FloatColumn] = [*self.ids, *self.floats, *self.lists, *ends]
        return list(dict.fromkeys(part.column for part in parts if part.column is not None))


@dataclass(frozen=True)
class Jagged:
    """Lists of table rows: `values` int64 [total], `offsets` int64 [rows + 1]."""

    values: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Columns:
    """Converted columns of some rows, in the order of the spec: `floats` [rows, float features] float32."""

    num_rows: int
    ids: list[Jagged]
    lists: list[Jagged]
    floats: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def convert(table: pa.Table, spec: BatchSpec) -> Columns:
    """Convert decoded rows to arrays.

    Raises:
        UserError: names the column whose type or values do not fit the spec.
    """
    rows = table.num_rows
    floats = np.zeros((rows, len(spec.floats)), np.float32)
    for i, part in enumerate(spec.floats):
        floats[:, i] = _float_column(table, part)
    return Columns(
        num_rows=rows,
        ids=[_id_column(table, part) for part in spec.ids],
        lists=[_id_column(table, part) for part in spec.lists],
        floats=floats,
        labels=_float_column(table, spec.label) if spec.label else np.zeros(rows, np.float32),
        weights=_weights(table, spec.weight) if spec.weight else np.ones(rows, np.float32),
    )


@dataclass(frozen=True)
class Piece:
    """Rows `start` … `stop` - 1 of some columns, which go to rows `at` … of a batch."""

    columns: Columns
    start: int
    stop: int
    at: int


def collate(pieces: Sequence[Piece], num_rows: int, spec: BatchSpec, position: Position) -> Batch:
    """Join pieces into a batch of `num_rows` rows; rows that no piece fills have weight 0 and empty lists.

    Args:
        pieces: in ascending order of `at`.
        num_rows: rows of the batch.
        spec: the one that the columns were converted with.
        position: where training stands after this batch.
    """
    lists = _join_jagged([p.name for p in spec.lists], [p.columns.lists for p in pieces], pieces, num_rows)
    return Batch(
        ids=_join_jagged([p.name for p in spec.ids], [p.columns.ids for p in pieces], pieces, num_rows),
        floats=_join([p.columns.floats for p in pieces], pieces, (num_rows, len(spec.floats))),
        labels=_join([p.columns.labels for p in pieces], pieces, (num_rows,)),
        weights=_join([p.columns.weights for p in pieces], pieces, (num_rows,)),
        lists=lists if spec.lists else None,
        num_rows=sum(piece.stop - piece.start for piece in pieces),
        position=position,
    )


def _join(columns: Sequence[np.ndarray], pieces: Sequence[Piece], shape: tuple[int, ...]) -> torch.Tensor:
    joined = np.zeros(shape, np.float32)
    for values, piece in zip(columns, pieces, strict=True):
        joined[piece.at : piece.at + piece.stop - piece.start] = values[piece.start : piece.stop]
    return torch.from_numpy(joined)


def _join_jagged(
    keys: list[str], columns: Sequence[list[Jagged]], pieces: Sequence[Piece], num_rows: int
) -> KeyedJaggedTensor:
    # Feature-major, as a KeyedJaggedTensor is: all rows of the first key, then of the second …
    lengths = np.zeros((len(keys), num_rows), np.int32)
    values: list[np.ndarray] = [np.zeros(0, np.int64)]
    for k in range(len(keys)):
        for lists, piece in zip(columns, pieces, strict=True):
            offsets = lists[k].offsets[piece.start : piece.stop + 1]
            lengths[k, piece.at : piece.at + len(offsets) - 1] = np.diff(offsets)
            values.append(lists[k].values[offsets[0] : offsets[-1]])
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(lengths.reshape(-1)),
    )


def _array(table: pa.Table, column: str) -> pa.Array:
    array = table.column(column).combine_chunks()
    # An empty ChunkedArray combines to a ChunkedArray in some versions of Arrow.
    return array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)


def _id_column(table: pa.Table, part: IdColumn) -> Jagged:
    if part.column is None:
        return Jagged(np.zeros(0, np.int64), np.zeros(table.num_rows + 1, np.int64))
    array = _array(table, part.column)
    try:
        if _is_list(array.type):
            return _map_lists(array, part)
        return _map_scalars(array, part)
    except UserError as error:
        raise UserError(f"column '{part.column}' (feature '{part.name}'): {error}") from error
    except TypeError as error:
        raise UserError(f"column '{part.column}' (feature '{part.name}'): {error}") from error


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _map_scalars(array: pa.Array, part: IdColumn) -> Jagged:
    rows = len(array)
    if pa.types.is_null(array.type):
        array = array.cast(pa.int64())  # some writers drop the type of a column without any value
    present = _present(array, part)
    if present is None:
        return Jagged(part.mapping(array), np.arange(rows + 1, dtype=np.int64))
    mapped = part.mapping(array.filter(pa.array(present)))
    if part.null is NullPolicy.empty:
        return Jagged(mapped, _offsets(present))
    values = np.full(rows, NULL_ROW, np.int64)
    values[present] = mapped
    return Jagged(values, np.arange(rows + 1, dtype=np.int64))


def _map_lists(array: pa.Array, part: IdColumn) -> Jagged:
    # A null list is an empty one; flatten() leaves out what lies under it.
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    values = array.flatten()
    if part.max_length is not None and lengths.size and lengths.max() > part.max_length:
        from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(values))
        values = values.filter(pa.array(from_end <= part.max_length))
        lengths = np.minimum(lengths, part.max_length)
    mapped = _map_scalars(values, part)
    # Nulls inside a list may have been dropped, so the offsets of the lists go through those of their elements.
    return Jagged(mapped.values, mapped.offsets[_offsets(lengths)])


def _present(array: pa.Array, part: IdColumn) -> np.ndarray | None:
    """Return a mask of the elements that are not null, or None when all are there."""
    if array.null_count == 0:
        return None
    if part.null is NullPolicy.refuse:
        raise UserError(f"{array.null_count} nulls found where nulls: refuse allows none; use reserved or empty")
    return array.is_valid().to_numpy(zero_copy_only=False)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _float_column(table: pa.Table, part: FloatColumn) -> np.ndarray:
    if part.column is None:
        return np.full(table.num_rows, part.fill or 0.0, np.float32)
    array = _array(table, part.column)
    if not (
        pa.types.is_null(array.type)
        or pa.types.is_integer(array.type)
        or pa.types.is_floating(array.type)
        or pa.types.is_boolean(array.type)
        or pa.types.is_decimal(array.type)
    ):
        raise UserError(
            f"column '{part.column}' ({part.name}) must hold numbers, found {array.type}"
            f"{'; for ids use a feature of type id' if part.fill is not None else ''}"
        )
    if array.null_count and part.fill is None:
        raise UserError(
            f"column '{part.column}' ({part.name}) holds {array.null_count} nulls, and may hold none; drop such rows"
        )
    values = pc.cast(array, pa.float32(), safe=False)
    if array.null_count:
        values = pc.fill_null(values, part.fill)
    numbers = values.to_numpy(zero_copy_only=False)
    finite = np.isfinite(numbers)
    if not finite.all():
        raise UserError(
            f"column '{part.column}' ({part.name}) holds {numbers[~finite][0]}, and only finite numbers train; "
            f"{'write null for an unknown number' if part.fill is not None else 'drop such rows'}"
        )
    other = (numbers != 0) & (numbers != 1)
    if part.binary and other.any():
        raise UserError(
            f"column '{part.column}' ({part.name}) holds {numbers[other][0]:.10g}, and binary cross-entropy takes 0 or "
            f"1; write such a column, as scripts/prepare_data.py csv --label 'rating>=4' does"
        )
    return numbers


def _weights(table: pa.Table, part: FloatColumn) -> np.ndarray:
    weights = _float_column(table, part)
    if weights.size and weights.min() < 0:
        raise UserError(f"column '{part.column}' ({part.name}) holds {weights.min()}, and a weight is 0 or more")
    return weights
