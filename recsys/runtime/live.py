"""Progress of long tasks: on a terminal a line that is redrawn, elsewhere lines of the log."""

import logging
import shutil
import sys
import threading
import time
from contextlib import suppress
from typing import TextIO

from recsys.runtime.environment import draws_on

logger = logging.getLogger("recsys")

_AFTER_S = 5.0  # tasks that end sooner show no progress
_DRAWN_EVERY_S, _TOLD_EVERY_S = 0.2, 60.0
_BAR_WIDTH = 20
_CLEAR = "\r\x1b[K"


class LiveLine:
    """The last line of a terminal, which can be redrawn; on any other stream it does nothing.

    Attributes:
        is_on: whether the stream is a terminal that moves its cursor.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._text, self._lock = stream, "", threading.RLock()
        self.is_on = draws_on(stream)

    def draw(self, text: str) -> None:
        """Replace the line by a text."""
        if self.is_on:
            with self._lock, suppress(OSError, ValueError):  # raised, for example, if the terminal is gone
                self._text = text
                self._stream.write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
                self._stream.flush()

    def close(self) -> None:
        """Remove the line."""
        if self._text:
            self.draw("")

    def __enter__(self) -> None:
        """Remove the line while the block prints lines, which then stand above it."""
        self._lock.acquire()
        if self._text:
            with suppress(OSError, ValueError):
                self._stream.write(_CLEAR)

    def __exit__(self, *error: object) -> None:
        if self._text:
            self.draw(self._text)
        self._lock.release()


live_line = LiveLine(sys.stdout)


def bar(share: float) -> str:
    """Return a bar that shows a share, with the percentage, in characters that standard output can show."""
    full, rest = "━─" if (sys.stdout.encoding or "").lower().startswith("utf") else "=-"
    length = round(_BAR_WIDTH * min(1.0, share))
    return f"{full * length}{rest * (_BAR_WIDTH - length)} {min(1.0, share):4.0%}"


class Task:
    """A context that shows the progress of a task if it takes more than some seconds.

    On a terminal, progress is a bar; elsewhere lines of the log, at growing intervals of up to one minute.

    Args:
        total: value of `done` at the end, or None if it is not known.
        is_shown: False on all but one of the ranks that do the same.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "", is_shown: bool = True) -> None:
        self._what, self._total, self._unit = what, total, unit
        self.done = 0
        self._start, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True) if is_shown else None

    def __enter__(self) -> "Task":
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def text(self) -> str:
        """Return the progress in words."""
        seconds = time.monotonic() - self._start
        if not self._total:
            return f"{self._what}, {seconds:.0f} s so far"
        share = min(1.0, self.done / self._total)
        left = f", {clock(seconds / share - seconds)} left" if share else ""
        return f"{self._what}: {self.done:,} of {self._total:,} {self._unit} ({share:.0%}{left})"

    def _show(self) -> None:
        wait = _AFTER_S
        while not self._ended.wait(wait):
            if live_line.is_on:
                share = f"{bar(self.done / self._total)}  " if self._total else ""
                live_line.draw(share + self.text())
                wait = _DRAWN_EVERY_S
            else:
                if logger.level:
                    logger.info("%s", self.text())
                else:  # no log is open yet
                    print(self.text(), file=sys.stderr, flush=True)
                wait = min(_TOLD_EVERY_S, time.monotonic() - self._start)
        live_line.close()


def clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds."""
    return f"{int(seconds) // 3600}:{int(seconds) % 3600 // 60:02d}:{int(seconds) % 60:02d}"
