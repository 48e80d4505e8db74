"""Ranks that fail, end or get stuck under torchrun: the others end too, the cause is named, a restart goes on."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
from launch import ROOT, environment, fork_train, records_of, run_train, train_command

from recsys.training import run

CONFIG = str(ROOT / "configs" / "dlrm_sample.yaml")
STUCK = ("run.stuck_after_s=4",)
GONE_S = 30


def run_faulty(
    fault: str, rank: int, folder: Path, *arguments: str, nproc: int = 2, restarts: int = 0, step: str = "7"
) -> subprocess.CompletedProcess[str]:
    """Run with a fault in a step, in a folder that will hold runs/."""
    (folder / "data").symlink_to(ROOT / "data")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--max-restarts", str(restarts), "--nproc_per_node", str(nproc)]
    command = [*launcher, str(ROOT / "tests" / "helpers" / "faulty.py"), fault, str(rank), step, CONFIG, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=150)


def root_cause(stderr: str) -> str:
    """What torchrun's summary says under its last heading."""
    return stderr.split("Root Cause (first observed failure):")[1]


def processes_in(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_all_ranks_end_soon_after_one(fault: str, nproc: int, tmp_path: Path) -> None:
    start = time.time()
    done = run_faulty(fault, nproc - 1, tmp_path, nproc=nproc)
    ended = time.time()
    cause = root_cause(done.stderr)
    assert done.returncode == 1 and f"rank      : {nproc - 1} " in cause
    assert ("ValueError: the fault of the test" if fault == "raise" else "SIGKILL") in cause
    log = next(tmp_path.glob("runs/*/logs/rank_0.log"))
    assert max(start, log.stat().st_mtime) > ended - GONE_S and not processes_in(tmp_path)


def fail_in_last_lines(folder: Path) -> None:
    """Let rank 0 fail when all ranks have taken their last step, and write which temporary folders are left then."""
    tempfile.tempdir = str(folder)

    def closing_lines(*arguments: object) -> list[str]:
        (folder / "left").write_text(" ".join(path.name for path in folder.glob("tmp*")))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "result.json")

    run.closing_lines = closing_lines  # type: ignore[assignment]


def end_before_the_model_is_built(folder: Path) -> None:
    """Let a run get SIGTERM before its first step."""
    tempfile.tempdir = str(folder)
    run.build_model = lambda _: os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_ended_before_its_first_step_leaves_no_lock_and_no_temporary_files(tmp_path: Path) -> None:
    before = partial(end_before_the_model_is_built, tmp_path)
    done = fork_train(CONFIG, f"run.dir={tmp_path}/run", before=before)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (143, "ended by SIGTERM")
    assert not (tmp_path / "run" / ".lock").exists() and not [*tmp_path.glob("tmp*")]


def test_ranks_that_wait_for_the_results_end_in_a_sentence(tmp_path: Path) -> None:
    options = (f"run.dir={tmp_path}/run", "train.max_steps=2", "data.valid=null", "data.test=null")
    done = fork_train(CONFIG, *options, nproc=3, before=partial(fail_in_last_lines, tmp_path))
    said = sorted(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert done.returncode == 1 and len(said) == 3 and "Traceback" not in done.stderr, done.stderr
    assert "'result.json' cannot be written (No space left" in said[0]
    assert all("another rank ended" in line for line in said[1:])
    assert (tmp_path / "left").read_text() == ""  # a run that is killed while it trains could not remove them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("sleep", r"rank 1 on \S+ is stuck in backward of step 7 .*'run.stuck_after_s' allows 4"),
        ("load", r"rank 1 on \S+ is stuck in data loading of step \d"),
        (
            "stop",
            r"rank 1 on \S+ is stuck: it has not answered .* rank 0 waits for it in the exchange of ids of step 8",
        ),
    ],
)
def test_a_stuck_rank_is_named(fault: str, said: str, tmp_path: Path) -> None:
    done = run_faulty(fault, 1, tmp_path, *STUCK)
    assert re.search(said, root_cause(done.stderr)), done.stderr[-3000:]
    assert not processes_in(tmp_path)
    if fault != "stop":
        log = next(tmp_path.glob("runs/*/logs/rank_1.log")).read_text()
        assert "most recent call first" in log and "faulty.py" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "where"), [("start", ""), ("end", r", and was last heard of in .* of step 60")], ids=["start", "end"]
)
def test_a_rank_that_is_stopped_before_or_after_training_is_named(step: str, where: str, tmp_path: Path) -> None:
    done = run_faulty("stop", 1, tmp_path, *STUCK, step=step)
    said = rf"rank 1 on \S+ is stuck: it has not answered for [^)]*\){where}; rank 0 waits for it"
    assert re.search(said, root_cause(done.stderr)), done.stderr[-3000:]
    assert not processes_in(tmp_path)


@pytest.mark.slow
def test_a_run_that_stood_still_as_a_whole_goes_on(tmp_path: Path) -> None:
    """As after Ctrl-Z and `fg`, or in a job that was suspended, for longer than a run may make no progress."""
    command = train_command(CONFIG, f"run.dir={tmp_path}/run", *STUCK, "train.epochs=20", "data.test=null")
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step "))
    process.send_signal(signal.SIGSTOP)
    time.sleep(4 + 10 + 4)  # what STUCK allows, and what faulthandler waits beyond
    process.send_signal(signal.SIGCONT)
    assert "done at step 240" in process.stdout.read() and process.wait(60) == 0


@pytest.mark.slow
def test_a_rank_stuck_with_the_lock_of_python_ends_too(tmp_path: Path) -> None:
    done = run_faulty("hold", 1, tmp_path, *STUCK)
    assert re.search(r"rank 1 on \S+ is stuck: it has not answered", done.stderr)
    assert not processes_in(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "where"), [("kill", ()), ("raise", ("run.dir=runs/mine", "run.overwrite=true"))])
def test_torchrun_goes_on_from_the_newest_checkpoint(fault: str, where: tuple[str, ...], tmp_path: Path) -> None:
    every = ("train.checkpoint_every_steps=3", "train.epochs=2")
    done = run_faulty(fault, 1, tmp_path, *every, *where, restarts=1)
    assert done.returncode == 0, done.stderr[-3000:]
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert "resumed at step 6" in done.stdout
    result = json.loads((run_dir / "result.json").read_text())
    assert [epoch["seen"] for epoch in result["data"]["epochs"]] == [3000, 3000]
    steps = [record["step"] for record in records_of(run_dir, kind=None)]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_a_restart_leaves_the_runs_of_others_alone(tmp_path: Path) -> None:
    assert run_train(CONFIG, f"run.dir={tmp_path}/run", "train.max_steps=2").returncode == 0
    done = run_faulty("kill", 1, tmp_path, f"run.dir={tmp_path}/run", restarts=1)
    assert done.returncode == 1 and "holds an earlier run; add run.resume=true" in root_cause(done.stderr)
