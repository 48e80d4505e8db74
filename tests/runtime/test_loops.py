"""Loops over ids give the same compiled as by NumPy, and by hand."""

import ctypes
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from recsys.ids import HashMapping, IdStatistics, QuotientRemainderMapping
from recsys.ids.hashing import hash_column
from recsys.ids.mappings import IdMapping
from recsys.runtime import loops

pytest.importorskip("numba")
COMPILED = "recsys.runtime.compiled"
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


MAPPINGS = [
    lambda: HashMapping(1000, 7),
    lambda: HashMapping(1000, 7, 3),
    lambda: QuotientRemainderMapping(100, 900, 7),
]


@pytest.mark.parametrize("size", [16, 16384])
@pytest.mark.parametrize("make", MAPPINGS)
@pytest.mark.parametrize("kind", [pa.int64(), pa.string()], ids=str)
def test_rows_and_statistics_are_the_same(make: Any, size: int, kind: pa.DataType) -> None:
    """With samples that are cut down many times, ids that come again, and more new ones than are gathered at once."""
    moduli = (10**15, 50, 20_000, 20_000)
    columns = [pa.array(edges(np.dtype(np.int64), 3000) % modulus).cast(kind) for modulus in moduli]
    columns.append(pa.array(np.arange(70_000)).cast(kind).slice(7))
    columns += [pa.array(edges(dtype)) for dtype in INTEGERS]  # negative ones too

    def run() -> Any:
        mapping, statistics = make(), IdStatistics(size)
        return [mapped(mapping, column, statistics) for column in columns], statistics.state().tolist()

    by_numpy, compiled = twice(run)
    assert by_numpy == compiled
    assert compiled[0] == [mapped(make(), column, None) for column in columns]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.string_view()], ids=str)
def test_texts_of_any_length_hash_alike(kind: pa.DataType) -> None:
    """XXH3 has four ways for texts of up to 16, 128 and 240 bytes, and longer ones."""
    texts = [chr(97 + size % 26) * size for size in (*range(300), 5000)]
    column = pa.array([*texts, *texts], kind)
    by_numpy, compiled = twice(lambda: hash_column(column.slice(3), 2**64 - 1).tolist())
    assert by_numpy == compiled == [xxhash.xxh3_64_intdigest(text.encode(), 2**64 - 1) for text in [*texts, *texts][3:]]
    assert hash_column(column.slice(0, 0)).tolist() == hash_column(pa.array([], kind)).tolist() == []


def test_a_library_that_shows_no_function_hashes_texts_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, COMPILED, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace())
    assert loops.compile_loops() and not loops.can_hash_texts()
    assert hash_column(pa.array(["a", "b", "a"])).tolist() == [
        xxhash.xxh3_64_intdigest(each.encode()) for each in "aba"
    ]


def mapped(mapping: IdMapping, column: pa.Array, statistics: IdStatistics | None) -> list[int]:
    out = np.empty(len(column) * mapping.rows_per_id, np.int32)
    mapping.map(column, out, statistics)
    return out.tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_columns_are_shuffled(dtype: type) -> None:
    generator = np.random.default_rng(0)
    columns, order = generator.integers(0, 99, (3, 1000)).astype(dtype), generator.permutation(1000).astype(np.int32)
    assert loops.compile_loops()
    out = np.empty_like(columns)
    loops.shuffle(columns, order, np.empty(1000, dtype), out)
    assert (out == columns[:, order]).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_lists_are_permuted(dtype: type, weighted: bool) -> None:
    generator = np.random.default_rng(0)
    lists = [generator.integers(0, 99, length).astype(dtype) for length in generator.integers(0, 9, 1000)]
    order, lengths = generator.permutation(1000).astype(np.int32), np.array([len(each) for each in lists], np.int32)
    values = np.concatenate(lists)
    weights = values.astype(np.float32) / 2 if weighted else None
    into = np.empty_like(values), np.empty_like(weights) if weights is not None else None
    assert loops.compile_loops()
    assert (loops.permute_lists(order, lengths, (values, weights), into) == lengths[order]).all()
    assert (into[0] == np.concatenate([lists[i] for i in order])).all()
    assert into[1] is None or (into[1] == into[0] / 2).all()


@pytest.mark.parametrize("dtype", [*INTEGERS, *map(np.dtype, (bool, "f2", "f4", "f8"))], ids=str)
def test_floats_are_rounded_alike(dtype: np.dtype) -> None:
    """Halfway between two floats, beyond the greatest, and no numbers at all."""
    numbers = edges(dtype) if dtype.kind in "iu" else np.array([0, 1, 0.1, 1 + 2**-24, -1e-46], dtype)
    columns = [numbers, numbers[:0], numbers[::2]]
    if dtype.kind == "f":
        columns += [np.append(numbers, each).astype(dtype) for each in (np.nan, np.inf, -np.inf)]
    if dtype == np.float64:
        columns += [np.append(numbers, each) for each in (3.4028235e38, 3.4028236e38, -1e300)]

    def run() -> list[Any]:
        found = []
        for column in columns:
            out = np.zeros(len(column), np.float32)
            found.append((loops.write_floats(column, out), out.tobytes()))
        return found

    by_numpy, compiled = twice(run)
    assert by_numpy == compiled
    with np.errstate(over="ignore"):
        assert [each for each, _ in compiled] == [bool(np.isfinite(c.astype(np.float32)).all()) for c in columns]


@pytest.mark.parametrize(
    ("num_threads", "beside_gpu", "expected"), [(0, True, False), (1, True, True), (2, False, False), (3, False, True)]
)
def test_more_threads_than_two_or_a_gpu_make_it_worth_while(num_threads: int, beside_gpu: bool, expected: bool) -> None:
    assert loops.are_worth_compiling(num_threads, beside_gpu) is expected


def test_compiled_where_no_folder_can_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose packages are read-only and whose user has no home."""
    from numba.core import caching

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    monkeypatch.delitem(sys.modules, COMPILED, raising=False)
    assert loops.compile_loops()
    out, scratch = np.empty((2, 3), np.uint64)
    loops.hash_numbers(np.arange(3), np.uint64(0), out, scratch)
    assert out.tolist() == [by_hand(number) for number in range(3)]


def test_without_numba_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, COMPILED, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not loops.compile_loops()
    out, scratch = np.empty((2, 3), np.uint64)
    loops.hash_numbers(np.arange(3), np.uint64(0), out, scratch)
    assert out.tolist() == [by_hand(number) for number in range(3)]


ANOTHER = """\
from numba.core import event
with event.install_recorder("numba:compile") as compilations:
    import test_loops
    test_loops.use_compiled()
print(len(compilations.buffer))
"""


def use_compiled() -> None:
    assert loops.compile_loops()
    for column in pa.array([1, 2]), pa.array(["a", "b"]):
        mapped(HashMapping(100, 0), column, IdStatistics())


def test_what_is_compiled_is_kept_for_the_next_process() -> None:
    use_compiled()
    assert another(ANOTHER) == ["0"]


def another(code: str, *arguments: str, **variables: str) -> list[str]:
    """Return the words that a process of its own prints."""
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    command, environment = [sys.executable, "-c", code, *arguments], {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.split()


HASHES = """\
import sys
import numpy as np
from recsys.runtime import loops
loops.compile_loops()
for kind in sys.argv[1:]:
    out, scratch = np.empty((2, 1), np.uint64)
    loops.hash_numbers(np.array([7], kind), np.uint64(0), out, scratch)
    print(out[0])
"""


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    """The folder can be made, and no byte written, as `ulimit -f 0` has it too."""
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n" + HASHES
    assert another(limited, "int64", NUMBA_CACHE_DIR=str(tmp_path)) == [str(by_hand(7))]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("share", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_files_of_what_is_compiled_that_are_cut_off_are_made_anew(share: float, tmp_path: Path) -> None:
    """As a machine leaves them that loses its power."""
    variables = {"NUMBA_CACHE_DIR": str(tmp_path)}
    another(HASHES, "int64", **variables)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path, content in files.items():
        path.write_bytes(content[: int(share * len(content))])
    assert another(HASHES, "int64", **variables) == [str(by_hand(7))]
    assert {path: len(path.read_bytes()) for path in files} == {path: len(content) for path, content in files.items()}


# Another process compiles a second signature, having looked before this one wrote anything, while this one writes.
MEANWHILE = """\
import os, subprocess, sys
from pathlib import Path
from numba.core.caching import IndexDataCacheFile
write = IndexDataCacheFile._save_data
def write_after_another(*arguments):
    IndexDataCacheFile._save_data = write
    for index in Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbi"):
        index.unlink()
    subprocess.run([sys.executable, "-c", os.environ["HASHES"], "int64"], check=True)
    write(*arguments)
IndexDataCacheFile._save_data = write_after_another
"""


@pytest.mark.slow
def test_processes_that_compile_at_once_do_not_get_each_others_signatures(tmp_path: Path) -> None:
    expected, variables = str(by_hand(7)), {"NUMBA_CACHE_DIR": str(tmp_path), "HASHES": HASHES}
    assert another(MEANWHILE + HASHES, "int32", **variables) == [expected, expected]
    assert another(HASHES, "int64", "int32", "int8", **variables) == [expected] * 3


@pytest.mark.parametrize("error", [SystemError("initialization of _internal failed"), OSError("no libllvmlite.so")])
def test_a_numba_that_cannot_be_used_is_named_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of another NumPy, or of an LLVM whose own libraries are not there."""

    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(logging.getLogger("recsys"), "propagate", True)
    assert not loops.compile_loops() and not loops.compile_loops()
    assert [record.getMessage() for record in caplog.records if str(error) in record.getMessage()] == [
        f"decoding threads use the slower NumPy loops, since numba cannot be used "
        f"({type(error).__name__}: {error}); install the "
        f"release that the extra 'threads' names, or uninstall it"
    ]
