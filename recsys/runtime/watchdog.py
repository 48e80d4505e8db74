"""Watchdog: names the rank that is stuck, and ends the run instead of waiting for ever.

About once a second, every rank reports through the store what it is doing. It reads the reports of the others only when
it makes no progress itself. Ranks wait for each other in collectives, so all of them look stuck when one is; the one
that the others wait for has begun the fewest collectives, or does not answer at all. Where progress is not reported,
before and after training and in other commands, the watchdog only looks for ranks that do not answer.
"""

import faulthandler
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO

from recsys.config.schema import RunConfig
from recsys.errors import LostPeerError, StuckError, end_run
from recsys.runtime.signals import ending_orderly
from recsys.runtime.world import DEFAULT_TIMEOUT_S, FAILURE_KEY, World, announce, open_world

_KEY = "watchdog"
_FAILURE_GRACE_S = 10.0  # within this time, a rank notices by itself that another has failed
_LEAD_S = 120.0  # between naming a stuck rank and the timeout of collectives
_LAST_RESORT_S = 20.0  # time for an orderly end, before the process is ended without one
_LONGEST_PAUSE_S = 30.0  # between two looks for ranks that do not answer


@contextmanager
def open_run_world(run: RunConfig, watches: bool = True) -> Iterator[tuple[World, "Watchdog"]]:
    """Open the world as section `run` of a config says, see `open_world`, and watch whether other ranks answer.

    Collectives wait longer than a rank may go without progress, so that a stuck rank is named before they time out. On
    a single process, SIGTERM raises a TerminatedError inside the block, so that locks and temporary files are removed.

    Args:
        watches: false with a debugger, which stops this process.
    """
    timeout_s = max(DEFAULT_TIMEOUT_S, run.stuck_after_s + _LEAD_S)
    with (
        open_world(run.device, run.num_threads, timeout_s) as world,
        # Of several ranks, one that waits for another in a collective would not notice the signal: they end at once.
        ending_orderly() if world.world_size == 1 else nullcontext(),
        Watchdog(world, run.stuck_after_s if watches else math.inf) as watchdog,
    ):
        yield world, watchdog


@dataclass
class Beat:
    """Heartbeat of a rank: its place in the code, for how many seconds it has been there, and its collectives so far.

    `number` grows with each beat. A rank that is not watched has no `age_s`.
    """

    number: int
    place: str
    age_s: float | None
    num_collectives: int
    host: str
    finished: bool = False


class Watchdog:
    """Watches this rank's main thread between the first `enter` and `rest`, and always whether other ranks answer.

    Args:
        stuck_after_s: seconds without progress after which a rank counts as stuck; infinite: nothing is watched.
    """

    def __init__(self, world: World, stuck_after_s: float) -> None:
        self._world, self._limit_s = world, stuck_after_s
        self._store = world.store.clone()  # type: ignore[attr-defined]
        self._phase, self._step, self._mark = "", 0, 0.0
        self._watched = False
        self._number = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked_at = time.monotonic()  # last look at the beats of others, while this rank is not watched
        self._asked_at: float | None = None  # time of a request that the store has not answered yet
        self._broken = ""
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._interval_s = min(1.0, stuck_after_s / 10)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # If the process of the store is stopped or its machine gone, the thread that has asked it waits for ever.
        self._store_thread = threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True)
        self._stacks: IO[str] | None = None

    def __enter__(self) -> "Watchdog":
        if math.isfinite(self._limit_s):
            self._store.set_timeout(timedelta(seconds=max(1.0, self._limit_s / 4)))
            self._tell()
            self._world.barrier()  # so that every rank has reported once
            self._thread.start()
            self._store_thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if math.isfinite(self._limit_s):
            self._ended.set()
            self._thread.join(timeout=5.0)
            self._store_thread.join(timeout=5.0)
            faulthandler.cancel_dump_traceback_later()
            if error is None:
                self._tell(finished=True)
        if self._stacks is not None and not self._thread.is_alive():
            self._stacks.close()

    def keep_stacks(self, log: Path) -> None:
        """Let the Python stacks of all threads be appended to this rank's log when it ends; to be called once."""
        self._stacks = log.open("a")

    def enter(self, phase: str, step: int | None = None) -> None:
        """Record progress: the main thread now does `phase` of step `step`, by default the last step given."""
        self._step = self._step if step is None else step
        self._phase, self._mark, self._watched = phase, time.monotonic(), True

    def rest(self) -> None:
        """Stop watching this rank until the next `enter`."""
        self._watched = False

    def _watch(self) -> None:
        while not self._wait():
            self._rearm()
            self._asked_at = self._asked_at or time.monotonic()
            try:
                self._tell()
                error = self._judge(time.monotonic())
                self._asked_at, self._broken = None, ""
            except RuntimeError as broken:  # raised by stores
                self._broken = f" ({' '.join(str(broken).split())[:120]})"
                continue
            if error is not None and not self._ended.is_set():
                self._end(error)

    def _wait(self) -> bool:
        """Wait for the next look; return whether the run has ended meanwhile.

        If the whole process stood still meanwhile (Ctrl-Z, a suspended job), all times start again.
        """
        due = time.monotonic() + self._interval_s
        ended, now = self._ended.wait(self._interval_s), time.monotonic()
        if now - due > self._limit_s / 4:
            self._mark, self._asked_at = now, self._asked_at and now
            self._seen.clear()
        return ended

    def _watch_store(self) -> None:
        while not self._wait():
            error = self._judge_store(time.monotonic())
            if error is not None and not self._ended.is_set():
                self._end(error)

    def _rearm(self) -> None:
        # This thread needs the interpreter's lock. If other code keeps it, faulthandler still dumps, and ends a rank
        # that others wait for. A single process is not ended: faulthandler cannot know if it was stopped by Ctrl-Z.
        if self._watched:
            wait = self._limit_s + self._interval_s + _FAILURE_GRACE_S
            ends = self._world.world_size > 1
            faulthandler.dump_traceback_later(wait, exit=ends, file=self._stacks or sys.stderr)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _age_s(self) -> float | None:
        return time.monotonic() - self._mark if self._watched else None

    def _tell(self, finished: bool = False) -> None:
        self._number += 1
        beat = Beat(
            self._number, self._place(), self._age_s(), self._world.num_collectives, socket.gethostname(), finished
        )
        self._store.set(f"{_KEY}/{self._world.rank}", json.dumps(asdict(beat)))

    def _place(self) -> str:
        return f"{self._phase} of step {self._step}" if self._phase else ""

    def _judge(self, now: float) -> Exception | None:
        """Return the error with which this rank must end, if there is one."""
        age, limit = self._age_s(), self._limit_s
        if age is not None and age > _FAILURE_GRACE_S and (failure := self._store.get(FAILURE_KEY).decode()):
            return LostPeerError(f"another rank ended: {failure}")
        if age is None:
            return self._judge_answers(now)
        if age < limit / 2:
            self._seen.clear()
            return None
        beats = self._beats()
        silent = self._silent(beats, now, limit / 2)
        if age < limit:
            return None
        if silent:
            return LostPeerError(self._describe_silent(silent, beats))
        return self._slowest(beats, age)

    def _judge_answers(self, now: float) -> Exception | None:
        """Return the error for ranks that do not answer, while this one is not watched."""
        if now - self._looked_at < min(self._limit_s / 10, _LONGEST_PAUSE_S):
            return None
        self._looked_at, beats = now, self._beats()
        silent = self._silent(beats, now, self._limit_s)
        return LostPeerError(self._describe_silent(silent, beats)) if silent else None

    def _beats(self) -> list[Beat]:
        keys = [f"{_KEY}/{rank}" for rank in range(self._world.world_size)]
        return [Beat(**json.loads(value)) for value in self._store.multi_get(keys)]

    def _silent(self, beats: list[Beat], now: float, limit_s: float) -> dict[int, float]:
        """Return the ranks without a new beat for at least `limit_s`, and for how many seconds they had none."""
        silent = {}
        for rank, beat in enumerate(beats):
            number, since = self._seen.get(rank, (0, now))
            if beat.number != number:
                self._seen[rank] = (beat.number, now)
            elif now - since >= limit_s and not beat.finished:
                silent[rank] = now - since
        return silent

    def _describe_silent(self, silent: dict[int, float], beats: list[Beat]) -> str:
        them = "; ".join(
            f"rank {rank} on {beats[rank].host} is stuck: it has not answered for {seconds:.0f} s or more (its process "
            f"is stopped, or its machine or the network is gone){_in(beats[rank].place, ', and was last heard of')}"
            for rank, seconds in silent.items()
        )
        return f"{them}; rank {self._world.rank} waits for it{_in(self._place())}"

    def _slowest(self, beats: list[Beat], age: float) -> Exception | None:
        """Judge the ranks that have begun the fewest collectives, which the others wait for."""
        fewest = min(beat.num_collectives for beat in beats if not beat.finished)
        rank = next(r for r, beat in enumerate(beats) if beat.num_collectives == fewest and not beat.finished)
        if beats[self._world.rank].num_collectives == fewest:
            return StuckError(
                f"rank {self._world.rank} on {socket.gethostname()} is stuck in {self._place()}{self._line()}: no "
                f"progress for {age:.0f} s, and config key 'run.stuck_after_s' allows {self._limit_s:g}; its Python "
                f"stack is in '{self._stacks.name if self._stacks else 'the output'}'"
            )
        beat = beats[rank]
        # It came to this place later than this rank and may still go on; or it ends by itself, with a better message.
        if beat.age_s is None or beat.age_s < self._limit_s + 3 * self._interval_s:
            return None
        return LostPeerError(
            f"rank {rank} on {beat.host} is stuck in {beat.place}: no progress for {beat.age_s:.0f} s; rank "
            f"{self._world.rank} waits for it in {self._place()}"
        )

    def _line(self) -> str:
        """Return where in this application the main thread is."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            path = frame.f_code.co_filename
            if "/recsys/" in path:
                return f" ({path[path.rindex('/recsys/') + 1 :]}:{frame.f_lineno}, {frame.f_code.co_name})"
            frame = frame.f_back
        return ""

    def _judge_store(self, now: float) -> Exception | None:
        """Return the error with which this rank must end if the store does not answer and there is no progress."""
        age, asked_at = self._age_s(), self._asked_at
        least = self._limit_s if age is None else self._limit_s / 2
        if asked_at is None or now - asked_at < least or (age is not None and age < self._limit_s):
            return None
        return LostPeerError(
            f"the process that keeps the ranks' store has not answered for {now - asked_at:.0f} s (rank 0, or its "
            f"launcher: it is stopped, or its machine or the network is gone), and rank {self._world.rank} "
            f"waits{_in(self._place())}{self._broken}"
        )

    def _end(self, error: Exception) -> None:
        faulthandler.dump_traceback_later(_LAST_RESORT_S, exit=True, file=self._stacks or sys.stderr)
        if self._stacks is not None:
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        if isinstance(error, StuckError):
            announce(self._store, self._world.rank, error)
        end_run(error)


def _in(place: str, before: str = "") -> str:
    return f"{before} in {place}" if place else ""
