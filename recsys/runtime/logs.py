"""Logging: log files by rank, progress lines for people, JSON lines for machines."""

import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

from recsys.errors import output_is_cut, why
from recsys.runtime.environment import colours_on
from recsys.runtime.live import bar, clock, live_line

logger = logging.getLogger("recsys")

_DRAWN_EVERY_S = 0.2
_LIBRARIES = ("torch", "torchrec", "fbgemm_gpu", "tensordict", "torchmetrics", "pyvers")  # whose notices are silenced


def start_logging(folder: Path, rank: int) -> Path:
    """Log to `folder`/rank_K.log, whose path is returned, and on rank 0 also to standard output."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{rank}.log"
    handlers: list[logging.Handler] = [_LogFile(path)]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if rank == 0:
        console = _Console()
        console.setFormatter(logging.Formatter("%(message)s"))
        # Errors go to standard error when the run ends.
        console.addFilter(lambda record: record.name == logger.name and record.levelno < logging.ERROR)
        handlers.append(console)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    return path


class _Losing(logging.Handler):
    """A handler that warns once if lines cannot be written, as on a full disk, and lets the run continue."""

    place = "standard output"
    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with suppress(OSError):
                print(f"warning: {self.place} loses lines of the log ({why(error)})", file=sys.stderr, flush=True)


class _Console(_Losing, logging.StreamHandler):
    """Standard output; on a terminal, lines go above the live line, and are left out if that shows them already.

    Warnings begin with the word, so that they can also be found in a file of the output.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self._warning = "\x1b[33mwarning: {}\x1b[0m" if colours_on(sys.stdout) else "warning: {}"

    def emit(self, record: logging.LogRecord) -> None:
        if not (getattr(record, "is_live", False) and live_line.is_on):
            with live_line:
                super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        # If the reader of a pipe has closed it, it wants no more lines, and that is not an error.
        if not (isinstance(sys.exc_info()[1], BrokenPipeError) and output_is_cut()):
            super().handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return self._warning.format(text) if record.levelno >= logging.WARNING else text


class _LogFile(_Losing, logging.FileHandler):
    def _open(self) -> TextIOWrapper:
        self.place = f"'{self.baseFilename}'"
        # Not buffered: a buffer would keep a line that cannot be written, and fail again when it is closed.
        file: Any = FileIO(self.baseFilename, "a")
        return TextIOWrapper(file, "utf-8", "backslashreplace", write_through=True)


def quiet_libraries() -> None:
    """Silence the notices of torch, torchrec and the packages that they use, and nothing that other code logs."""
    warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})(\..*)?$")
    # On the root logger, because the planner of torchrec logs there. It is added once, however often this is called.
    logging.getLogger().addFilter(_is_no_notice)
    for name in ("torchrec", "torch.fx", "torch.distributed", "torch.distributed.checkpoint", "torch.onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_no_notice(record: logging.LogRecord) -> bool:
    """Return False for a message of a library, by the file that it comes from, unless it is an error."""
    if record.levelno >= logging.ERROR:
        return True
    folders = (sys.modules[name].__path__[0] for name in _LIBRARIES if name in sys.modules)
    return not record.pathname.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


def to_json(values: Any, indent: int | None = None) -> str:
    """Return values as JSON, with null for NaN and infinity."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


class Progress:
    """Measures training speed, loss, share of time spent waiting for data, and time left; draws the live line.

    Args:
        window: collects [sum, number] of the losses since the last line, by task; "" is the whole loss.
    """

    def __init__(self, num_steps: int, first_step: int, window: dict[str, list[float]]) -> None:
        self._num_steps, self._window = num_steps, window
        self._step = self._first_step = first_step
        self._rows = self._total_rows = 0
        self._wait = self._total_wait = 0.0
        self._start = self._mark = self._drawn = time.monotonic()
        self._paused, self._told = 0.0, ""

    def step(self, rows: int, wait_seconds: float, losses: dict[str, float]) -> None:
        """Count a step, with `rows` rows over all ranks.

        Args:
            losses: by task; empty if the step was skipped, or if none of its rows counts for a loss.
        """
        self._step += 1
        self._rows += rows
        self._total_rows += rows
        self._wait += wait_seconds
        self._total_wait += wait_seconds
        for name, loss in losses.items():
            total, count = self._window.get(name, (0.0, 0))
            self._window[name] = [total + loss, count + 1]
        if live_line.is_on and time.monotonic() - self._drawn > _DRAWN_EVERY_S:
            self._drawn = time.monotonic()
            text = f"step {self._step:,}/{self._num_steps:,}  left {clock(self._seconds_left())}  {self._told}"
            live_line.draw(f"{bar(self._step / self._num_steps)}  {text}")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave time spent on evaluation or a checkpoint out of the speed; pauses may be nested."""
        start, before = time.monotonic(), self._paused
        yield
        seconds = time.monotonic() - start - (self._paused - before)
        self._mark += seconds
        self._paused += seconds

    def seconds(self) -> float:
        """Return the time spent training so far."""
        return time.monotonic() - self._start - self._paused

    def totals(self) -> dict[str, float]:
        """Return the speed over all ranks, without evaluation and checkpoints, and the share of waiting for data."""
        seconds = max(self.seconds(), 1e-9)
        return {"samples_per_s": self._total_rows / seconds, "wait_share": min(1.0, self._total_wait / seconds)}

    def line(self) -> dict[str, Any]:
        """Return the figures of the steps since the last call; the loss is the mean over the steps that have one."""
        now = time.monotonic()
        elapsed = max(now - self._mark, 1e-9)
        means = {name: total / count for name, (total, count) in self._window.items()}
        values: dict[str, Any] = {
            "step": self._step,
            "loss": means.pop("", math.nan),
            "samples_per_s": self._rows / elapsed,
            "wait_share": min(1.0, self._wait / elapsed),
            "seconds_left": self._seconds_left(),
        }
        if means:
            values["losses"] = means
        self._rows, self._wait, self._mark = 0, 0.0, now
        self._window.clear()
        return values

    def show(self, values: dict[str, Any]) -> str:
        """Return the figures of `line` as text."""
        tasks = "".join(f"{name} {loss:.4f}  " for name, loss in values.get("losses", {}).items())
        loss = "no loss" if math.isnan(values["loss"]) else f"loss {values['loss']:.4f}"
        speed = f"{values['samples_per_s']:,.0f} samples/s  waiting for data {values['wait_share']:.0%}"
        self._told = f"{loss}  {tasks}{speed}  "
        step = f"step {values['step']:>{len(str(self._num_steps))}}/{self._num_steps}"
        return f"{step}  {self._told}left {clock(values['seconds_left'])}"

    def _seconds_left(self) -> float:
        return self.seconds() / max(1, self._step - self._first_step) * (self._num_steps - self._step)


def show_metrics(metrics: dict[str, float]) -> str:
    """Return the metrics of an evaluation as text, without counts and calibration, which are only in the records."""
    aside = ("rows", "users", "calibration")
    shown = {name: value for name, value in metrics.items() if name.rpartition(".")[2] not in aside}
    return "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
