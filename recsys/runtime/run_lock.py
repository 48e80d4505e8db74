"""The lock of a folder that is written to: one run at a time, and a stale lock is taken over.

The lock of a run that has ended without releasing it is taken over. On the same machine, the kernel knows at once that
the run has ended, because the file is locked by `flock` too. From another machine, the time of the file must not have
changed for a while. A run that the same Slurm job or the same torchrun has restarted need not wait.
"""

import contextlib
import fcntl
import getpass
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from recsys.errors import UserError
from recsys.runtime.files import naming
from recsys.runtime.launch import launch_identity
from recsys.runtime.logs import logger

LOCK_FILE = ".lock"
_BEAT_S = 10.0
OUTPUT_TAKEN = "{}: another process writes to '{}'"  # beginning of the error for a folder that is locked
_STALE_S = 120.0  # NFS may show times from other machines a minute late


class RunLock:
    """The lock of a folder, kept alive by a thread; before `take`, and on ranks that do not take it, it does nothing.

    After `release` it may be taken again.

    Args:
        refusal: beginning of the error for a folder, `{}`, that is locked. writer: what messages call the holder.
    """

    def __init__(self, refusal: str = "config key 'run.dir': another run writes to '{}'", writer: str = "run") -> None:
        self._refusal, self._writer = refusal, writer
        self._path: Path | None = None
        self._content = b""
        self._lost, self._advice = "", ""
        self._descriptor = -1
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock of the folder if this run still holds it."""
        if self._path is None or self._thread is None:
            return
        self._ended.set()
        self._thread.join(timeout=_BEAT_S)
        if not self.lost():
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._path, self._content, self._lost = None, b"", ""

    def take(self, folder: Path, earlier: str | None = None) -> None:
        """Lock a folder, and keep the lock alive.

        Args:
            earlier: the `id` of the lock of an earlier start of this run, which has ended.

        Raises:
            UserError: a running process holds it.
            OSError: it cannot be written.
        """
        path = folder / LOCK_FILE
        while True:
            try:
                self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
                break
            except FileExistsError:
                _remove_stale(path, earlier, self._refusal)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._content = json.dumps(_identity(), indent=1).encode()
        try:
            with naming(path):
                os.write(self._descriptor, self._content)
        except OSError:
            os.close(self._descriptor)
            path.unlink()
            raise
        self._path, self._ended = path, threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(self._ended,), name="lock", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """Identity of this lock among all others; empty before `take` and after `release`."""
        return _parsed(self._content).get("id", "")

    def check(self, now: bool = False) -> None:
        """Raise if the folder no longer belongs to this run; without `now`, according to the last look at the file.

        Raises:
            UserError: the folder has been removed, or taken over by another run.
        """
        if now:
            self.lost()
        if self._lost:
            raise UserError(self._lost + self._advice)

    def lost(self) -> str:
        """Check the lock; return what happened to it if this run no longer holds it, else an empty text."""
        if self._path is not None:
            self._look()
        return self._lost

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(_BEAT_S):
            self._look()
            if self._path is not None and not self._lost:
                with contextlib.suppress(OSError):  # for example if the file server is away for a while
                    os.utime(self._path)

    def _look(self) -> None:
        assert self._path is not None
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            self._lost = f"'{self._path.parent}' or its lock was removed while this {self._writer} wrote to it"
            self._advice = "; start it again"
        except OSError:
            pass
        else:
            if content != self._content:
                who = _described(_parsed(content))
                self._lost = f"'{self._path.parent}' was taken over by another {self._writer} ({who})"
                self._advice = ", so this one ends"


def _identity() -> dict[str, Any]:
    """Return the content of a lock: what identifies this run, and what a person wants to know about it."""
    boot, user = "", str(os.getuid())
    with contextlib.suppress(OSError, KeyError):  # only Linux has a boot id, and a container may not know the user
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        user = getpass.getuser()
    about = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return {**about, "boot": boot, "id": uuid.uuid4().hex, **launch_identity()}


def _remove_stale(path: Path, earlier: str | None, refusal: str) -> None:
    """Remove a lock whose run has ended.

    Args:
        refusal: see `RunLock`.

    Raises:
        UserError: the run is alive.
    """
    try:
        with _opened(path) as file:
            holder = _parsed(file.read())
            if not _was_restarted(holder, earlier):
                _await_end(path, file, holder, refusal)
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # else two who find it stale may remove it, and then the next one
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else another run was faster, and may hold it
                path.unlink()
    except FileNotFoundError:  # the other run has released the lock
        return


def _opened(path: Path) -> IO[bytes]:
    """Open a lock file, to write if that is allowed: NFS locks no other file against all other processes."""
    try:
        return path.open("r+b")
    except PermissionError:
        return path.open("rb")


def _was_restarted(holder: dict[str, Any], earlier: str | None) -> bool:
    """Return whether the run of a lock is an earlier start of this one, which its launcher has ended."""
    mine = _identity()
    same_job = mine["slurm_job"] is not None and mine["slurm_job"] == holder.get("slurm_job")
    restarted_job = same_job and holder["slurm_restarts"] < mine["slurm_restarts"]
    return restarted_job or (bool(earlier) and holder.get("id") == earlier)


def _await_end(path: Path, file: IO[bytes], holder: dict[str, Any], refusal: str) -> None:
    """Wait until the run of a lock is known to have ended, which may be at once. Raises UserError if it is alive."""
    mine, first, waits = _identity(), path.stat().st_mtime, False
    own = any(mine[launch] is not None and mine[launch] == holder.get(launch) for launch in ("slurm_job", "torchrun"))
    while True:
        held, age = _is_held(file), _age_s(path)
        if held or path.stat().st_mtime != first:
            raise UserError(
                f"{refusal.format(path.parent)} ({_described(holder)}, last alive "
                f"{max(0.0, age):.0f} s ago); wait for its end, stop it, or name another folder"
            )
        if own or _has_ended_here(held, holder) or age >= _STALE_S:
            return
        if not waits:
            text = "'%s' may be in use (%s, last alive %.0f s ago); waiting for a sign of that run, for up to %.0f s"
            logger.warning(text, path.parent, _described(holder), age, _STALE_S - age)
        waits = True
        time.sleep(_BEAT_S / 10)


def output_lock(argument: str = "OUT") -> RunLock:
    """Return the lock of a folder that a command writes to, which the user names by `argument`; it is not taken yet."""
    return RunLock(OUTPUT_TAKEN.format(argument, "{}"), "process")


def beside_lock(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder, except its lock and the files that taking the lock needs."""
    return (path for path in folder.iterdir() if not path.name.startswith(LOCK_FILE))


def lock_id(folder: Path) -> str:
    """Return the `RunLock.id` that the lock of a folder has on this machine; empty where it has none."""
    try:
        return _parsed((folder / LOCK_FILE).read_bytes()).get("id", "")
    except OSError:
        return ""


def is_locked(folder: Path) -> bool:
    """Return whether a running process holds the lock of a folder, as far as this machine can know."""
    path = folder / LOCK_FILE
    try:
        with path.open("rb") as file:
            held = _is_held(file)
            if held or _has_ended_here(held, _parsed(file.read())):
                return bool(held)
        age = _age_s(path) if os.access(folder, os.W_OK) else time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    return age < _STALE_S


def _has_ended_here(held: bool | None, holder: dict[str, Any]) -> bool:
    """Return whether the run of a lock is known to have ended, because it was on this machine.

    Args:
        held: from `_is_held`.
    """
    boot = _identity()["boot"]
    return held is False and bool(boot) and boot == holder.get("boot")


def _is_held(file: IO[bytes]) -> bool | None:
    """Return whether a process that this machine knows of holds the lock; None: the file system has no `flock`."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)  # else a run that has just made the file waits here, and seems to be dead
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _age_s(path: Path) -> float:
    """Return how many seconds ago the lock was alive, by the clock of its file system, not that of this machine."""
    probe = path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        os.utime(probe)
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(content)
    except ValueError:  # the run has only just begun, and not written it yet
        return {}
    return holder if isinstance(holder, dict) and holder.keys() == _identity().keys() else {}


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "it has only just begun"
    return f"process {holder['pid']} of {holder['user']} on {holder['host']}, since {holder['since']}"
