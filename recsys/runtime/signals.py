"""Stop requests: signals and a file that end a run after its current step."""

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recsys.errors import TerminatedError
from recsys.runtime.logs import logger

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_POLL_SECONDS = 1.0
_ECHO_S = 2.0  # a terminal sends Ctrl-C to all its processes, and torchrun passes it on to its ranks again


@contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let a function handle signals inside the block; before and after it, the earlier handlers do."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def ending_orderly() -> Iterator[None]:
    """Let SIGTERM raise an exception, so that files that are half written are removed; for the main thread."""

    def end(number: int, frame: Any) -> None:
        raise TerminatedError

    with handled((signal.SIGTERM,), end):
        yield


class StopRequests:
    """Sets the stop flag of an object on a signal, or if a file exists; ranks then agree on their last step.

    Args:
        target: the object whose flag `stop_requested` is set.
        file: its existence is a request to stop; None on ranks that do not look for it.
    """

    def __init__(self, target: Any, file: Path | None) -> None:
        self._target, self._file = target, file
        self._next_look = 0.0
        self._signalled_at = -math.inf

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Treat SIGTERM, SIGINT and SIGUSR2 as requests; a second SIGINT, later than an echo, interrupts at once."""
        with handled(_SIGNALS, self._handle):
            yield

    def requested(self) -> bool:
        """Return whether this rank has been asked to stop; looks for the file at most once a second."""
        if self._file is not None and not self._target.stop_requested and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _POLL_SECONDS
            if self._file.exists():
                logger.info("'%s' exists: stopping after this step", self._file)
                self._target.stop_requested = True
        return self._target.stop_requested

    def request(self) -> None:
        """Request the stop."""
        self._target.stop_requested = True

    def _handle(self, number: int, frame: Any) -> None:
        is_echo = time.monotonic() - self._signalled_at < _ECHO_S
        if number == signal.SIGINT and self._target.stop_requested and not is_echo:
            raise KeyboardInterrupt  # a second Ctrl-C ends at once
        if not is_echo:
            self._signalled_at = time.monotonic()
        self._target.stop_requested = True
