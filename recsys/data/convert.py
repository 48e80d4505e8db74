"""One decoded Arrow column to what a batch is made of: ids to table rows, numbers to float32.

A number is an integer of any width, a boolean, a float, a decimal, or a point or length of time, which counts in
seconds (of a date or timestamp: since 1970, UTC).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from recsys.config import Keep, NullPolicy
from recsys.data import arrow
from recsys.data.conditions import Condition
from recsys.errors import UserError
from recsys.ids import NULL_ROW, IdMapping, IdStatistics

# Up to so many boundaries, comparing with each is faster than a binary search, which mispredicts its branches.
_FEW_BOUNDARIES = 64

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True)
class IdColumn:
    """How a column of ids, or of lists of ids, becomes table rows.

    Attributes:
        name: of the feature, for messages.
        column: name in the data; None: no row has an id.
        mapping: ids to rows.
        null: what a null id becomes. A null list is an empty one.
        max_length: most ids of a list, nulls among them.
        keep: which end of a longer list.
        weights: column with a number for each id.
        boundaries: ascending; the column holds numbers, and the id of x is how many boundaries are <= x. NaN is null.
        statistics: counts the ids that are mapped, and the nulls.
    """

    name: str
    column: str | None
    mapping: IdMapping
    null: NullPolicy = NullPolicy.reserved
    max_length: int | None = None
    keep: Keep = Keep.last
    weights: str | None = None
    boundaries: tuple[float, ...] | None = None
    statistics: IdStatistics | None = None


@dataclass(frozen=True)
class Transform:
    """What becomes of a float, in this order and in float64: `clip` (least, greatest), log(1 + x), (x - mean) / std.

    An end of clip that is None cuts nothing. A std of 0 divides by 1, so that a constant column becomes 0.
    """

    clip: tuple[float | None, float | None] | None = None
    log1p: bool = False
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class FloatColumn:
    """How a column of numbers becomes float32.

    Attributes:
        name: of the feature, for messages.
        column: name in the data; None: always `fill`.
        fill: raw value of a null, which is transformed like any other; None refuses nulls.
        binary: takes 0 and 1 only.
        condition: in place of a column, which is then None: 1 where it is true, null where it is null.
        may_be_unknown: of a label, a null is no error; batches say which labels are known.
        finite: refuses NaN and infinity, also as the result of the transform.
        transform: of the raw values.
    """

    name: str
    column: str | None
    fill: float | None = 0.0
    binary: bool = False
    finite: bool = True
    transform: Transform | None = None
    may_be_unknown: bool = False
    condition: Condition | None = None

    def columns(self) -> set[str]:
        """Return the columns to read."""
        if self.condition is not None:
            return self.condition.columns()
        return set() if self.column is None else {self.column}


@dataclass(frozen=True)
class Ids:
    """Table rows of one column.

    Attributes:
        values: int32 or int64 [total], those of a row of data next to each other.
        lengths: int32 [rows], how many values each row of data has; None: one each.
        weights: float32 [total], or None.
    """

    values: np.ndarray
    lengths: np.ndarray | None
    weights: np.ndarray | None


def convert_ids(
    array: pa.Array,
    part: IdColumn,
    dtype: np.dtype,
    out: np.ndarray | None = None,
    weights: pa.Array | None = None,
    allocate: Allocate = np.empty,
) -> Ids:
    """Map a column of ids, or of lists of ids, to table rows.

    Args:
        array: any type that the mapping takes, a dictionary of it, or a list of either. part: how to convert it.
        dtype: of the rows, int32 or int64.
        out: C-contiguous, of this dtype, shape [len(array)]. It becomes `values` where `lengths` is None, and is not
            written to otherwise.
        allocate: makes an array of a shape and dtype for `values` where `out` does not become it.
        weights: the column `part.weights`: a number a row where there is an id a row, else lists as long as the ids'.

    Raises:
        UserError: names the column whose type or values do not fit.
    """
    k = part.mapping.rows_per_id
    if part.statistics is not None:
        part.statistics.add(rows=len(array))
    try:
        array = arrow.plain(array)
        weights = None if weights is None else arrow.plain(weights)
        lengths = None
        if arrow.is_list(array.type):
            array, weights, lengths = _flatten(array, weights, part)
        elif weights is not None and arrow.is_list(weights.type):
            raise UserError(f"one id a row goes with one weight a row, but column '{part.weights}' is {weights.type}")
        rows, present = _map(array, part, dtype, out if lengths is None and k == 1 else None, allocate)
        numbers = None
        if weights is not None:
            given = weights if present is None else arrow.select(arrow.decoded(weights), present)
            numbers = convert_floats(given, FloatColumn("weights of its ids", part.weights, fill=None))
    except (UserError, TypeError) as error:
        raise UserError(f"column '{part.column}' (feature '{part.name}'): {error}") from error
    if present is not None:
        lengths = _count(present, lengths)
    if k > 1:
        lengths = np.full(len(array), k, np.int32) if lengths is None else lengths * np.int32(k)
        numbers = None if numbers is None else np.repeat(numbers, k)
    return Ids(rows, lengths, numbers)


def convert_floats(array: pa.Array, part: FloatColumn, out: np.ndarray | None = None) -> np.ndarray:
    """Convert a column of numbers to float32, shape [len(array)], in `out` where it is given.

    The transform works on float64, and its result is rounded. Without one, a timestamp of today keeps 24 bits of its
    seconds, which is about 2 minutes: standardise it, or take it as ids through boundaries.

    Raises:
        UserError: names the column whose type or values do not fit.
    """
    array = arrow.decoded(array)
    if not arrow.is_number(array.type):
        raise UserError(f"{_title(part)} must hold numbers, found {array.type}{_remedy(array.type, part)}")
    if array.null_count and part.fill is None:
        raise UserError(f"{_title(part)} holds {array.null_count} nulls, and may hold none; drop such rows")
    numbers = arrow.to_numbers(array)
    nulls = np.flatnonzero(~arrow.valid(array)) if array.null_count else None
    if out is None:
        out = np.empty(len(array), np.float32)
    _round(numbers, out)
    if nulls is not None:
        out[nulls] = part.fill
    finite = np.isfinite(out)
    if part.finite and not finite.all():
        raise UserError(
            f"{_title(part)} holds {numbers[~finite][0]}, and only finite numbers up to 3.4e38 train; "
            f"{'write null for an unknown number' if part.fill is not None else 'drop such rows'}"
        )
    if part.binary:
        _refuse_other_than_0_and_1(out, part)
    if part.transform is not None:
        numbers = numbers.astype(np.float64)
        if nulls is not None:
            numbers[nulls] = part.fill
        transform_numbers(numbers, part.transform, part)
        _round(numbers, out)
        if part.finite and not np.isfinite(out).all():
            raise UserError(f"{_title(part)} is beyond 3.4e38 after its transform; set a clip")
    return out


# Ids


def _map(
    ids: pa.Array, part: IdColumn, dtype: np.dtype, out: np.ndarray | None, allocate: Allocate
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the rows of ids, and a mask [len(ids)] of the ids that have any, or None when all have."""
    if part.boundaries is not None:
        ids = _bucketise(ids, part.boundaries)
    if pa.types.is_nested(ids.type):
        raise UserError(
            f"ids must be integers or strings, found {ids.type}; a column holds one of these a row, or one list of them"
        )
    k, nulls = part.mapping.rows_per_id, ids.null_count
    if not nulls:
        rows = allocate((len(ids) * k,), dtype) if out is None else out
        part.mapping.map(ids, rows, part.statistics)
        return rows, None
    if part.null is NullPolicy.refuse:
        raise UserError(f"{nulls} nulls found where nulls: refuse allows none; use reserved or empty")
    if part.statistics is not None:
        part.statistics.add(nulls=nulls)
    present = arrow.valid(ids)
    mapped = allocate(((len(ids) - nulls) * k,), dtype)
    part.mapping.map(arrow.drop_nulls(ids), mapped, part.statistics)
    if part.null is NullPolicy.empty:
        return mapped, present
    rows = allocate((len(ids) * k,), dtype) if out is None else out
    rows.fill(NULL_ROW)
    if k == 1:
        rows[np.flatnonzero(present)] = mapped  # four times as fast as a mask where nulls are many
    else:
        rows.reshape(-1, k)[present] = mapped.reshape(-1, k)
    return rows, None


def _bucketise(array: pa.Array, boundaries: tuple[float, ...]) -> pa.Array:
    array = arrow.decoded(array)
    if not arrow.is_number(array.type):
        raise UserError(f"boundaries take numbers, found {array.type}; write the column as numbers")
    numbers = arrow.to_numbers(array).astype(np.float64, copy=False)
    if len(boundaries) <= _FEW_BOUNDARIES:
        counts = np.zeros(len(numbers), np.uint8)
        for boundary in boundaries:
            counts += numbers >= boundary
        buckets = counts.astype(np.int64)
    else:
        buckets = np.searchsorted(boundaries, numbers, side="right")
    nulls = np.isnan(numbers)
    if array.null_count:
        nulls |= ~arrow.valid(array)
    return pa.array(buckets, mask=nulls if nulls.any() else None)


def _count(present: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Return how many elements of each list are present, int32; lengths None: each list has one element."""
    if lengths is None:
        return present.astype(np.int32)
    before = np.zeros(len(present) + 1, np.int64)
    np.cumsum(present, out=before[1:])
    return np.diff(before[np.cumsum(lengths)], prepend=0).astype(np.int32)


def _flatten(array: pa.Array, weights: pa.Array | None, part: IdColumn) -> tuple[pa.Array, pa.Array | None, np.ndarray]:
    """Return the elements of lists cut to `max_length`, the weights of the same elements, and int32 lengths."""
    starts, lengths = arrow.list_bounds(array)
    weight_starts = starts if weights is None else _weight_starts(weights, lengths, part)
    if part.max_length is not None and lengths.size and lengths.max() > part.max_length:
        kept = np.minimum(lengths, np.int32(part.max_length))
        if part.keep is Keep.last:
            starts = starts + (lengths - kept)
            weight_starts = weight_starts + (lengths - kept)
        lengths = kept
    ids = arrow.elements(array.values, starts, lengths)
    return ids, None if weights is None else arrow.elements(weights.values, weight_starts, lengths), lengths


def _weight_starts(weights: pa.Array, lengths: np.ndarray, part: IdColumn) -> np.ndarray:
    if not arrow.is_list(weights.type):
        raise UserError(f"lists of ids go with lists of weights, but column '{part.weights}' is {weights.type}")
    starts, found = arrow.list_bounds(weights)
    if not np.array_equal(found, lengths):
        row = int(np.flatnonzero(found != lengths)[0])
        raise UserError(
            f"row {row} has {lengths[row]} ids, but {found[row]} weights in column '{part.weights}'; "
            f"write one weight for each id"
        )
    return starts


# Numbers


def _round(numbers: np.ndarray, out: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # what becomes inf is refused with its column's name
        np.copyto(out, numbers, casting="unsafe")


def transform_numbers(x: np.ndarray, transform: Transform, part: FloatColumn) -> None:
    """Transform float64 numbers in place."""
    if transform.clip is not None:
        np.clip(x, *transform.clip, out=x)
    if transform.log1p:
        if x.size and x.min() <= -1:
            raise UserError(f"{_title(part)} holds {x.min():.10g}, and log1p takes numbers above -1; clip them to such")
        if transform.std is None:
            # NumPy's log1p takes twice as long. What it saves is the rounding of 1 + x, 1.1e-16 where x is small.
            x += 1
            np.log(x, out=x)
        else:  # which may be as small as x
            np.log1p(x, out=x)
    if transform.mean is not None:
        x -= transform.mean
    if transform.std is not None:
        x /= transform.std or 1.0


def _refuse_other_than_0_and_1(numbers: np.ndarray, part: FloatColumn) -> None:
    other = (numbers != 0) & (numbers != 1) & ~(np.isnan(numbers) & (not part.finite))
    if other.any():
        raise UserError(
            f"{_title(part)} holds {numbers[other][0]:.10g}, and binary cross-entropy takes 0 or 1; write such a "
            f"column, as `python -m recsys prepare csv --label 'rating>=4'` does"
        )


def _title(part: FloatColumn) -> str:
    return f"column '{part.column}' ({part.name})"


def _remedy(kind: pa.DataType, part: FloatColumn) -> str:
    if pa.types.is_nested(kind):
        return "; write one number a row, each position of a list as a column of its own"
    return "; write it as numbers" + ("" if part.fill is None else ", or for ids use a feature of type id")
