"""Requests to end a run after its step: signals, and a file."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from recsys.runtime.logs import logger

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_POLL_SECONDS = 1.0


class Stoppable(Protocol):
    """What takes the request to all ranks."""

    stop_requested: bool


class StopRequests:
    """Sets `stop_requested` of an object, and nothing else, so that ranks can agree on the step to end at.

    Args:
        target: whose flag is set.
        file: that asks for the end by being there; None on ranks that do not look.
    """

    def __init__(self, target: Stoppable, file: Path | None) -> None:
        self._target, self._file = target, file
        self._next_look = 0.0

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGTERM, SIGINT and SIGUSR2 for requests; a second SIGINT interrupts at once."""
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def requested(self) -> bool:
        """Return whether this rank has been asked to end, having looked for the file, at most once a second."""
        if self._file is not None and not self._target.stop_requested and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _POLL_SECONDS
            if self._file.exists():
                logger.info("'%s' is there: ending after this step", self._file)
                self._target.stop_requested = True
        return self._target.stop_requested

    def request(self) -> None:
        """Ask for the end."""
        self._target.stop_requested = True

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self._target.stop_requested:
            raise KeyboardInterrupt  # a second Ctrl-C ends at once
        self._target.stop_requested = True
