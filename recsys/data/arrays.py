"""Conversion of whole Arrow columns to NumPy arrays, with few copies."""

import numpy as np
import pyarrow as pa

from recsys.ids import NANOSECONDS, numpy_view, raw_times


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without a copy if it has one chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def plain(array: pa.Array) -> pa.Array:
    """Return an untyped array as int64, others unchanged: some writers drop the type if no row has a value."""
    return array.cast(pa.int64()) if pa.types.is_null(array.type) else array


def value_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type of the values in lists or in a dictionary, and other types unchanged."""
    return getattr(dtype, "value_type", dtype)


def decoded(array: pa.Array) -> pa.Array:
    """Return `plain(array)` with dictionaries replaced by their values."""
    array = plain(array)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def valid(array: pa.Array) -> np.ndarray:
    """Return a mask [len(array)] of the elements that are not null, for a `plain` array that has nulls."""
    start, bit = divmod(array.offset, 8)
    packed = np.frombuffer(array.buffers()[0], np.uint8, (bit + len(array) + 7) // 8, start)
    return np.unpackbits(packed, count=bit + len(array), bitorder="little")[bit:].view(bool)


def drop_nulls(array: pa.Array) -> pa.Array:
    """Return the elements that are not null, for a `plain` array that has nulls and is not nested."""
    if pa.types.is_dictionary(array.type):
        return pa.DictionaryArray.from_arrays(drop_nulls(array.indices), array.dictionary)
    # Three times as fast as Arrow's `drop_null`, which looks for nulls among the elements that it keeps.
    mask = pa.Array.from_buffers(pa.bool_(), len(array), [None, array.buffers()[0]], offset=array.offset)
    return _without_validity(array).filter(mask)


def select(array: pa.Array, mask: np.ndarray) -> pa.Array:
    """Return the elements of a `plain` array for which a boolean mask [len(array)] is true."""
    packed = pa.py_buffer(np.packbits(mask, bitorder="little"))
    return array.filter(pa.Array.from_buffers(pa.bool_(), len(mask), [None, packed]))


def _without_validity(array: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(array.type, len(array), [None, *array.buffers()[1:]], offset=array.offset)


def with_nulls(array: pa.Array, mask: np.ndarray) -> pa.Array:
    """Return an array with null where a boolean mask [len(array)] is true."""
    return array.take(pa.array(np.arange(len(array)), mask=mask))


def list_bounds(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return where each list starts in `array.values`, and how long it is, both int32 [rows].

    A null list has length 0, whatever its offsets are.
    """
    offsets = numpy_view(array.offsets)
    lengths = np.diff(offsets)
    return offsets[:-1], lengths * valid(array) if array.null_count else lengths


def elements(values: pa.Array, starts: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Return values[starts[i] : starts[i] + lengths[i]] for every i, in ascending order, end to end and `plain`.

    The result is a view if they already lie end to end, else one copy.
    """
    if not len(starts):
        return plain(values.slice(0, 0))
    ends = starts + lengths
    gaps = starts[1:] - ends[:-1]
    values = plain(values.slice(int(starts[0]), int(ends[-1] - starts[0])))
    if not gaps.any():
        return values
    # A mask, made run by run (list, gap, list …), is faster than positions.
    runs = np.empty(2 * len(starts) - 1, np.int64)
    runs[::2], runs[1::2] = lengths, gaps
    inside = np.zeros(len(runs), bool)
    inside[::2] = True
    return select(values, np.repeat(inside, runs))


def cast(array: pa.Array, dtype: pa.DataType, safe: bool = True) -> pa.Array:
    """Cast an array like Arrow does, except that decimals become the nearest floats.

    Raises:
        pa.ArrowException: the type cannot hold a value, and the cast must be `safe`.
    """
    if pa.types.is_list(array.type) and pa.types.is_list(dtype):
        values, bounds = cast(array.values, dtype.value_type, safe), array.buffers()[:2]
        return pa.Array.from_buffers(dtype, len(array), bounds, array.null_count, array.offset, children=[values])
    if pa.types.is_decimal(array.type) and pa.types.is_floating(dtype):
        array = pa.array(to_numbers(array), mask=~valid(array) if array.null_count else None)
    return array.cast(dtype, safe=safe)


def to_numbers(array: pa.Array) -> np.ndarray:
    """Return a `decoded` array of numbers, [len(array)], a view if NumPy has the type; values of nulls are undefined.

    Decimals become float64; those of more than 18 digits may be off by 1 in the last place. Points and lengths of time
    become seconds in float64: a date or timestamp since 1970 in UTC, a time since midnight.
    """
    dtype = array.type
    if pa.types.is_decimal(dtype):
        return _decimals(array)
    if pa.types.is_temporal(dtype):
        raw = raw_times(_without_validity(array))
        if pa.types.is_date(dtype):
            return raw * 86400.0 if dtype.bit_width == 32 else raw / 1000.0
        return raw / float(10**9 // NANOSECONDS[dtype.unit])
    if pa.types.is_boolean(dtype):  # stored as bits, so that NumPy has no view
        return _without_validity(array).to_numpy(zero_copy_only=False)
    return numpy_view(array)


def _decimals(array: pa.Array) -> np.ndarray:
    # Arrow's own cast turns 0.1 into 0.09999999999999999, on the wrong side of a boundary; a division rounds once.
    if array.type.bit_width < 128:
        array = array.cast(pa.decimal128(array.type.precision, array.type.scale))
    array, dtype = _without_validity(array), array.type
    if not len(array):
        return np.zeros(0)
    size = dtype.bit_width // 64
    words = np.frombuffer(array.buffers()[1], np.int64, len(array) * size, array.offset * size * 8).reshape(-1, size)
    low = words[:, 0]
    numbers = low / 10.0**dtype.scale
    large = (words[:, 1:] != (low >> 63)[:, None]).any(axis=1)  # higher words hold more than the sign of the lowest
    if large.any():
        numbers[large] = array.cast(pa.float64()).to_numpy()[large]
    return numbers


def num_stored(array: pa.Array) -> int:
    """Return how many values Parquet stores for lists: their elements, and one for each list that is empty or null."""
    offsets = numpy_view(array.offsets)
    return int(offsets[-1] - offsets[0]) + int(np.count_nonzero(offsets[1:] == offsets[:-1]))
