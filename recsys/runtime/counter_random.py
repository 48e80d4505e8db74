"""Random numbers as a function of a key and a counter, the same on any device and any split over ranks."""

import math
from collections.abc import Iterator

import numpy as np
import xxhash

# SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2714064.2660195), in wrapping integers.
INCREMENT = 0x9E3779B97F4A7C15
# Shift to the right, then factor. The last shift is not used here: it changes none of the 24 bits that are used.
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
COLUMN_BITS = 20  # of a counter made of a row and a column

_AT_ONCE = 1 << 15  # numbers of 8 bytes per block; two such blocks fit in the cache of a core


def make_key(*names: int | str) -> int:
    """Return a 64-bit key for a stream of numbers named by integers and strings."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, names)).encode())


def uniform_numbers(key: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) with 24 random bits: the SplitMix64 generator at counter (row, column).

    Args:
        key: of the stream. rows: [n] int64. columns: [m] int64, below 2**20.

    Returns:
        [n, m] float32.
    """
    numbers = np.empty((len(rows), len(columns)), np.float32)
    for some, bits in _random_bits(key, rows, columns):
        part = numbers[some]
        part[...] = np.right_shift(bits, np.uint64(40), out=bits).view(np.int64)  # signed is converted to float faster
        part *= np.float32(2.0**-24)
    return numbers


def at_least(bound: float, key: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return whether each of `uniform_numbers` is at least an FP32 bound, bool [n, m], without making floats."""
    reached = np.zeros((len(rows), len(columns)), np.bool_)
    least = math.ceil(float(np.float32(bound)) * 2**24) << 40
    if least < 1 << 64:
        for chunk, bits in _random_bits(key, rows, columns):
            np.greater_equal(bits, np.uint64(max(0, least)), out=reached[chunk])
    return reached


def _random_bits(key: int, rows: np.ndarray, columns: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield blocks of rows with their 64-bit numbers; only the upper 24 bits count, and blocks share memory."""
    # (row * 2**20 + column) * INCREMENT + key
    of_rows = (rows.astype(np.uint64) << np.uint64(COLUMN_BITS)) * np.uint64(INCREMENT) + np.uint64(key)
    of_columns = columns.astype(np.uint64) * np.uint64(INCREMENT)
    step = max(1, _AT_ONCE // max(1, len(columns)))
    bits, shifted = np.empty((2, step, len(columns)), np.uint64)
    # For consecutive rows, each block is the first block plus a number. Adding rows and columns again for each block
    # would take half as long as all the rest if there are few columns.
    in_order = len(rows) > step and bool((np.diff(rows) == 1).all())
    first = of_rows[:step, None] + of_columns if in_order else bits
    for start in range(0, len(rows), step):
        block = slice(start, min(start + step, len(rows)))
        x, aside = bits[: block.stop - start], shifted[: block.stop - start]
        if in_order:
            np.add(first[: len(x)], np.uint64((start << COLUMN_BITS) * INCREMENT % (1 << 64)), out=x)
        else:
            np.add(of_rows[block, None], of_columns, out=x)
        for shift, factor in MIXING:
            np.bitwise_xor(x, np.right_shift(x, np.uint64(shift), out=aside), out=x)
            np.multiply(x, np.uint64(factor), out=x)
        yield block, x
