"""Lets a process kill itself at a chosen point of a checkpoint, or at any moment."""

import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recsys.checkpoint import Checkpoints, Marker, Tensors
from recsys.checkpoint import save as save_module
from recsys.checkpoint.files import HashedFile
from recsys.training.trainer import Trainer

POINTS = ("step", "staging", "shard", "before_marker", "after_marker", "after_renaming", "pruning")
ON_RANK_ZERO = POINTS[3:]  # the other ranks wait there


def kill_at(point: str, ranks: tuple[int, ...], number: int) -> None:
    """Kill these ranks when they reach a point for the `number`-th time."""
    if int(os.environ.get("RANK", "0")) not in ranks:
        return
    places: dict[str, tuple[type, str]] = {
        "step": (Trainer, "_advance"),
        "staging": (Tensors, "to_save"),
        "shard": (HashedFile, "write"),
        "before_marker": (Marker, "write"),
        "after_marker": (Marker, "write"),
        "after_renaming": (Checkpoints, "_point_to"),
    }
    if point == "pruning":
        _kill_in_pruning(number)
        return
    owner, name = places[point]
    whole, calls = getattr(owner, name), iter(range(1, 1 << 30))

    def part(self: Any, *arguments: Any) -> Any:
        last = next(calls) == number
        if last and point == "shard":
            whole(self, bytes(arguments[0])[: len(arguments[0]) // 2])
            self._file.flush()
        if last and point == "after_marker":
            whole(self, *arguments)
        if last:
            kill()
        return whole(self, *arguments)

    setattr(owner, name, part)


def _kill_in_pruning(number: int) -> None:
    whole, calls = shutil.rmtree, iter(range(1, 1 << 30))

    def part(folder: Path, **settings: Any) -> None:
        if Path(folder).exists() and next(calls) == number:
            next(Path(folder).glob("*.bin")).unlink()
            kill()
        whole(folder, **settings)

    save_module.shutil.rmtree = part  # type: ignore[assignment]


def kill_after(seconds: float) -> None:
    """Kill this process `seconds` after its training has begun."""

    def wait_and_kill() -> None:
        time.sleep(seconds)
        kill()

    whole = Trainer.fit

    def fit(self: Trainer) -> Any:
        threading.Thread(target=wait_and_kill, daemon=True).start()
        return whole(self)

    Trainer.fit = fit  # type: ignore[method-assign]


def terminate_twice(step: int) -> None:
    """Send this process SIGTERM in a step, and again while it saves."""
    sent: list[str] = []

    def signal_before(owner: type, name: str, condition: Callable[[Any], bool]) -> None:
        whole = getattr(owner, name)

        def signalled(self: Any, *arguments: Any) -> Any:
            if condition(self):
                sent.append(name)
                os.kill(os.getpid(), signal.SIGTERM)
            return whole(self, *arguments)

        setattr(owner, name, signalled)

    # A request during the handling of a step's output reaches all ranks in the next step.
    signal_before(Trainer, "_advance", lambda self: self.state.step == step - 2)
    signal_before(Tensors, "to_save", lambda self: sent == ["_advance"])


def kill(*_: Any, **__: Any) -> None:
    """Kill this process; accepts any arguments, because it may replace any method."""
    os.kill(os.getpid(), signal.SIGKILL)


def random_seconds(number: int) -> float:
    """Return a moment of a short training run, the same for the same number."""
    return random.Random(number).uniform(0.0, 1.5)


def fill_the_disk(rank: int, number: int, step: int) -> None:
    """Make the disk full for a rank when it writes its `number`-th shard, and end `step` only after that has failed."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    whole, shards = HashedFile.write, set()

    def write(self: HashedFile, data: Any) -> None:
        shards.add(self._file.name)
        if len(shards) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(self, data)

    HashedFile.write = write  # type: ignore[method-assign]
    whole_advance = Trainer._advance

    def advance(self: Trainer, *arguments: Any) -> None:
        whole_advance(self, *arguments)
        while self.state.step == step and not self._checkpoints.failed:
            time.sleep(0.01)

    Trainer._advance = advance  # type: ignore[method-assign]
