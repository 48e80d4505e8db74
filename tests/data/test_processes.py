"""Windows decoded by processes: the batches, counts, messages and errors of threads, and nothing left behind."""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from launch import environment, losses_of, must_train
from rows import OPTIONS, SPEC, build, rows, write

from recsys.data.dataset import Dataset
from recsys.data.loader import Loader
from recsys.data.order import Position
from recsys.data.spec import BatchSpec, FloatColumn
from recsys.errors import UserError
from recsys.ids import HashMapping, IdStatistics

IN_PROCESSES = {"processes": True, "num_threads": 3}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return write(tmp_path_factory.mktemp("data"), [[40, 0, 13], [1], [30, 17] * 4])


def shared_files() -> int:
    """How many blocks of memory that can be shared this process has open."""
    return sum("memfd:recsys" in os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    assert not children(os.getpid())


def children(parent: int) -> list[int]:
    """The processes that a process has started, or whose parents it has, without those that are zombies."""
    found, of = [], {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, by = each.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if state != "Z" and "recsys.data.processes" in (each.parent / "cmdline").read_text():
            of.setdefault(int(by), []).append(int(each.parent.name))
    for child in of.get(parent, []):
        found += [child, *of.get(child, [])]
    return found


def test_ids_are_counted_alike_and_memory_is_used_again(dataset):
    found = []
    for changes in ({}, IN_PROCESSES):
        counted = [IdStatistics(size=64), IdStatistics(size=64)]  # too few for all: a sample of them is kept
        mapping = HashMapping(1000, 1)
        ids = [replace(part, statistics=each, mapping=mapping) for part, each in zip(SPEC.ids, counted, strict=True)]
        loader = Loader(dataset, replace(SPEC, ids=ids), replace(OPTIONS, **changes), 16)
        assert sum(batch.num_rows for batch in loader.batches(num_epochs=30)) == 30 * dataset.num_rows
        found.append([(each.num_rows, each.num_ids, each.summary(mapping)) for each in counted])
    assert found[0] == found[1]
    assert found[0][0][:2] == (30 * dataset.num_rows, 30 * dataset.num_rows) and not found[0][0][2]["exact"]
    # Of 330 windows, some 16 are there at once, each in blocks of 4 KiB.
    assert 16 * 4096 < loader.host_bytes["window_bytes"] < 400_000


@pytest.mark.slow
def test_what_does_not_fit_is_told_in_the_thread_that_asks(dataset):
    spec = BatchSpec(SPEC.ids, SPEC.floats, [FloatColumn("label", "half", binary=True)])
    loader = Loader(dataset, spec, replace(OPTIONS, **IN_PROCESSES), 16)
    with closing(loader.batches()) as batches, pytest.raises(UserError, match=r"column 'half' .*in row group"):
        list(batches)


@pytest.mark.slow
def test_rows_that_cannot_be_read_are_left_out(tmp_path, caplog):
    dataset = write(tmp_path, [[20], [30], [40]])
    os.truncate(tmp_path / "part-001.parquet", 100)
    with caplog.at_level(logging.WARNING, "recsys"):
        loader = build(dataset, 16, skip_bad=True, **IN_PROCESSES)
        batches = list(loader.batches())
    assert sum(batch.num_rows for batch in batches) == 60 and sum(batch.num_bad_rows for batch in batches) == 30
    assert "rows left out" in caplog.text and "part-001.parquet" in caplog.text


def test_they_change_nothing_and_one_that_is_killed_is_told(dataset):
    """From the middle of an epoch, on one of three ranks."""
    expected = list(build(dataset, 16, 1, 3).batches(Position(0, 32, 32), num_epochs=3))
    with closing(build(dataset, 16, 1, 3, **IN_PROCESSES).batches(Position(0, 32, 32), num_epochs=1000)) as batches:
        found = list(islice(batches, len(expected)))
        assert [*map(rows, found)] == [*map(rows, expected)] and len(expected) > 30
        assert [each.position for each in found] == [each.position for each in expected]
        assert len(children(os.getpid())) == 4
        for each in children(os.getpid())[1:]:
            os.kill(each, signal.SIGKILL)
        with pytest.raises(UserError, match=r"process that decodes .* has died.*data.processes=false"):
            list(batches)


@pytest.mark.slow
def test_one_that_hangs_does_not_keep_a_run_from_its_end(dataset, monkeypatch):
    """As where a file system does not answer: while a thread waits for a window of it."""
    monkeypatch.setattr("recsys.data.processes._ENDING_S", 0.5)
    gc.collect()
    before = shared_files()
    batches = build(dataset, 16, **IN_PROCESSES).batches(num_epochs=1000)
    next(batches)
    for each in children(os.getpid())[1:]:
        os.kill(each, signal.SIGSTOP)
    time.sleep(0.5)
    batches.close()
    del batches
    gc.collect()
    assert shared_files() <= before


@pytest.mark.slow
def test_they_end_with_the_one_that_trains_and_not_by_its_signals(dataset):
    folder = Path(dataset.row_groups.paths[0]).parent
    program = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parents[1] / "helpers")]}
from rows import *
dataset = open_dataset("data.train", {str(folder)!r}, dict.fromkeys(SPEC.columns(), "key"))
batches = build(dataset, 16, processes=True, num_threads=2).batches(num_epochs=10**6)
next(batches)
print("ready", flush=True)
for batch in batches:
    time.sleep(0.001)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    started = children(process.pid)
    assert len(started) == 3
    for each in started:
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(each, sent)
    time.sleep(0.5)
    assert process.poll() is None and children(process.pid) == started
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{each}").exists() for each in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{each}").exists() for each in started)
    process.stdout.close()


@pytest.mark.slow
def test_ranks_train_the_same_and_their_memory_is_told(tmp_path):
    found = {}
    for processes in ("false", "true"):
        options = (f"data.processes={processes}", "data.num_threads=2", "train.log_every_steps=1", "train.max_steps=12")
        must_train("configs/dlrm_sample.yaml", f"run.dir={tmp_path}/{processes}", *options, nproc=2)
        result = json.loads((tmp_path / processes / "result.json").read_text())
        losses = losses_of(tmp_path / processes)
        found[processes] = losses, result["metrics"], result["data"]["ids"]
    assert found["true"] == found["false"] and len(found["true"][0]) == 12
    for rank in range(2):
        report = json.loads((tmp_path / f"true/memory/rank_{rank}.json").read_text())
        predicted = report["peak"]["beside_predicted"]["loader_processes"]
        assert 0.75 < report["loader"]["process_bytes"] / predicted < 1.33
        assert abs(report["peak"]["error"]) < 1  # of this process alone
