"""Loops over ids give the same compiled as by NumPy, and by hand."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys.ids import HashMapping, IdStatistics, QuotientRemainderMapping, loops
from recsys.ids.mappings import IdMapping

pytest.importorskip("numba")
INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.fixture(autouse=True)
def by_numpy_at_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loops, "_compiled", None)
    yield


def twice(run: Any) -> tuple[Any, Any]:
    """Return what a function gives by NumPy, and compiled."""
    by_numpy = run()
    assert loops.compile_loops()
    return by_numpy, run()


def edges(dtype: np.dtype, count: int = 1000) -> np.ndarray:
    """Return numbers of all sizes, the least and the greatest among them."""
    limits = np.iinfo(dtype)
    numbers = np.random.default_rng(0).integers(limits.min, limits.max, count, dtype, endpoint=True)
    numbers[:4] = limits.min, limits.max, 0, 1
    return numbers


@pytest.mark.parametrize("dtype", [*INTEGERS, np.dtype(bool)], ids=str)
def test_numbers_of_any_width_hash_alike(dtype: np.dtype) -> None:
    numbers = np.array([False, True] * 50) if dtype.kind == "b" else edges(dtype)
    numbers.flags.writeable = False  # as Arrow gives them
    for given in (numbers, numbers[::3]):

        def run(given: np.ndarray = given) -> list[int]:
            out, scratch = np.empty((2, len(given)), np.uint64)
            loops.hash_numbers(given, np.uint64(2**64 - 3), out, scratch)
            return out.tolist()

        by_numpy, compiled = twice(run)
        assert by_numpy == compiled == [by_hand(int(number) - 3) for number in given]


def by_hand(number: int) -> int:
    """SplitMix64's finalizer as in its paper, in Python's integers."""
    x = number % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("divisor", [1, 2, 999_999, 2**31 - 2])
def test_remainders(dtype: type, divisor: int) -> None:
    hashes = edges(np.dtype(np.uint64))

    def run() -> list[int]:
        out = np.zeros(2 * len(hashes), dtype)
        loops.write_remainders(hashes.copy(), divisor, out[1::2], np.empty_like(hashes))
        return out.tolist()

    by_numpy, compiled = twice(run)
    assert by_numpy == compiled == [row for each in hashes.tolist() for row in (0, each % divisor + 1)]


@pytest.mark.parametrize("size", [16, 16384])
@pytest.mark.parametrize("make", [lambda: HashMapping(1000, 7, 3), lambda: QuotientRemainderMapping(100, 2000, 7)])
def test_rows_and_statistics_are_the_same(make: Any, size: int) -> None:
    """With samples that are cut down many times, and ids that come again."""
    columns = [pa.array(edges(np.dtype(np.int64), 3000) % modulus) for modulus in (10**15, 50, 20_000, 20_000)]

    def run() -> Any:
        mapping, statistics = make(), IdStatistics(size)
        return [mapped(mapping, column, statistics) for column in columns], statistics.state().tolist()

    by_numpy, compiled = twice(run)
    assert by_numpy == compiled


def mapped(mapping: IdMapping, column: pa.Array, statistics: IdStatistics) -> list[int]:
    out = np.empty(len(column) * mapping.rows_per_id, np.int32)
    mapping.map(column, out, statistics)
    return out.tolist()


def test_compiled_where_no_folder_can_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose packages are read-only and whose user has no home."""
    from numba.core import caching

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    loops._compile.cache_clear()
    try:
        assert loops.compile_loops()
        out, scratch = np.empty((2, 3), np.uint64)
        loops.hash_numbers(np.arange(3), np.uint64(0), out, scratch)
        assert out.tolist() == [by_hand(number) for number in range(3)]
    finally:
        loops._compile.cache_clear()


def test_without_numba_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    loops._compile.cache_clear()
    try:
        assert not loops.compile_loops()
        out, scratch = np.empty((2, 3), np.uint64)
        loops.hash_numbers(np.arange(3), np.uint64(0), out, scratch)
        assert out.tolist() == [by_hand(number) for number in range(3)]
    finally:
        loops._compile.cache_clear()
