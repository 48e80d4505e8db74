"""Processes that share a search: signals that end one, and repetition of trials left by dead processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsys.runtime.logs import logger
from recsys.runtime.run_lock import RunLock, is_locked
from recsys.runtime.signals import handled

PROCESS = "process"  # attribute of a trial: the name of the process that runs it
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ENDED_BY_SIGNAL = {*(128 + number for number in _SIGNALS), *(-number for number in _SIGNALS)}
_GRACE_S, _POLL_S, _NAMELESS_S = 5.0, 0.02, 60.0


class StoppedError(Exception):
    """A signal has asked this process to stop."""


@dataclass
class StopSignal:
    """Flag for all threads that a signal has asked for the end.

    Attributes:
        number: of the last signal, or 0. It is a plain number, since a handler must not wait for a lock.
    """

    number: int = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Record SIGINT and SIGTERM inside the block, instead of ending this process."""
        with handled(_SIGNALS, self._keep):
            yield

    def check(self) -> None:
        """Raise StoppedError if a signal came."""
        if self.number:
            raise StoppedError

    def check_after(self, process: "subprocess.Popen[bytes]") -> None:
        """Raise StoppedError if another process was ended by a signal that this one got too.

        Ctrl-C and schedulers signal all processes at once, so the signal to this one may still be on its way.
        """
        until = time.monotonic() + (1.0 if process.returncode in _ENDED_BY_SIGNAL else 0.0)
        while not self.number and time.monotonic() < until:
            time.sleep(_POLL_S)
        if process.returncode:
            self.check()

    def _keep(self, number: int, frame: Any) -> None:
        self.number = number


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process by SIGTERM, and by SIGKILL if it takes longer than some seconds."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    process.kill()
    process.wait()


def cut_torn(journal: Path) -> None:
    """Truncate a journal before its first torn line, left for example by a full disk, so that it can be read again."""
    from optuna.storages.journal import JournalFileSymlinkLock

    if not journal.exists():
        return
    lock = JournalFileSymlinkLock(str(journal))
    lock.acquire()
    try:
        with journal.open("rb+") as lines:
            size = 0
            for line in lines:
                if not _is_record(line):
                    logger.warning("'%s' is torn at byte %d; it is read up to there", journal, size)
                    break
                size += len(line)
            lines.truncate(size)
    finally:
        lock.release()


def _is_record(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


@contextmanager
def joined(study: Any, out: Path) -> Iterator[str]:
    """Requeue the unfinished trials of dead processes; yield the name of this one, locked while it lives."""
    processes = out / "processes"
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "RUNNING" and _is_left(trial, processes):
            put_back(study, trial)
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"  # process numbers are reused
    (processes / name).mkdir(parents=True)
    try:
        with RunLock() as lock:
            lock.take(processes / name)
            yield name
    finally:
        shutil.rmtree(processes / name, ignore_errors=True)


def _is_left(trial: Any, processes: Path) -> bool:
    """Return whether the process of a trial has died; its lock folder, which shows it, is then removed."""
    if (name := trial.user_attrs.get(PROCESS)) is None:  # it has only just begun, or died before it recorded its name
        return time.time() - trial.datetime_start.timestamp() > _NAMELESS_S
    if is_locked(processes / name):
        return False
    shutil.rmtree(processes / name, ignore_errors=True)
    return True


def put_back(study: Any, trial: Any) -> None:
    """Mark an interrupted trial as failed and queue its settings again, unless another process has done so."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    with suppress(ValueError, UpdateFinishedTrialError):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)


def counted(trials: Iterable[Any]) -> list[Any]:
    """Return the trials that count: those that failed without an error were interrupted, or surplus."""
    return [trial for trial in trials if trial.state.name != "FAIL" or "error" in trial.user_attrs]
