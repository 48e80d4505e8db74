"""Starts train.py like a user, as one process or with torchrun; or forks it from a process with all imports done."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from recsys.runtime.environment import MALLOC_SETTINGS

ROOT = Path(__file__).resolve().parents[2]
_STACKS = signal.SIGUSR1  # lets a forked process write the stacks of its threads
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def train_command(*arguments: str, nproc: int = 1) -> list[str]:
    """Return the command line of train.py with these arguments."""
    if nproc == 1:
        return [sys.executable, "train.py", *arguments]
    # The address is given because torchrun otherwise asks the network for this host's name.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *launcher, "--nproc_per_node", str(nproc), "train.py", *arguments]


def environment() -> dict[str, str]:
    """Return the environment without variables that a launcher of the tests may have set."""
    kept = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_train(
    *arguments: str, nproc: int = 1, timeout: float = 300, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end in new processes; return its output as text, standard output and error separately."""
    command = train_command(*arguments, nproc=nproc)
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)


def fork_train(
    *arguments: str,
    nproc: int = 1,
    timeout: float = 300,
    before: Callable[[], None] | None = None,
    cwd: Path = ROOT,
    program: str = "train.py",
) -> subprocess.CompletedProcess[str]:
    """Run train.py like `run_train`, but in processes forked from one that has imported everything.

    This saves seconds for each run. Every rank still is a process of its own, but all have the same seed of Python's
    hashes, so some tests on two ranks need torchrun.

    Args:
        before: called in each process before the program; must be a top-level function of a module.
        program: a file to run instead of train.py, or `recsys` to run that command.
    """
    port = _free_port()
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder, forking() as context:
        ranks = []
        for rank in range(nproc):
            variables = {} if nproc == 1 else _variables(rank, nproc, port)
            process = context.Process(
                target=_main, args=(list(arguments), variables, f"{folder}/{rank}", before, cwd, program)
            )
            process.start()
            ranks.append(process)
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        _end_late(ranks)
        # A rank that is late may not have written anything yet.
        paths = [[Path(f"{folder}/{rank}.{kind}") for rank in range(nproc)] for kind in ("out", "err")]
        texts = ["".join(path.read_text() for path in kind if path.exists()) for kind in paths]
    told = f"statuses after {timeout} s, None of a rank that still ran: {codes}\n{texts[1][-6000:]}"
    assert None not in codes, told
    return subprocess.CompletedProcess(arguments, next(filter(None, codes), 0), *texts)


def must_train(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a training that must succeed, like `fork_train`."""
    done = fork_train(*arguments, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def run_recsys(
    *arguments: object,
    nproc: int = 1,
    status: int = 0,
    before: Callable[[], None] | None = None,
    timeout: float = 300,
) -> str:
    """Run a command of recsys like `fork_train`; it must end with `status`. Return what it prints.

    If it must fail, return its error instead, which must not be a traceback.
    """
    done = fork_train(*map(str, arguments), nproc=nproc, timeout=timeout, before=before, program="recsys")
    told = f"status {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == status and (not status or "Traceback" not in done.stderr), told
    return done.stderr.strip() if status else done.stdout


def records_of(run_dir: Path, kind: str | None = "train") -> list[dict[str, Any]]:
    """Return the lines of a kind, or of all kinds if None, in a run's metrics.jsonl."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if kind in (None, record["kind"])]


def losses_of(run_dir: Path) -> list[float]:
    """Return the training losses that a run has logged: one for each step if train.log_every_steps=1."""
    return [record["loss"] for record in records_of(run_dir)]


def train_losses(config: Path | str, run_dir: Path, *overrides: str, nproc: int = 1) -> list[float]:
    """Train, which must succeed, and return its `losses_of`."""
    must_train(str(config), f"run.dir={run_dir}", *overrides, nproc=nproc)
    return losses_of(run_dir)


def evaluate(run: Path, *overrides: str, nproc: int = 1) -> dict[str, dict[str, float]]:
    """Run `--evaluate`, and return the metrics that it prints and writes."""
    *_, told, printed = must_train(str(run), "--evaluate", *overrides, nproc=nproc).stdout.splitlines()
    metrics = json.loads(printed)["metrics"]
    assert json.loads(Path(told.removeprefix("done: ")).read_text())["metrics"] == metrics
    return metrics


@contextlib.contextmanager
def forking() -> Iterator[ForkServerContext]:
    """Yield a context that starts processes by forking one that has imported everything.

    That process starts at the first use, with its list of imports, and inherits the environment of this process but not
    its sys.path. If something else starts it first, all later tests import everything again for each process.
    """
    before = dict(os.environ)
    # The settings with which train.py restarts itself, which a forked process cannot do.
    os.environ.update(environment(), **MALLOC_SETTINGS)
    paths = [str(ROOT / "tests" / "helpers"), str(ROOT), *filter(None, [before.get("PYTHONPATH")])]  # libraries too
    os.environ.update(PYTHONPATH=os.pathsep.join(paths))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked"])
    try:
        yield context
    finally:
        os.environ.clear()
        os.environ.update(before)


def _end_late(ranks: list[Any]) -> None:
    """Kill ranks that are still running, after they have written their stacks to standard error."""
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        os.kill(process.pid, _STACKS)
    for process in late:
        process.join(1)
        process.kill()
        process.join()


def _free_port() -> int:
    """Return a free port outside the range that the system hands out, since rank 0 opens it only a second later."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", random.randrange(10_000, 32_000)))
            return int(free.getsockname()[1])


def _variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    values = (rank, nproc, rank, nproc, "127.0.0.1", port)
    return dict(zip(_RANK_VARIABLES, map(str, values), strict=True))


def _main(
    arguments: list[str],
    variables: dict[str, str],
    outputs: str,
    before: Callable[[], None] | None,
    cwd: Path,
    program: str,
) -> None:
    """Run a program in a forked process, as if started from the shell."""
    for stream, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{outputs}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
    faulthandler.enable()  # else a segmentation fault ends a process silently
    faulthandler.register(_STACKS)
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [program, *arguments]
    sys.path[0] = str(ROOT)
    if before is not None:
        before()
    if program == "recsys":
        runpy.run_module(program, run_name="__main__", alter_sys=False)
    else:
        runpy.run_path(f"{ROOT}/{program}", run_name="__main__")
