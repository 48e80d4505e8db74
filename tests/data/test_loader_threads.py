"""The loader's threads: orderly ends, bounded reading ahead, errors where they belong."""

import itertools
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rows import IDENTITY, OPTIONS, SPEC, build, threads, write

import recsys.data.loader as loader_module
from recsys.data.batch import Batch
from recsys.data.decode import SegmentReader
from recsys.data.loader import Loader
from recsys.data.order import Window
from recsys.data.spec import IdColumn
from recsys.data.window import Columns
from recsys.errors import UserError
from recsys.ids import IdentityMapping

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


# Threads


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("prefetch", [0, 1, 100])
def test_closing_early_ends_all_threads(dataset, taken, prefetch):
    batches = build(dataset, 8, num_threads=3, prefetch_batches=prefetch).batches(num_epochs=10)
    for _ in range(taken):
        next(batches)
    assert bool(threads()) == (taken > 0)
    batches.close()
    assert not threads()
    assert not list(batches)


@pytest.mark.parametrize(("num_streams", "num_threads"), [(1, 4), (3, 4), (8, 4)])
def test_all_threads_decode_however_few_streams_there_are(dataset, monkeypatch, num_streams, num_threads):
    """As on each of 8 ranks of 8 streams, which reads one."""
    together, original = threading.Barrier(num_threads, timeout=30), Loader._read
    begun = itertools.count()

    def read(self: Loader, placed: Any) -> Columns:
        if next(begun) < num_threads:
            together.wait()  # breaks unless so many threads come here
        return original(self, placed)

    monkeypatch.setattr(Loader, "_read", read)
    options = {"num_streams": num_streams, "num_threads": num_threads, "window_bytes": 1}
    assert sum(batch.num_rows for batch in build(dataset, 8, **options).batches()) == 101


def test_closing_gives_up_windows_that_wait_for_a_thread(dataset, monkeypatch):
    begun: list[Window] = []
    original = Loader._read

    def slow(self: Loader, window: Window) -> Columns:
        begun.append(window)
        time.sleep(0.05)
        return original(self, window)

    monkeypatch.setattr(Loader, "_read", slow)
    batches = build(dataset, 104, num_threads=1).batches(num_epochs=10)  # a batch an epoch
    next(batches)
    before = len(begun)
    batches.close()
    assert not threads()
    assert len(begun) <= before + 2, "of eight or more in the queue"


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_reading_ahead_is_bounded(dataset, monkeypatch, prefetch):
    collated = []
    original = loader_module.collate

    def count(*args: Any) -> Batch:
        collated.append(args)
        return original(*args)

    monkeypatch.setattr(loader_module, "collate", count)
    # One taken, those in the queue, one on its way into it.
    expected = 1 + prefetch + 1 if prefetch else 1
    with closing(build(dataset, 8, num_threads=2, prefetch_batches=prefetch).batches()) as batches:
        next(batches)
        deadline = time.monotonic() + 5
        while len(collated) < expected and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(collated) == expected
    assert len(collated) <= expected + 1, "closing ends the work, not only its use"


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_error_in_a_worker_comes_out_of_next(tmp_path, num_threads):
    dataset = write(tmp_path, [[40], [40]])
    small = IdentityMapping(60)
    spec = replace(SPEC, ids=[IdColumn("row", "row", small), IdColumn("history", "history", IDENTITY)])
    options = replace(OPTIONS, num_threads=num_threads, shuffle=False, num_streams=1)
    batches = Loader(dataset, spec, options, 20).batches()
    assert [len(next(batches).weights) for _ in range(2)] == [20, 20]
    with pytest.raises(UserError, match=r"column 'row' .*id 60 is outside .*\(in row group 0 of .*part-001.parquet\)"):
        list(batches)
    assert not threads()
    assert not list(batches)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_other_errors_come_out_as_they_are(dataset, monkeypatch, num_threads):
    monkeypatch.setattr(SegmentReader, "read", lambda self, segment: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(build(dataset, 8, num_threads=num_threads).batches())


def test_damaged_file_comes_out_of_next(tmp_path):
    dataset = write(tmp_path, [[40], [40]])
    path = dataset.row_groups.paths[1]
    Path(path).write_bytes(Path(path).read_bytes()[:50])
    with pytest.raises(UserError, match=f"row group 0 of '{path}' is not what it was when the run began"):
        list(build(dataset, 8, num_threads=2).batches())
