"""What all tests share: a limit of time, their order, and how Python and libgomp spare the cores.

Compiled tests are kept where PYTHONDONTWRITEBYTECODE is set too: to rewrite their asserts anew took each worker of each
session a third of what it computes before its first test.

Python's collector of cycles is off while tests are imported and gathered: all of that stays, and looking through it
again and again took a third of the time. It is left out later too. Threads of libgomp sleep as soon as they have
nothing to do: each that spins has a core that another test wants, which took two thirds of the CPU time of tests on two
threads, and a quarter of that of small runs.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

gc.disable()
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, which reads it


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start runs first, which take longest: of several at a time, no long one is left at the end."""
    starters = {"fork_train", "run_recsys", "evaluate", "train", "train_losses"}
    items.sort(key=lambda item: starters.isdisjoint(vars(item.module)))  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _limit(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that hangs fail, where it hangs, and not the whole session without a word."""
    seconds = 1800 if {"slow", "slurm", "gpu"} & {mark.name for mark in item.iter_markers()} else 600
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"it takes more than {seconds} s"))
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """A `World` of this process alone, on the CPU."""
    from recsys.config import Device
    from recsys.runtime.world import open_world

    with open_world(Device.cpu, num_threads=1) as opened:
        yield opened


pytest_runtest_setup = pytest_runtest_call = pytest.hookimpl(wrapper=True)(_limit)
