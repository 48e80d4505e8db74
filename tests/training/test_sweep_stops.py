"""`recsys sweep` that is stopped or killed: it ends with its children, and goes on with the trials it has not ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, environment

from recsys.config import load_config
from recsys.training import sweep as sweep_module
from recsys.training.sweep import Sweep
from recsys.training.sweep_processes import PROCESS, StoppedError, StopSignal, counted, end, joined
from recsys.training.sweep_space import open_space

optuna = pytest.importorskip("optuna")
SAMPLE = f"{ROOT}/configs/dlrm_sample.yaml"
SPACE = "optimizer.dense.learning_rate=1e-4..1e-2:log"


def opened(out: Path, trials: int = 3) -> Sweep:
    space, metric = open_space(SAMPLE, (), [SPACE], out, None)
    return Sweep(SAMPLE, (), space, out, trials, seeds=1, jobs=1, metric=metric, by_bytes=False)


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials take no time; the metric is the number of the trial."""
    monkeypatch.setattr(Sweep, "_value", lambda _, trial, *rest: float(trial.number))
    monkeypatch.setattr(sweep_module, "table_bytes", lambda *_: 1)
    monkeypatch.setattr(sweep_module, "load_config", lambda path, *rest: load_config(SAMPLE, *rest))


def numbers_told(out: Path) -> list[int]:
    return [trial["number"] for trial in json.loads((out / "sweep.json").read_text())["trials"]]


@pytest.mark.usefixtures("instant")
def test_trials_of_dead_processes_are_tried_again_and_those_of_live_ones_left(tmp_path: Path) -> None:
    searched = opened(tmp_path)
    study = searched._study()
    with joined(study, tmp_path) as alive:
        for process in (alive, "far-7-dead"):
            study.ask(searched.space.distributions()).set_user_attr(PROCESS, process)
        assert searched.run() == 0
        states = [trial.state.name for trial in study.get_trials()]
        assert states == ["RUNNING", "FAIL", "COMPLETE", "COMPLETE", "FAIL"]  # the last was one too many
        assert study.trials[1].params == study.trials[2].params != study.trials[3].params
        assert numbers_told(tmp_path) == [0, 2, 3]
    assert searched.run() == 0
    assert numbers_told(tmp_path) == [2, 3, 5] and study.trials[5].params == study.trials[0].params
    assert len(counted(study.trials)) == 3 and not list((tmp_path / "processes").iterdir())


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("cut", [1, 30, 400, 1500])
def test_a_journal_that_a_full_disk_tore_is_gone_on_with(cut: int, tmp_path: Path) -> None:
    assert opened(tmp_path, trials=2).run() == 0
    journal = tmp_path / "journal.log"
    content = journal.read_bytes()
    whole = content[: content[:-cut].rindex(b"\n") + 1]
    for behind in (b"", b'{"op_code":8}\n' * 2):  # what another process may have written in between
        journal.write_bytes(content[:-cut] + behind)
        assert opened(tmp_path, trials=4).run() == 0
        assert journal.read_bytes().startswith(whole) and len(counted(trials(tmp_path))) >= 4


@pytest.mark.usefixtures("instant")
def test_a_process_that_died_before_it_said_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = opened(tmp_path, trials=1)
    searched._study().ask(searched.space.distributions())
    assert searched.run() == 0 and numbers_told(tmp_path) == [0]  # it may say it yet
    monkeypatch.setattr("recsys.training.sweep_processes._NAMELESS_S", 0.0)
    assert searched.run() == 0 and numbers_told(tmp_path) == [2]


@pytest.mark.usefixtures("instant")
def test_a_process_that_finds_finds_all_trials_under_way_has_not_failed(tmp_path: Path) -> None:
    searched = opened(tmp_path, trials=1)
    study = searched._study()
    with joined(study, tmp_path) as alive:
        study.ask(searched.space.distributions()).set_user_attr(PROCESS, alive)
        assert searched.run() == 0
    assert searched.run() == 0 and numbers_told(tmp_path) == [2]


def test_a_child_that_does_not_heed_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsys.training.sweep_processes._GRACE_S", 0.2)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('there', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        end(child)
    assert child.returncode == -signal.SIGKILL


def test_a_child_that_was_signalled_alone_is_no_stop() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        child.terminate()
    stop = StopSignal()
    stop.check_after(child)
    with stop.caught():
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StoppedError):
        stop.check_after(child)
    assert stop.number == signal.SIGTERM


def started(config: Path, out: Path) -> "subprocess.Popen[str]":
    """Start a sweep of one trial in a group of processes of its own."""
    words = [str(config), "--space", SPACE, "--out", str(out), "--trials", "1"]
    command, pipes = [sys.executable, "-m", "recsys", "sweep", *words], {"stdout": -1, "stderr": -1}
    return subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, text=True, **pipes)


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def trials(out: Path) -> list[Any]:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{out}/journal.log"))
    return optuna.load_study(study_name="sweep", storage=storage).trials


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all", "status"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGKILL, True, -9), (signal.SIGKILL, False, -9)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_the_same_command_goes_on(number: signal.Signals, to_all: bool, status: int, tmp_path: Path) -> None:
    config, out, settings = tmp_path / "c.yaml", tmp_path / "sweep", f"base: {SAMPLE}\ntrain: "
    config.write_text(f"{settings}{{epochs: 1000, eval_every_steps: 2}}\n")
    process, until = started(config, out), time.monotonic() + 120
    while not (out / "trials/0000/seed-1/metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.1)
    (os.killpg if to_all else os.kill)(process.pid, number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    while not is_gone(process.pid):  # a child of one that was killed alone
        assert status < 0 and time.monotonic() < until
        time.sleep(0.1)
    if status > 0:
        assert said.count(f"stopped by {number.name}; the same command continues it") == 1 and not errors
        assert not (out / "sweep.json").exists() and not list(out.glob("trials/*/*/checkpoints"))
        assert [trial.state.name for trial in trials(out)] == ["FAIL", "WAITING"]
    config.write_text(f"{settings}{{max_steps: 4}}\n")
    process = started(config, out)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    first, again = trials(out)[:2]
    assert (first.state.name, again.state.name) == ("FAIL", "COMPLETE") and first.params == again.params
    assert numbers_told(out) == [1]
