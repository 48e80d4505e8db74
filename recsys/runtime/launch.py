"""The environment variables by which a launcher, such as torchrun or Slurm, describes this process."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from recsys.errors import UserError

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PARENT = "RECSYS_PARENT"  # number of the parent process, with which a child ends
_CALLED = "RECSYS_CALLED"  # set if code has called `recsys.train`: that call, not a command line, resumes the run
_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torch needs these to find the other ranks


def is_launched() -> bool:
    """Return whether a launcher says which rank this process is."""
    return "RANK" in os.environ


def rank_of_several() -> str:
    """Return this process's place in its launch, such as "rank 0 of 2"; empty for a single process."""
    ranks = os.environ.get("WORLD_SIZE") or "1"
    return f"rank {os.environ['RANK']} of {ranks}" if is_launched() and ranks != "1" else ""


def local_ranks() -> tuple[int, int]:
    """Return which rank of its machine this process is, and how many the machine has; (0, 1) without a launcher.

    Raises:
        UserError: a variable that torch needs to find the other ranks is missing, not a number, or out of range.
    """
    missing = [name for name in _NEEDED if not os.environ.get(name)] if is_launched() else []
    if missing:
        raise UserError(
            f"the environment variable RANK says that a launcher started this process, but these are not set: "
            f"{', '.join(missing)}; start ranks with torchrun, or unset RANK for a run on one process"
        )
    port = os.environ["MASTER_PORT"] if is_launched() else "0"
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise UserError(
            f"the environment variable MASTER_PORT must be a whole number up to {(1 << 16) - 1}, found {port!r}; "
            f"torchrun sets it"
        )
    _check_below("RANK", "WORLD_SIZE")
    return _check_below("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _check_below(rank_name: str, size_name: str) -> tuple[int, int]:
    """Return two variables, by default 0 and 1; the first must be less than the second, if that is set.

    Users' own scripts often set only LOCAL_RANK, to choose a GPU.
    """
    rank, size = os.environ.get(rank_name) or "0", os.environ.get(size_name) or ""
    if not (rank.isdecimal() and (not size or (size.isdecimal() and int(rank) < int(size)))):
        raise UserError(
            f"the environment variables {rank_name} and {size_name} must be whole numbers, the first at least 0 and "
            f"less than the second, found {rank!r} and {size!r}; torchrun sets both"
        )
    return int(rank), int(size or 1)


def launch_identity() -> dict[str, Any]:
    """Return identifiers of the launch that stay the same after a restart, and the number of Slurm's restarts."""
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID")
    restarts = os.environ.get("SLURM_RESTART_COUNT") or "0"
    return {
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_restarts": int(restarts) if restarts.isdecimal() else 0,
        "torchrun": None if torchrun == "none" else torchrun,  # it is "none" if no --rdzv-id was given
    }


def environment_of_one_process() -> dict[str, str]:
    """Return this process's environment without the launcher's variables, and with recsys on the import path."""
    kept = {k: v for k, v in os.environ.items() if k not in _OF_RANKS and not k.startswith("TORCHELASTIC")}
    path = [str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def environment_of_child() -> dict[str, str]:
    """Return the environment of one process that must not outlive this one; it calls `end_with_parent` first."""
    return {**environment_of_one_process(), _PARENT: str(os.getpid())}


def environment_of_called() -> dict[str, str]:
    """Return the environment of a child that trains because code has called `recsys.train`."""
    return {**environment_of_child(), _CALLED: "1"}


def is_called() -> bool:
    """Return whether this process was started with `environment_of_called`."""
    return _CALLED in os.environ


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, even by SIGKILL.

    It has an effect on ranks of torchrun, which nothing else would end once torchrun is gone, and on processes started
    with `environment_of_child`.
    """
    parent = os.environ.pop(_PARENT, "")
    if parent or "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError, AttributeError):  # a system without it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent and parent != str(os.getppid()):  # the parent has already ended
        os.kill(os.getpid(), signal.SIGTERM)
