"""Writers of figures during a run: what every writer can be given, and metrics.jsonl."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recsys.runtime.files import naming, replace_file
from recsys.runtime.logs import to_json


class Writer:
    """Destination of figures. This class drops them; subclasses write what they can show.

    Attributes:
        status: how the run has ended, for trackers: failed, unless `done` or `stopped` is set before `close`.
    """

    status = "failed"

    def log(self, kind: str, values: dict[str, Any]) -> None:
        """Write a line.

        Args:
            values: `step`, and figures or mappings of figures.

        Raises:
            OSError: metrics.jsonl cannot be written.
        """
        self.write({"kind": kind, "time": round(time.time(), 3), **values})

    def write(self, line: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl: `kind`, `time`, and the values of `log`."""

    def last(self, line: dict[str, Any]) -> None:
        """Write final figures (no `time`) to trackers; result.json and memory/ have them, but not metrics.jsonl."""

    def text(self, name: str, text: str) -> None:
        """Write a text about the whole run."""

    def config(self, text: str) -> None:
        """Write the config, as YAML."""
        self.text("config", text)

    def histogram(self, name: str, step: int, counts: np.ndarray, limits: np.ndarray) -> None:
        """Write a histogram: the number of values in each bin, [n], and the limits of the bins, [n + 1]."""

    def vectors(self, name: str, step: int, vectors: np.ndarray, ids: Sequence[Any]) -> None:
        """Write vectors, [ids, dimensions], with their raw ids."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines(Writer):
    """Writer of metrics.jsonl, which has one line for each kind and step: the last one written.

    Args:
        step: at which the run starts or resumes; lines of later steps, from before a crash, are dropped.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        lines = _lines_until(path, step)
        if path.exists():
            replace_file(path, b"".join(text for _, text in lines))
        self._keys = {key for key, _ in lines}
        self._file = path.open("ab", buffering=0)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, or replace the line of the same kind and step, for example of a repeated evaluation.

        Raises:
            OSError: the file cannot be written.
        """
        key, text = (line["kind"], line["step"]), to_json(line).encode() + b"\n"
        if key in self._keys:
            lines = _lines_until(self._path, math.inf)
            replace_file(self._path, b"".join(text if existing == key else content for existing, content in lines))
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            return
        self._keys.add(key)
        with naming(self._path):
            while text:
                text = text[self._file.write(text) :]

    def close(self) -> None:
        self._file.close()


def _lines_until(path: Path, step: float) -> list[tuple[tuple[str, int], bytes]]:
    """Return the lines of metrics.jsonl up to a step, each with its kind and step."""
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            if line["step"] <= step:
                lines.append(((str(line["kind"]), line["step"]), text + b"\n"))
        except (ValueError, KeyError, TypeError):  # the last line of a killed process may be truncated
            continue
    return lines
