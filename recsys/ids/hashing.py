"""Raw ids of any Arrow type to keys (numbers or texts), and keys to 64-bit hashes: the same on every machine.

A number is mixed with the finalizer of SplitMix64 (`recsys.runtime.loops`), a one-to-one function of 64 bits. The UTF-8
bytes of a text are hashed with XXH3-64. Both are seeded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import repeat

import numpy as np
import pyarrow as pa
import xxhash

from recsys.errors import UserError
from recsys.runtime.counter_random import INCREMENT
from recsys.runtime.loops import CHUNK, can_hash_texts, hash_numbers, hash_texts, mark, mix

# Nanoseconds per step of the integers that Arrow stores for dates and times; by unit, for dates by type.
NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "date32[day]": 86_400 * 10**9, "date64[ms]": 10**6}
_STRINGS = (pa.string(), pa.large_string(), pa.string_view())
_TEXTS = {dtype.id for dtype in (*_STRINGS, pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1))}
_NO_NUMBERS = np.zeros(0, np.int64)
_NO_TEXTS = pa.array([], pa.large_binary())


@dataclass(frozen=True)
class IdKeys:
    """Ids as keys: the numbers, then the texts. One of the two is empty, except for decimals, which may become both.

    Attributes:
        numbers: of any integer type, [numbers]; equal numbers are the same id whatever their type.
        texts: large_binary array, [texts].
        indices: the number of each id's key, integers [ids]; None: the i-th id has the i-th key.
    """

    numbers: np.ndarray
    texts: pa.Array = field(default_factory=lambda: _NO_TEXTS)
    indices: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.numbers) + len(self.texts)

    def hash_chunks(self, seed: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield for each chunk its first position among the keys, and uint64 [3, n]: hashes, and two rows of scratch.

        The caller may overwrite the array; the next chunk does.
        """
        scratch = np.empty((3, min(CHUNK, max(len(self.numbers), len(self.texts)))), np.uint64)
        by = increment(seed)
        for start in range(0, len(self.numbers), CHUNK):
            keys = self.numbers[start : start + CHUNK]
            chunk = scratch[:, : len(keys)]
            hashes = chunk[0]
            hash_numbers(keys, by, hashes, chunk[1])
            yield start, chunk
        for start in range(0, len(self.texts), CHUNK):
            keys = self.texts.slice(start, CHUNK)
            chunk = scratch[:, : len(keys)]
            _hash_texts(keys, seed, chunk[0])
            yield len(self.numbers) + start, chunk

    def hashes(self, seed: int) -> np.ndarray:
        """Return the hashes of all keys, uint64 [keys]."""
        hashed = np.empty(len(self), np.uint64)
        for start, chunk in self.hash_chunks(seed):
            hashed[start : start + chunk.shape[1]] = chunk[0]
        return hashed


def read_keys(ids: pa.Array) -> IdKeys:
    """Return the keys of ids.

    Integers, booleans, dates, times and whole floats are numbers. The number of a date or time is its nanoseconds
    (modulo 2**64), so that it does not depend on the unit in the file. A decimal is a number if it is whole and fits
    int64, else the text of its digits. Dictionary entries that no id uses are left out.

    Raises:
        UserError: a float is not whole, or so large that its neighbours are not exact.
        TypeError: the column has another type.
        ValueError: the column holds nulls.
    """
    dtype = ids.type
    if pa.types.is_integer(dtype):
        _refuse_nulls(ids)
        return IdKeys(numpy_view(ids))
    if pa.types.is_dictionary(dtype):
        values, indices = _split_dictionary(ids)
        keys = IdKeys(_NO_NUMBERS, _texts(values)) if is_text(values.type) else read_keys(values)
        return IdKeys(keys.numbers, keys.texts, indices if keys.indices is None else keys.indices[indices])
    if not (is_text(dtype) or is_number(dtype) or (pa.types.is_null(dtype) and not len(ids))):
        raise TypeError(f"ids must be integers or strings, found {dtype}")
    _refuse_nulls(ids)
    if is_text(dtype):
        if can_hash_texts():  # hashing all texts takes a tenth of the time of finding the distinct ones
            return IdKeys(_NO_NUMBERS, _texts(ids))
        encoded = ids.dictionary_encode()
        return IdKeys(_NO_NUMBERS, _texts(encoded.dictionary), numpy_view(encoded.indices))
    if pa.types.is_decimal(dtype):
        return _decimals(ids)
    return IdKeys(_numbers(ids))


def keys_of_one_kind(ids: pa.Array) -> IdKeys:
    """Return the keys of ids that are all numbers or all texts. Raises UserError if not, or errors of `read_keys`."""
    keys = read_keys(ids)
    if len(keys.numbers) and len(keys.texts):
        raise UserError(f"ids of type {ids.type} are not all whole numbers within 64 bits; write them as strings")
    return keys


def keys_in_order(ids: pa.Array) -> IdKeys:
    """Return the keys of distinct ids, all numbers or all texts, in the order of the ids. Errors as `keys_of_one_kind`.

    Texts are not looked for twice among each other, which takes over 100 bytes for each.
    """
    if is_text(ids.type):
        return IdKeys(_NO_NUMBERS, _texts(ids))
    keys = keys_of_one_kind(ids)
    if keys.indices is None:
        return keys
    if len(keys.numbers):
        return IdKeys(keys.numbers[keys.indices])
    return IdKeys(keys.numbers, keys.texts.take(pa.array(keys.indices)))


def is_text(dtype: pa.DataType) -> bool:
    """Return whether an Arrow type holds strings or bytes."""
    return dtype.id in _TEXTS


def hash_integers(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Hash integers of any width and sign.

    Args:
        values: integers or booleans, any shape; equal numbers have equal hashes whatever their width.
        seed: 0 … 2**64 - 1.

    Returns:
        uint64 of the same shape.

    Raises:
        TypeError: values are neither integers nor booleans.
    """
    if values.dtype.kind not in "iub":
        raise TypeError(f"integers are hashed, found {values.dtype}")
    return IdKeys(values.reshape(-1)).hashes(seed).reshape(values.shape)


def hash_uniform(values: np.ndarray, seed: int) -> np.ndarray:
    """Return float64 in [0, 1) for integers, same shape: a function of number and seed, equal on every machine."""
    return (hash_integers(values, seed) >> np.uint64(11)) * 2.0**-53


def hash_column(ids: pa.Array, seed: int = 0) -> np.ndarray:
    """Hash a column of ids without nulls, of the types that `read_keys` accepts, to uint64 [len(ids)]."""
    keys = read_keys(ids)
    hashed = keys.hashes(seed)
    return hashed if keys.indices is None else hashed[keys.indices]


def remix(hashes: np.ndarray, seed: int, out: np.ndarray, scratch: np.ndarray) -> None:
    """Hash uint64 `hashes` again, with another seed, into `out`; `scratch` is overwritten. All have the same shape."""
    np.add(hashes, increment(seed), out=out)
    mix(out, scratch)


def increment(seed: int) -> np.uint64:
    """Return the number that is added to ids before mixing; it depends on the seed."""
    return np.uint64(INCREMENT * (seed + 1) % 2**64)


def _texts(values: pa.Array) -> pa.Array:
    _refuse_nulls(values)
    return values.cast(pa.large_binary())


def _hash_texts(texts: pa.Array, seed: int, out: np.ndarray) -> None:
    if can_hash_texts():
        _, offsets, data = texts.buffers()
        bounds = np.frombuffer(offsets, np.int64, len(texts) + 1, 8 * texts.offset)
        hash_texts(data.address if data else 0, bounds, seed, out)
    else:
        out[:] = np.fromiter(map(xxhash.xxh3_64_intdigest, texts.to_pylist(), repeat(seed)), np.uint64, len(texts))


def _split_dictionary(ids: pa.DictionaryArray) -> tuple[pa.Array, np.ndarray]:
    """Return the dictionary's entries in use, and for each id its index among these."""
    _refuse_nulls(ids)
    indices = numpy_view(ids.indices)
    used = mark(indices, len(ids.dictionary))
    if used.all():
        return ids.dictionary, indices
    return ids.dictionary.filter(pa.array(used)), (np.cumsum(used) - 1)[indices]


def _refuse_nulls(ids: pa.Array) -> None:
    # NumPy would read integers with nulls as floats, and change those above 2**53.
    if ids.null_count:
        raise ValueError(f"ids hold {ids.null_count} nulls, which have no hash")


def is_number(dtype: pa.DataType) -> bool:
    """Return whether an Arrow type holds numbers, booleans, dates, times or durations."""
    return (pa.types.is_primitive(dtype) or pa.types.is_decimal(dtype)) and not pa.types.is_interval(dtype)


def numpy_type(dtype: pa.DataType) -> np.dtype:
    """Return NumPy's type for Arrow integers or floats; Arrow's `to_pandas_dtype` needs pandas in some versions."""
    kind = "f" if pa.types.is_floating(dtype) else "u" if pa.types.is_unsigned_integer(dtype) else "i"
    return np.dtype(f"{kind}{dtype.bit_width // 8}")


def numpy_view(numbers: pa.Array) -> np.ndarray:
    """Return integers or floats as Arrow holds them, [len(numbers)], without a copy; values of nulls are undefined.

    Arrow's own `to_numpy` releases Python's lock and takes it again four times.
    """
    dtype = numpy_type(numbers.type)
    if not len(numbers):  # an empty array may have no buffer
        return np.empty(0, dtype)
    return np.frombuffer(numbers.buffers()[1], dtype, len(numbers), numbers.offset * dtype.itemsize)


def raw_times(times: pa.Array) -> np.ndarray:
    """Return dates, times or lengths of time, without nulls, as the integers that Arrow holds."""
    return times.view(pa.int32() if times.type.bit_width == 32 else pa.int64()).to_numpy()


def _numbers(ids: pa.Array) -> np.ndarray:
    dtype = ids.type
    if pa.types.is_null(dtype):
        return _NO_NUMBERS
    if pa.types.is_boolean(dtype):
        return ids.cast(pa.uint8()).to_numpy()
    if pa.types.is_temporal(dtype):
        numbers = raw_times(ids)
        if pa.types.is_duration(dtype):  # Parquet files hold durations as integers, without their unit
            return numbers
        return numbers.astype(np.int64) * NANOSECONDS[getattr(dtype, "unit", str(dtype))]
    return _whole(ids.to_numpy(), dtype)


def _whole(values: np.ndarray, dtype: pa.DataType) -> np.ndarray:
    bits = np.finfo(values.dtype).nmant + 1
    wrong = (values != np.rint(values)) | ~(np.abs(values) < 2**bits)  # both are true for NaN
    if wrong.any():
        if np.isnan(values[wrong][0]):
            raise UserError("ids must be whole numbers, found nan; if a row has no id, write null")
        raise UserError(
            f"ids must be whole numbers, found {values[wrong][0]}, but {dtype} is exact only below 2**{bits}; "
            f"write ids as integers or strings"
        )
    return values.astype(np.int64)


def _decimals(ids: pa.Array) -> IdKeys:
    if ids.type.bit_width < 128:
        ids = ids.cast(pa.decimal128(38, ids.type.scale))  # Arrow has few functions for narrower ones
    try:
        return IdKeys(ids.cast(pa.int64()).to_numpy())
    except pa.ArrowInvalid:
        pass  # some are not whole, or do not fit int64
    encoded = ids.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    in_int64 = np.array([-(2**63) <= value < 2**63 and value == int(value) for value in values])
    numbers = [int(value) for value, fits in zip(values, in_int64, strict=True) if fits]
    texts = [_digits(value) for value, fits in zip(values, in_int64, strict=True) if not fits]
    order = np.where(in_int64, np.cumsum(in_int64) - 1, len(numbers) + np.cumsum(~in_int64) - 1)
    return IdKeys(np.array(numbers, np.int64), pa.array(texts, pa.large_binary()), order[encoded.indices.to_numpy()])


def _digits(value: Decimal) -> bytes:
    # Equal values have the same text whatever their scale: 1.50 becomes 1.5.
    text = format(value, "f")
    return (text.rstrip("0").rstrip(".") if "." in text else text).encode()
