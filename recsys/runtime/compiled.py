"""The loops of `recsys.runtime.loops` for numba to compile: one call for a whole column, without Python's lock.

The functions there that have the same names describe the arguments.

Functions that they call are module-level: numba caches compiled code on disk, and the next process would not find the
code of a loop that calls a local function.
"""

import ctypes
import hashlib
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba.core.caching import FunctionCache

from recsys.runtime.counter_random import LAST_SHIFT, MIXING

(_SHIFT_1, _FACTOR_1), (_SHIFT_2, _FACTOR_2) = ((np.uint64(shift), np.uint64(factor)) for shift, factor in MIXING)
_LAST_SHIFT, _ONE, _HIGH = np.uint64(LAST_SHIFT), np.uint64(1), np.uint64(32)
_XXH3 = "recsys_xxh3"


class _Cache(FunctionCache):
    """The compiled code of a loop on disk: a file for each signature, named by a hash of all that the code depends on.

    numba's own cache numbers the files and maps signatures to them in an index. If processes compiled at the same time,
    or one was killed between the two writes, the index named code of another signature or of an earlier version; and a
    full disk, or a truncated index, ended the run.
    """

    def load_overload(self, signature: Any, target: Any) -> Any:
        target.refresh()
        try:
            content = self._cache_file._load_data(self._file_of(signature, target.codegen()))
            return self._impl.rebuild(target, content)
        except Exception:  # the file is missing or damaged, which may raise anything: the loop is compiled again
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        with suppress(OSError):  # the loop runs without a copy on disk
            self._cache_file._save_data(self._file_of(signature, compiled.codegen), self._impl.reduce(compiled))

    def _file_of(self, signature: Any, codegen: Any) -> str:
        files = self._cache_file
        of = files._version, files._source_stamp, self._index_key(signature, codegen)
        return files._data_name(int(hashlib.sha256(repr(of).encode()).hexdigest()[:16], 16))


def _compiled(loop: Callable[..., Any]) -> Any:
    dispatcher: Any = numba.njit(nogil=True)(loop)
    with suppress(RuntimeError):  # without a writable folder, each process compiles the loop again
        dispatcher._cache = _Cache(loop)
    return dispatcher


@_compiled
def hash_numbers(numbers: Any, increment: Any, out: Any) -> None:
    for i in range(len(numbers)):
        out[i] = _mixed(np.uint64(numbers[i]) + increment)


@_compiled
def write_remainders(hashes: Any, divisor: Any, out: Any) -> None:
    for i in range(len(hashes)):
        out[i] = hashes[i] % divisor + _ONE


@_compiled
def pick_unseen(hashes: Any, last: Any, seen: Any, out: Any) -> Any:
    number, bits = 0, np.uint64(len(seen) - 1)
    for i in range(len(hashes)):
        if _is_unseen(hashes[i], last, seen, bits):
            out[number] = hashes[i]
            number += 1
    return number


@_compiled
def write_rows(numbers: Any, increment: Any, divisor: Any, out: Any, last: Any, seen: Any, unseen: Any) -> Any:
    number, bits = 0, np.uint64(len(seen) - 1)
    for i in range(len(numbers)):
        x = _mixed(np.uint64(numbers[i]) + increment)
        if _is_unseen(x, last, seen, bits):
            if number == len(unseen):
                return i, number
            unseen[number] = x
            number += 1
        out[i] = x % divisor + _ONE
    return len(numbers), number


@_compiled
def mark(places: Any, marks: Any) -> None:
    for i in range(len(places)):
        marks[np.uint64(places[i])] = True


@_compiled
def take_rows(source: Any, places: Any, out: Any) -> None:
    for i in range(len(places)):
        for j in range(source.shape[1]):
            out[i, j] = source[np.uint64(places[i]), j]


@_compiled
def shuffle(columns: Any, order: Any, near: Any, out: Any) -> None:
    for column in range(len(columns)):
        for i in range(len(near)):  # a slice, near[:] = ..., would take two seconds and 25 MiB to compile
            near[i] = columns[column, i]
        for i in range(len(order)):
            out[column, i] = near[np.uint32(order[i])]


@_compiled
def permute_lists(
    order: Any, lengths: Any, values: Any, weights: Any, lengths_out: Any, values_out: Any, weights_out: Any
) -> None:
    # Indices are unsigned, because numba checks whether signed ones count from the end.
    starts, start, at = np.empty(len(lengths), np.uint64), np.uint64(0), np.uint64(0)
    for i in range(len(lengths)):
        starts[i] = start
        start += np.uint64(lengths[i])
    for i in range(len(order)):
        place = np.uint32(order[i])
        first, length = starts[place], np.uint64(lengths[place])
        lengths_out[i] = length
        for j in range(length):
            values_out[at + j] = values[first + j]
            if weights is not None:
                weights_out[at + j] = weights[first + j]
        at += length


@_compiled
def write_floats(numbers: Any, out: Any) -> Any:
    is_finite = True
    for i in range(len(numbers)):
        x = np.float32(numbers[i])
        out[i] = x
        is_finite &= np.isfinite(x)
    return is_finite


@numba.njit(nogil=True, inline="always")
def _mixed(x: Any) -> Any:
    x = (x ^ (x >> _SHIFT_1)) * _FACTOR_1
    x = (x ^ (x >> _SHIFT_2)) * _FACTOR_2
    return x ^ (x >> _LAST_SHIFT)


@numba.njit(nogil=True, inline="always")
def _is_unseen(x: Any, last: Any, seen: Any, bits: Any) -> Any:
    return x <= last and seen[x & bits] != x and seen[x >> _HIGH & bits] != x


def _has_xxh3() -> bool:
    """Register XXH3 of the library of Python's xxhash with LLVM; return whether that library exports it."""
    try:
        library = importlib.import_module("xxhash._xxhash").__file__
        function = ctypes.CDLL(library).XXH3_64bits_withSeed
    except (ImportError, OSError, AttributeError):
        return False
    # It is registered by name, because its address differs between processes.
    binding.add_symbol(_XXH3, ctypes.cast(function, ctypes.c_void_p).value)
    return True


has_texts = _has_xxh3()
_xxh3 = numba.types.ExternalFunction(_XXH3, numba.types.uint64(*[numba.types.uint64] * 3))  # address, bytes, seed


@_compiled
def hash_texts(data: Any, offsets: Any, seed: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] = _xxh3(np.uint64(data + offsets[i]), np.uint64(offsets[i + 1] - offsets[i]), seed)
