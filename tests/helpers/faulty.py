"""Runs train.py with a fault; torchrun starts it as `faulty.py FAULT RANK STEP ARGUMENTS…`.

FAULT happens on one rank in one step, only the first time that torchrun starts the ranks: `raise` an exception, `kill`
or `stop` the process, `sleep` in the backward pass, `hold` the interpreter's lock there, or `load`: never get a batch.
STEP may be `start`, before the model is built, or `end`, after training.
"""

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from recsys.runtime.environment import importing  # noqa: E402

with importing():
    from recsys.step.step import DenseHalf
    from recsys.training import run, trainer


def raise_error() -> None:
    raise ValueError("the fault of the test")


FAULTS = {
    "raise": raise_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "hold": lambda: ctypes.PyDLL(None).sleep(1000),
}


def install_aside(fault: str, place: str) -> None:
    """Make this process fail before or after its steps."""
    name = {"start": "build_model", "end": "run_result"}[place]
    whole = getattr(run, name)

    def faulty(*arguments: object) -> object:
        time.sleep(3)  # so that a heartbeat has been sent from here
        FAULTS[fault]()
        return whole(*arguments)

    setattr(run, name, faulty)


def install(fault: str, step: int) -> None:
    """Make this process fail in step `step`; the first step is 1."""
    count = 0
    name, owner = ("__next__", trainer.TimedIterator) if fault == "load" else ("backward", DenseHalf)
    whole = getattr(owner, name)

    def faulty(self: object) -> object:
        nonlocal count
        count += 1
        if count == step and fault != "load":
            FAULTS[fault]()
        if fault == "load" and count == 1:
            self._batches = hanging(self._batches, step)  # type: ignore[attr-defined]
        return whole(self)

    setattr(owner, name, faulty)


def hanging(batches: object, step: int) -> object:
    for number, batch in enumerate(batches, 1):  # type: ignore[arg-type, var-annotated]
        if number == step:
            time.sleep(1000)
        yield batch


if __name__ == "__main__":
    fault, rank, step, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        install(fault, int(step)) if step.isdigit() else install_aside(fault, step)
    sys.argv = ["train.py", *arguments]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
