"""Loops over columns, which take most of the time of decoding, by NumPy or compiled (numba.pydata.org).

A pass of NumPy over a chunk takes some ten microseconds, and after each pass a thread asks for Python's lock. More than
two or three decoding threads therefore wait for each other: 12 on 16 cores decoded no more than four. A compiled loop
is one call for a whole column, is faster, and lets other threads run meanwhile.
"""

import importlib
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from recsys.runtime.counter_random import LAST_SHIFT, MIXING
from recsys.runtime.logs import logger
from recsys.runtime.versions import is_installed

CHUNK = 65536  # ids per pass: few enough for the cache, and enough that the overhead of NumPy's calls is small
# Arrays without dimensions, because every call would make one from a NumPy scalar.
_ROUNDS = tuple((np.array(shift, np.uint64), np.array(factor, np.uint64)) for shift, factor in MIXING)
_LAST_SHIFT = np.array(LAST_SHIFT, np.uint64)
_MOST_BY_NUMPY = 2  # threads that decode at full speed next to each other
_compiled: Any = None  # recsys.runtime.compiled, once `compile_loops` has been called


class Sample(NamedTuple):
    """Hashes that have been seen, for `pick_unseen`; hashes above `last` are ignored.

    Attributes:
        seen: uint64, of a length that is a power of two; each hash is in one of two places, and empty places hold 0.
    """

    last: int
    seen: np.ndarray


NO_SAMPLE = Sample(0, np.zeros(1, np.uint64))  # no hash is new to it


@cache  # because looking for a package searches folders, and memory predictions ask for each rank and phase
def are_worth_compiling(num_threads: int, beside_gpu: bool) -> bool:
    """Return whether this many threads decode faster by compiled loops, which take 100 MiB, and numba is installed.

    Two threads with NumPy hardly wait for each other; with a GPU, they would wait for the training thread.
    """
    return num_threads > (0 if beside_gpu else _MOST_BY_NUMPY) and is_installed("numba")


def compile_loops() -> bool:
    """Compile the loops of this process if numba can be used; return whether it can. Results stay the same."""
    global _compiled
    try:
        _compiled = importlib.import_module("recsys.runtime.compiled")
    except Exception as error:  # numba is optional; an unfit NumPy or LLVM raises SystemError, OSError and others
        _warn(f"{type(error).__name__}: {error}")
        _compiled = None
    return _compiled is not None


@cache  # to warn once, though each evaluation compiles again
def _warn(reason: str) -> None:
    logger.warning(
        "decoding threads use the slower NumPy loops, since numba cannot be used (%s); install the release that "
        "the extra 'threads' names, or uninstall it",
        reason,
    )


def are_compiled() -> bool:
    """Return whether the loops are compiled; functions whose docstring begins with "Compiled:" need that."""
    return _compiled is not None


def can_hash_texts() -> bool:
    """Return whether `hash_texts` can be used in this process."""
    return _compiled is not None and _compiled.has_texts


def hash_texts(data: int, offsets: np.ndarray, seed: int, out: np.ndarray) -> None:
    """Write the XXH3-64 hashes of texts to uint64 `out` [texts]; needs `can_hash_texts`.

    Args:
        data: the address of their bytes. offsets: int64 [texts + 1], where each text begins and the last one ends.
    """
    _compiled.hash_texts(data, offsets, np.uint64(seed), out)


def write_rows(
    numbers: np.ndarray, increment: np.uint64, divisor: int, out: np.ndarray, sample: Sample, unseen: np.ndarray
) -> tuple[int, int]:
    """Compiled: write hashes % divisor + 1 to int32 or int64 `out`, and collect the hashes that a sample lacks.

    Args:
        numbers: integers to hash like `hash_numbers`. unseen: uint64, filled with what `pick_unseen` would return.

    Returns:
        How many rows were written (fewer than all if `unseen` became full), and how many of `unseen` are filled.
    """
    return _compiled.write_rows(
        numbers, increment, np.uint64(divisor), out, np.uint64(sample.last), sample.seen, unseen
    )


def hash_numbers(numbers: np.ndarray, increment: np.uint64, out: np.ndarray, scratch: np.ndarray) -> None:
    """Write the hashes of integers to uint64 `out`; `scratch`, of the same shape and type, is overwritten."""
    if _compiled is not None:
        _compiled.hash_numbers(numbers, increment, out)
    elif numbers.dtype.itemsize == 8:
        np.add(numbers.view(np.uint64), increment, out=out)
        mix(out, scratch)
    else:
        np.copyto(out.view(np.int64) if numbers.dtype.kind == "i" else out, numbers)
        np.add(out, increment, out=out)
        mix(out, scratch)


def mix(x: np.ndarray, scratch: np.ndarray) -> None:
    """Apply SplitMix64's finalizer to uint64 `x` in place; `scratch` is uint64 of the same shape, overwritten."""
    # In place and chunk by chunk, because on whole columns these eight passes would wait for memory.
    for shift, multiplier in _ROUNDS:
        np.right_shift(x, shift, scratch)
        np.bitwise_xor(x, scratch, x)
        np.multiply(x, multiplier, x)
    np.right_shift(x, _LAST_SHIFT, scratch)
    np.bitwise_xor(x, scratch, x)


def distinct(numbers: np.ndarray) -> np.ndarray:
    """Return the distinct numbers, ascending."""
    # Without return_counts, NumPy from 2.3 on finds them by hashes, which took up to 27 times as long
    # (numpy/numpy#31969).
    return np.unique(numbers, return_counts=True)[0]


def modulo(x: np.ndarray, divisor: int, scratch: np.ndarray) -> None:
    """Reduce uint64 `x` in place to x % divisor; `scratch` is uint64 of the same shape, overwritten."""
    # NumPy's remainder does not use vector instructions, but its division by a constant does.
    by = np.array(divisor, np.uint64)
    np.floor_divide(x, by, scratch)
    np.multiply(scratch, by, scratch)
    np.subtract(x, scratch, x)


def mark(places: np.ndarray, number: int) -> np.ndarray:
    """Return which of 0 … number - 1 are among the integers `places`, bool [number]."""
    marks = np.zeros(number, bool)
    if _compiled is not None:
        _compiled.mark(places, marks)
    else:
        marks[places] = True
    return marks


def take_rows(source: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
    """Write rows `places`, integers [n], of `source` [rows, columns] to `out` [n, columns]."""
    if _compiled is not None:
        _compiled.take_rows(source, places, out)
        return
    for start in range(0, len(places), CHUNK):  # in chunks, because NumPy makes an int64 copy of the places
        part = places[start : start + CHUNK]
        np.take(source, part, axis=0, out=out[start : start + CHUNK], mode="clip")


def shuffle(columns: np.ndarray, order: np.ndarray, near: np.ndarray, out: np.ndarray) -> None:
    """Compiled: write `columns` [columns, rows] to `out`, of the same shape, with row `order[i]` as row i.

    Args:
        order: int32 [rows]. near: [rows], overwritten: each column is first copied there, in order, into the cache.
    """
    _compiled.shuffle(columns, order, near, out)


def permute_lists(
    order: np.ndarray,
    lengths: np.ndarray,
    source: tuple[np.ndarray, np.ndarray | None],
    into: tuple[np.ndarray, np.ndarray | None],
) -> np.ndarray:
    """Compiled: write lists in a new order, list `order[i]` as the i-th, and return their lengths in that order.

    Args:
        order: int32 [lists]. lengths: int32 [lists]. source, into: values of the lists, end to end; weights or None.
    """
    permuted = np.empty_like(lengths)
    _compiled.permute_lists(order, lengths, *source, permuted, *into)
    return permuted


def write_floats(numbers: np.ndarray, out: np.ndarray) -> bool:
    """Write numbers to float32 `out`, rounded to the nearest, and return whether all results are finite."""
    if _compiled is not None and numbers.dtype != np.float16:  # numba does not know float16
        return _compiled.write_floats(numbers, out)
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, numbers, casting="unsafe")
    return bool(np.isfinite(out).all())


def write_remainders(hashes: np.ndarray, divisor: int, out: np.ndarray, scratch: np.ndarray) -> None:
    """Write hashes % divisor + 1 to int32 or int64 `out` of any stride; `hashes` and `scratch` may be overwritten."""
    if _compiled is not None:
        _compiled.write_remainders(hashes, np.uint64(divisor), out)
    else:
        modulo(hashes, divisor, scratch)
        write_sum(hashes, 1, out)


def write_sum(values: np.ndarray, addend: int, out: np.ndarray) -> None:
    """Write uint64 `values` + addend to int32 or int64 `out`, in the fewest passes over memory."""
    if out.dtype == np.int64:
        np.add(values, np.uint64(addend), out=out.view(np.uint64))
    else:
        np.copyto(out.view(np.uint32), values, casting="unsafe")
        np.add(out, np.int32(addend), out=out)


def pick_unseen(chunk: np.ndarray, sample: Sample) -> np.ndarray:
    """Return the hashes up to `sample.last` that the sample lacks; some may be there several times.

    Args:
        chunk: uint64 [3, n]: the hashes, and two rows that are overwritten; the result may be a view of one of these.
    """
    hashes, (last, seen) = chunk[0], sample
    bits = np.uint64(len(seen) - 1)
    if _compiled is not None:
        return chunk[1, : _compiled.pick_unseen(hashes, np.uint64(last), seen, chunk[1])]
    if last < 2**64 - 1:
        hashes = hashes.take((hashes <= np.uint64(last)).nonzero()[0])
    places, occupants = chunk[1:, : len(hashes)]
    np.bitwise_and(hashes, bits, out=places)
    np.take(seen, places.view(np.int64), out=occupants, mode="clip")
    unseen = hashes.take((occupants != hashes).nonzero()[0])
    return unseen[seen[second_place(unseen, seen)] != unseen]


def second_place(hashes: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the second of each hash's two places in `seen`, int64; its lowest bits give the first."""
    return (hashes >> np.uint64(32) & np.uint64(len(seen) - 1)).view(np.int64)
