"""A run directory belongs to one run at a time; the lock of a run that has ended stops nobody."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, environment, forking, train_command

from recsys.config import load_config
from recsys.errors import UserError
from recsys.runtime import run_lock
from recsys.runtime.run_lock import LOCK_FILE, RunLock
from recsys.training.run_dir import prepare_run_dir

OTHER = {"host": "far", "pid": 7, "user": "me", "since": "2026-11-01 00:00:00", "boot": "another", "id": "1"}
NO_LAUNCH = {"slurm_job": None, "slurm_restarts": 0, "torchrun": None}


def hold(folder: Path, pipe: Connection) -> None:
    with RunLock() as lock:
        lock.take(folder)
        pipe.send(None)
        pipe.recv()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BaseProcess]:
    """Another process that holds the lock, until it is killed."""
    with forking() as context:
        mine, theirs = context.Pipe()
        process = context.Process(target=hold, args=(tmp_path, theirs))
        process.start()
    mine.recv()
    yield process
    process.kill()
    process.join()


def take(folder: Path, earlier: str | None = None) -> None:
    with RunLock() as lock:
        lock.take(folder, earlier)
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
        lock.check(now=True)
    assert not list(folder.glob(".lock*"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.2)
    monkeypatch.setattr(run_lock, "_STALE_S", 1.5)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def leave(folder: Path, **values: Any) -> Path:
    """Write the lock of a run on another machine."""
    path = folder / LOCK_FILE
    path.write_text(json.dumps({**NO_LAUNCH, **OTHER, **values}))
    return path


def test_the_lock_of_a_live_process_is_respected_and_of_a_dead_one_taken(holder: BaseProcess, tmp_path: Path) -> None:
    said = (
        rf"'run.dir': another run writes to '.*' \(process {holder.pid} of .* on .*, since .*, last alive \d+ s ago\); "
    )
    for _ in range(2):
        with pytest.raises(UserError, match=said):
            take(tmp_path)
    holder.kill()
    holder.join()
    take(tmp_path)


def test_a_lock_is_released_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), RunLock() as lock:
        lock.take(tmp_path)
        raise ValueError("mine")
    take(tmp_path)


def test_whoever_waits_keeps_nobody_from_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making the file and locking it a run shows no life; one that waits for some takes no lock meanwhile."""
    monkeypatch.setattr(run_lock, "_STALE_S", 60.0)
    descriptor = os.open(tmp_path / LOCK_FILE, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    refused = threading.Event()

    def attempt() -> None:
        with pytest.raises(UserError, match="it has only just begun"):
            take(tmp_path)
        refused.set()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    while not refused.wait(0.3):  # at its first look nobody holds it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    thread.join()
    os.close(descriptor)


def test_one_of_many_gets_it(tmp_path: Path) -> None:
    leave(tmp_path)
    held, taken, refused = threading.Event(), [], []

    def attempt() -> None:
        with RunLock() as lock:
            try:
                lock.take(tmp_path)
            except UserError as error:
                refused.append(str(error))
                return
            taken.append(lock)
            held.wait()

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while len(taken) + len(refused) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(taken) == 1, refused
    held.set()
    for thread in threads:
        thread.join()
    assert not list(tmp_path.glob(".lock*"))


def test_who_found_it_stale_removes_no_lock_but_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its last look and the removal, another must not take the folder."""
    path = leave(tmp_path)
    os.utime(path, (0, 0))
    taken, refused = threading.Event(), threading.Event()
    other, samestat = RunLock(), os.path.samestat

    def attempt() -> None:
        try:
            other.take(tmp_path)
            taken.set()
        except UserError:
            refused.set()

    def slow(first: os.stat_result, second: os.stat_result) -> bool:
        monkeypatch.setattr(run_lock.os.path, "samestat", samestat)
        threading.Thread(target=attempt, daemon=True).start()
        taken.wait(0.5)
        return samestat(first, second)

    monkeypatch.setattr(run_lock.os.path, "samestat", slow)
    with RunLock() as lock:
        lock.take(tmp_path)
        assert refused.wait(10) and not taken.is_set()
        lock.check(now=True)


def test_the_lock_of_a_faster_run_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = leave(tmp_path)

    def judge(*_: object) -> None:
        path.unlink()
        path.write_text("of a faster run")

    monkeypatch.setattr(run_lock, "_await_end", judge)
    run_lock._remove_stale(path, None, "")
    assert path.read_text() == "of a faster run"


def test_on_another_machine_the_time_of_the_lock_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, ended = leave(tmp_path), threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(UserError, match="process 7 of me on far, since 2026-11-01 00:00:00, last alive 0 s ago"):
        take(tmp_path)
    ended.set()
    thread.join()
    take(tmp_path)  # waits until it is stale
    assert re.search(r"may be in use \(process 7 of me on far, .* waiting for a sign", caplog.text)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"pid": "x', bytes(range(256))])
def test_a_lock_that_cannot_be_read_is_of_somebody(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    path.write_bytes(content)
    timer = threading.Timer(0.1, lambda: os.utime(path))
    timer.start()
    with pytest.raises(UserError, match=r"another run writes to .*\(it has only just begun, last"):
        take(tmp_path)
    timer.join()
    take(tmp_path)


@pytest.mark.parametrize(
    "theirs, variables, earlier",
    [
        ({"slurm_job": "9"}, {"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"}, None),
        ({"slurm_job": "9"}, {"SLURM_JOB_ID": "9"}, None),
        ({"torchrun": "mine"}, {"TORCHELASTIC_RUN_ID": "mine"}, None),
        ({}, {}, "1"),
    ],
)
def test_the_same_launch_takes_its_own_at_once(
    theirs: dict[str, Any],
    variables: dict[str, str],
    earlier: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_lock, "_STALE_S", 1e9)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    leave(tmp_path, **theirs)
    take(tmp_path, earlier)


def test_a_restart_leaves_the_lock_of_another_run(holder: BaseProcess, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another run writes to"):
        take(tmp_path, earlier="1")


def test_a_second_run_of_the_same_job_is_refused_and_the_next_start_is_not(
    holder: BaseProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process on a node that is cut off may live on; it ends when it sees that the lock is no longer its own."""
    path = tmp_path / LOCK_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "slurm_job": "9"}))
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    with pytest.raises(UserError, match="another run writes to"):
        take(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    take(tmp_path)


def test_a_run_that_has_lost_its_directory_is_told(tmp_path: Path) -> None:
    for name in ("removed", "taken"):
        folder = tmp_path / name
        folder.mkdir()
        with RunLock() as lock:
            lock.take(folder)
            if name == "removed":
                shutil.rmtree(folder)
            else:
                leave(folder)
            deadline = time.monotonic() + 30
            with pytest.raises(UserError, match=f"'{folder}' .*was removed|taken over by another run .process 7 of me"):
                while time.monotonic() < deadline:
                    lock.check()
    assert (tmp_path / "taken" / LOCK_FILE).exists() and not (tmp_path / "removed").exists()


def test_a_lock_that_was_lost_can_be_taken_again_and_those_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with RunLock() as lock:
        lock.take(folder)
        first = lock.id
        assert first and not lock.lost()
        shutil.rmtree(folder)
        assert lock.lost() == f"'{folder}' or its lock was removed while this run wrote to it"
        lock.release()
        assert not lock.id and not lock.lost()
        folder.mkdir()
        lock.take(folder)
        assert lock.id not in ("", first) and not lock.lost()
        theirs = leave(folder)
        assert "was taken over by another run (process 7 of me" in lock.lost()
        lock.release()
        assert theirs.exists()


@pytest.mark.slow
def test_a_second_run_leaves_the_first_alone(tmp_path: Path) -> None:
    run_dir, stop = tmp_path / "run", tmp_path / "stop"
    arguments = ("configs/dlrm_sample.yaml", f"run.dir={run_dir}", f"run.stop_file={stop}", "data.valid=null")
    command = train_command(*arguments, "train.epochs=100000", "train.checkpoint_every_steps=5", "data.test=null")
    first = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not list(run_dir.glob("checkpoints/step-*")):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        for option in ("run.resume=true", "run.overwrite=true", "run.resume=false"):
            with pytest.raises(UserError, match=f"process {first.pid} of"), RunLock() as lock:
                prepare_run_dir(load_config(ROOT / arguments[0], [*arguments[1:], option]), lock)
    finally:
        stop.touch()
        output, errors = first.communicate(timeout=120)
    assert first.returncode == 143, (output, errors)
    assert json.loads((run_dir / "result.json").read_text())["status"] == "stopped"
    assert not list(run_dir.glob(".lock*"))
