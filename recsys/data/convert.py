"""Conversion of one decoded Arrow column to the contents of a batch: ids to table rows, numbers to float32.

A number is an integer of any width, a boolean, a float, a decimal, or a point or length of time, which becomes seconds
(for a date or timestamp, since 1970 in UTC).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from recsys.config import Keep, NullPolicy
from recsys.data.arrays import decoded, drop_nulls, elements, list_bounds, plain, select, to_numbers, valid
from recsys.data.fields import advice
from recsys.data.filters import written
from recsys.data.spec import FloatColumn, IdColumn, Transform
from recsys.errors import UserError, counted
from recsys.ids import NULL_ROW, is_number
from recsys.runtime.loops import write_floats

# Up to this many boundaries, comparing with each is faster than a binary search, which mispredicts its branches.
_FEW_BOUNDARIES = 64
NUMBERS_AT_ONCE = 1 << 17  # of vectors converted together: temporary arrays stay small, and in the cache of a core
Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True)
class Ids:
    """Table rows of one column: `values` int32 or int64 [total], in the order of the rows of data; `lengths` int32
    [rows], how many each row of data has, or None if it is one each; `weights` float32 [total], or None."""

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
        array: any type that the mapping accepts, a dictionary of it, or a list of either. part: how to convert it.
        dtype: of the table rows, int32 or int64.
        out: C-contiguous, of this dtype, shape [len(array)]. It becomes `values` if `lengths` is None; otherwise it is
            not written to.
        allocate: makes an array of a shape and dtype for `values` when `out` cannot be that.
        weights: the column `part.weights`: one number per row if there is one id per row, else lists of equal lengths.

    Raises:
        UserError: names the column whose type or values do not fit.
    """
    k = part.mapping.rows_per_id
    if part.statistics is not None:
        part.statistics.add(rows=len(array))
    try:
        array = plain(array)
        weights = None if weights is None else plain(weights)
        lengths = None
        if pa.types.is_list(array.type):
            array, weights, lengths = flatten(array, weights, part)
        elif weights is not None and pa.types.is_list(weights.type):
            raise UserError(f"one id a row needs one weight a row, but column '{part.weights}' is {weights.type}")
        rows, present = _map(array, part, dtype, out if lengths is None and k == 1 else None, allocate)
        numbers = None
        if weights is not None:
            given = weights if present is None else select(decoded(weights), present)
            numbers = convert_floats(given, FloatColumn("weights of its ids", part.weights, fill=None))
    except (UserError, TypeError) as error:
        raise UserError(f"{part.title}: {error}") from error
    if present is not None:
        lengths = _count(present, lengths)
    if k > 1:
        lengths = np.full(len(array), k, np.int32) if lengths is None else lengths * np.int32(k)
        numbers = None if numbers is None else np.repeat(numbers, k)
    return Ids(rows, lengths, numbers)


def convert_floats(array: pa.Array, part: FloatColumn, out: np.ndarray | None = None) -> np.ndarray:
    """Convert a column of numbers to float32, shape [len(array)], or of vectors, shape [len(array), part.dim].

    The result is written to `out` if given. The transform works on float64, and its result is rounded. Without a
    transform, a timestamp of today keeps 24 bits of its seconds, which is a precision of about 2 minutes: standardise
    it, or make ids of it by boundaries.

    Raises:
        UserError: names the column whose type or values do not fit.
    """
    shape = (len(array),) if part.dim is None else (len(array), part.dim)
    out = np.empty(shape, np.float32) if out is None else out
    step = len(array) if part.dim is None else NUMBERS_AT_ONCE // part.dim
    for start in range(0, max(1, len(array)), max(1, step)):
        _write_numbers(array.slice(start, step), part, out[start : start + step])
    return out


def _write_numbers(array: pa.Array, part: FloatColumn, given: np.ndarray) -> None:
    numbers, nulls = raw_numbers(array, part)
    if nulls is not None and part.fill is None:
        raise UserError(f"{part.title} holds {counted(len(nulls), 'null')}, but none are allowed; {part.without_nulls}")
    out = given if given.flags.c_contiguous else np.empty(given.shape, np.float32)
    is_finite = write_floats(numbers.reshape(-1), out.reshape(-1))
    if nulls is not None:
        _fill(out, nulls, part)
        is_finite = bool(np.isfinite(out).all())
    if part.finite and not is_finite:
        raise UserError(
            f"{part.title} holds {numbers[~np.isfinite(out)][0]}, but only finite numbers up to 3.4e38 can be "
            f"trained on; {'write null for an unknown number' if part.fill is not None else 'drop such rows'}"
        )
    if part.binary:
        _refuse_other_than_0_and_1(out, part)
    if part.probability and ((out < 0) | (out > 1)).any():
        raise UserError(f"{part.title} must hold probabilities, from 0 to 1, as `recsys predict` writes them")
    if part.transform is not None:
        numbers = numbers.astype(np.float64)
        if nulls is not None:
            _fill(numbers, nulls, part)
        transform_numbers(numbers, part.transform, part)
        if not write_floats(numbers.reshape(-1), out.reshape(-1)) and part.finite:
            raise UserError(f"{part.title} is beyond 3.4e38 after its transform; set a clip")
    if out is not given:
        given[:] = out


def raw_numbers(array: pa.Array, part: FloatColumn) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a column's raw numbers, [len(array)], or its vectors, [len(array), part.dim], and the places of nulls.

    The numbers are C-contiguous. The places count through all numbers (None: no nulls); the value at one is undefined.

    Raises:
        UserError: the column does not hold numbers, or vectors of this length.
    """
    if part.dim is not None:
        return _raw_vectors(array, part, part.dim)
    array = decoded(array)
    if not is_number(array.type):
        raise UserError(f"{part.title} must hold numbers, found {array.type}{part.remedy(array)}")
    return to_numbers(array), np.flatnonzero(~valid(array)) if array.null_count else None


def _raw_vectors(array: pa.Array, part: FloatColumn, dim: int) -> tuple[np.ndarray, np.ndarray | None]:
    if pa.types.is_null(array.type):  # no row has any
        return np.zeros((len(array), dim)), np.arange(len(array) * dim)
    dtype = array.type
    if not pa.types.is_list(dtype):
        raise UserError(f"{part.title} must hold lists of {dim} numbers, found {dtype}; for a number drop its dim")
    starts, lengths = list_bounds(array)
    is_there = lengths > 0  # null lists are empty, and so is what CSV files have for none
    if len(rows := np.flatnonzero(is_there & (lengths != dim))):
        raise UserError(
            f"{part.title} holds a list of {lengths[rows[0]]} numbers, where features.{part.name}.dim={dim} needs "
            f"{dim}; write lists of this length, or null"
        )
    values = decoded(elements(array.values, starts, lengths))
    if not is_number(values.type):
        raise UserError(f"{part.title} must hold lists of {dim} numbers, found {dtype}; write them as numbers")
    given = to_numbers(values).reshape(-1, dim)
    if is_there.all() and not values.null_count:
        return given, None
    numbers, is_null = np.zeros((len(array), dim), given.dtype), np.ones((len(array), dim), bool)
    numbers[is_there] = given
    is_null[is_there] = ~valid(values).reshape(-1, dim) if values.null_count else False
    return numbers, np.flatnonzero(is_null)


def _fill(numbers: np.ndarray, nulls: np.ndarray, part: FloatColumn) -> None:
    """Write the fill value over nulls, given by their places among all numbers."""
    fill = part.fill
    numbers.reshape(-1)[nulls] = np.array(fill)[nulls % len(fill)] if isinstance(fill, tuple) else fill


def _map(
    ids: pa.Array, part: IdColumn, dtype: np.dtype, out: np.ndarray | None, allocate: Allocate
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the table rows of ids, and a mask [len(ids)] of the ids that have any, or None if all have."""
    if part.boundaries is not None:
        ids = _bucketise(ids, part.boundaries)
    if pa.types.is_nested(ids.type):
        raise UserError(
            f"ids must be integers or strings, found {ids.type}; a column holds one id a row, or one list of ids"
            f"{advice(part.column, ids.type)}"
        )
    k, nulls = part.mapping.rows_per_id, ids.null_count
    if not nulls and part.route is None:
        rows = allocate((len(ids) * k,), dtype) if out is None else out
        part.mapping.map(ids, rows, part.statistics)
        return rows, None
    if nulls and part.null is NullPolicy.refuse:
        raise UserError(f"{counted(nulls, 'null')} found, which nulls: refuse does not allow; use reserved or empty")
    if part.statistics is not None:
        part.statistics.add(nulls=nulls)
    present, ids = (valid(ids), drop_nulls(ids)) if nulls else (np.ones(len(ids), bool), ids)
    is_null = ~present
    if part.route is not None:
        chosen = part.route.chosen(ids)
        ids, present[present] = select(ids, chosen), chosen
    mapped = allocate((len(ids) * k,), dtype)
    part.mapping.map(ids, mapped, part.statistics)
    if not nulls or part.null is NullPolicy.empty:
        return mapped, present
    has_row = present | is_null
    rows = allocate((int(has_row.sum()) * k,), dtype) if out is None else out
    rows.fill(NULL_ROW)
    # Indexing by numbers is four times as fast as by a mask if nulls are many.
    rows.reshape(-1, k)[np.flatnonzero(present[has_row])] = mapped.reshape(-1, k)
    return rows, None if has_row.all() else has_row


def _bucketise(array: pa.Array, boundaries: tuple[float, ...]) -> pa.Array:
    array = decoded(array)
    if not is_number(array.type):
        raise UserError(f"boundaries need numbers, found {array.type}; write the column as numbers")
    numbers = to_numbers(array).astype(np.float64, copy=False)
    if len(boundaries) <= _FEW_BOUNDARIES:
        counts = np.zeros(len(numbers), np.uint8)
        for boundary in boundaries:
            counts += numbers >= boundary
        buckets = counts.astype(np.int64)
    else:
        buckets = np.searchsorted(boundaries, numbers, side="right")
    nulls = np.isnan(numbers)
    if array.null_count:
        nulls |= ~valid(array)
    return pa.array(buckets, mask=nulls if nulls.any() else None)


def _count(present: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Return how many elements of each list are present, int32; lengths None: each list has one element."""
    if lengths is None:
        return present.astype(np.int32)
    before = np.zeros(len(present) + 1, np.int64)
    np.cumsum(present, out=before[1:])
    return np.diff(before[np.cumsum(lengths)], prepend=0).astype(np.int32)


def flatten(array: pa.Array, weights: pa.Array | None, part: IdColumn) -> tuple[pa.Array, pa.Array | None, np.ndarray]:
    """Cut lists to `max_length`; return their elements, the weights of these, and the lengths, int32 [rows].

    Raises:
        UserError: a list does not have as many weights as ids.
    """
    starts, lengths = list_bounds(array)
    weight_starts = starts
    if weights is not None and not pa.types.is_list(weights.type):
        raise UserError(f"lists of ids need lists of weights, but column '{part.weights}' is {weights.type}")
    if weights is not None:
        weight_starts, others = list_bounds(weights)
        if len(rows := np.flatnonzero(others != lengths)):
            raise UserError(
                f"row {rows[0]} has {counted(lengths[rows[0]], 'id')}, but {counted(others[rows[0]], 'weight')} in "
                f"column '{part.weights}'; write one weight for each id"
            )
    if part.max_length is not None and lengths.size and lengths.max() > part.max_length:
        cut = np.minimum(lengths, np.int32(part.max_length))
        if part.keep is Keep.last:
            starts = starts + (lengths - cut)
            weight_starts = weight_starts + (lengths - cut)
        lengths = cut
    ids = elements(array.values, starts, lengths)
    return ids, None if weights is None else elements(weights.values, weight_starts, lengths), lengths


def transform_numbers(x: np.ndarray, transform: Transform, part: FloatColumn) -> None:
    """Transform float64 numbers, [rows] or [rows, dim], in place.

    Raises:
        UserError: `part` must be finite, and a number has no logarithm.
    """
    if transform.clip is not None:
        np.clip(x, *transform.clip, out=x)
    if transform.log1p:
        if part.finite and x.size and x.min() <= -1:
            raise UserError(f"{part.title} holds {x.min():.10g}, but log1p needs numbers above -1; set a clip")
        with np.errstate(divide="ignore", invalid="ignore"):  # numbers without a logarithm become NaN or -inf
            if transform.std is None:
                # NumPy's log1p takes twice as long, and only avoids rounding 1 + x, an error of 1.1e-16 for small x.
                np.log(np.add(x, 1, out=x), out=x)
            else:  # the deviation may be as small as x, so that this error would count
                np.log1p(x, out=x)
    if transform.mean is not None:
        x -= transform.mean
    if transform.std is not None:
        x /= np.where(transform.std, transform.std, 1.0)


def _refuse_other_than_0_and_1(numbers: np.ndarray, part: FloatColumn) -> None:
    other = (numbers != 0) & (numbers != 1) & ~(np.isnan(numbers) & (not part.finite))
    if other.any():
        least = numbers[np.isfinite(numbers)].min(initial=np.inf)
        condition = f"{written(part.column or part.name)} > {least:.6g}"  # true for some rows and false for others
        raise UserError(
            f"{part.title} holds {numbers[other][0]:.10g}, but binary cross-entropy needs 0 or 1; "
            f"{part.advised(condition)}, or learn the number itself by loss: squared"
        )
