"""Record of a run, read from its directory: the run may be done, failed, killed or still running."""

import json
import math
import os
import re
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from omegaconf._yaml import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from recsys.config.names import MOST_YAML_NODES
from recsys.config.values import flat
from recsys.errors import UserError
from recsys.report.shapes import COMPRESSION, ENDING, FIGURE, ID_FIGURES, MEMORY, PLAN, RESULT, misfit
from recsys.report.text import duration, number, size
from recsys.runtime.checkpoint_folders import MARKER
from recsys.runtime.run_lock import is_locked

_LOG_TAIL = 1 << 20  # bytes of a log that are read
_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
_LOG_LINE = re.compile(rf"({_TIME}),\d+ (WARNING|ERROR|CRITICAL) [\w.]+: (?:error: )?(.*)", re.DOTALL)
_FOR_DEVELOPERS = re.compile(r"\S+: (Future|Deprecation|PendingDeprecation)Warning:")
IDS = "ids/"  # prefix of the kind of lines on the ids of a feature
_NO_FIGURES = ("kind", "time", "step")
_NO_CURVES = ("epoch", "rows", "users", "seconds_left")
Points = list[tuple[float, float | None]]  # steps and values; None is not a number


@dataclass(frozen=True)
class Record:
    """A run, read from its directory.

    Args:
        error: the error with which the run is ending, which is not in its log yet.
    """

    folder: Path
    error: str | None = None

    @cached_property
    def result(self) -> dict[str, Any]:
        """Content of result.json if the last start of the run ended without an error, else empty."""
        identity = self.endings_of_ranks[0]["identity"] if self.endings_of_ranks else {}
        return self._json("result.json", RESULT) if identity.get("status") in ("done", "stopped") else {}

    @cached_property
    def compression(self) -> dict[str, Any]:
        """Content of compression.json if `recsys compress` has written the run, else empty."""
        return self._json("compression.json", COMPRESSION)

    @cached_property
    def endings_of_ranks(self) -> list[dict[str, Any]]:
        """The reports that ranks write at their end, in order of rank; empty before the end of a run."""
        reports = [_read_json(path, ENDING) for path in self._of_ranks()]
        return sorted(reports, key=lambda report: report["identity"]["rank"])

    @cached_property
    def memory(self) -> list[dict[str, Any]]:
        """The memory reports of the ranks; a rank that ended before it had tables has none."""
        reports = [report for report in self.endings_of_ranks if "peak" in report]
        for report in reports:
            _check(self.folder / f"memory/rank_{report['identity']['rank']}.json", report, MEMORY)
        return reports

    @cached_property
    def shards(self) -> list[Any]:
        """Shards of the plan, with the attributes of `recsys.tables.spec.Shard`."""
        return [SimpleNamespace(**shard) for shard in self._json("plan.json", PLAN).get("shards", ())]

    @cached_property
    def config_text(self) -> str:
        """Text of config.yaml; empty if there is none."""
        path = self.folder / "config.yaml"
        return path.read_text(errors="replace") if path.exists() else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config's values by dotted key; a list is one value."""
        try:
            return dict(flat("", read_config(self.config_text)))
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            raise UserError(
                f"'{self.folder / 'config.yaml'}' is damaged ({' '.join(str(error).split())}); each checkpoint has a "
                "copy of it, checkpoints/step-N/config.yaml"
            ) from error

    @property
    def name(self) -> str:
        """Value of `run.name`, otherwise the name of the folder."""
        return str(self.config.get("run.name") or self.folder.name)

    @property
    def status(self) -> str:
        """How the run ended: done, stopped, failed, out of memory, compressed or killed; or running."""
        ending = str(self.endings_of_ranks[0]["identity"]["status"]) if self.endings_of_ranks else ""
        # A done run stays done if a further start is refused.
        if self.error or (ending != "done" and self._failed_since()):
            return ending if ending == "out of memory" else "failed"
        if ending:
            return ending
        if is_locked(self.folder):
            return "running"
        return "compressed" if self.compression and not self.figures.last else "killed"

    @cached_property
    def figures(self) -> "Figures":
        """Figures of metrics.jsonl."""
        return Figures(self.folder / "metrics.jsonl")

    def curves(self, kind: str) -> dict[str, Points]:
        """Return by name the curves of a kind of lines (train, valid, test); see `Figures.curve`."""
        return {name: self.figures.curve(kind, name) for name in self.figures.names(kind)}

    @cached_property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        """The last metrics of each dataset."""
        if "metrics" in self.result:
            return self.result["metrics"]
        last = {kind: line for kind, line in self.figures.last.items() if kind in ("valid", "test")}
        if self.compression.get("stages") and not last:
            stage = self.compression["stages"][-1]  # a stage that was skipped repeats the one before it
            return {self.compression["data"]: stage["metrics"]} | ({"test": stage["test"]} if stage["test"] else {})
        return {kind: dict(figures(line)) for kind, line in last.items()}

    @property
    def endings(self) -> dict[str, str]:
        """The available ones of the final figures that any run may have, by name, formatted for people."""
        losses = [value for _, value in self.figures.curve("train", "loss")]
        endings = {"training loss": number(losses[-1])} if losses else {}
        if self.result:
            endings["samples/s"] = f"{self.result['samples_per_s']:,.0f}"
            endings["waiting for data"] = f"{self.result['wait_share']:.1%}"
            endings["time"] = duration(self.result["seconds"])
        if self.memory:
            endings["peak memory"] = size(max(report["peak"]["measured_bytes"] for report in self.memory))
        return endings

    @cached_property
    def ids(self) -> dict[str, dict[str, Any]]:
        """Figures on the ids of each feature, from the end of the run or the last evaluation so far."""
        last = {kind.removeprefix(IDS): line for kind, line in self.figures.last.items() if kind.startswith(IDS)}
        return self.result.get("data", {}).get("ids", last)

    @cached_property
    def step(self) -> int:
        """The last step that any file of the run knows."""
        last = self.memory[0]["identity"]["step"] if self.memory else 0
        saved = (int(name.removeprefix("step-")) for name, _, _ in self.checkpoints)
        return max([last, self.figures.step, *saved])

    @cached_property
    def log(self) -> list[tuple[str, str, str]]:
        """Last times, levels and texts of the warnings and errors of all ranks, in order."""
        messages: dict[str, tuple[str, str, str]] = {}
        for path in sorted(self.folder.glob("logs/rank_*.log")):
            for match in map(_LOG_LINE.fullmatch, _entries(path)):
                if match and not _FOR_DEVELOPERS.match(match[3]):
                    messages[match[3]] = max(
                        messages.get(match[3], ("", "", "")), (match[1], match[2], match[3].rstrip())
                    )
        entries = sorted(messages.values())
        return [*entries, ("", "ERROR", self.error)] if self.error else entries

    @cached_property
    def checkpoints(self) -> list[tuple[str, float, int]]:
        """Name, time and bytes of each checkpoint, the oldest first."""
        checkpoints = []
        for path in sorted(self.folder.glob(f"checkpoints/step-*[0-9]/{MARKER}")):
            with suppress(FileNotFoundError):  # a run in progress may remove it meanwhile
                num_bytes = sum(file.stat().st_size for file in path.parent.iterdir())
                checkpoints.append((path.parent.name, path.stat().st_mtime, num_bytes))
        return checkpoints

    def _failed_since(self) -> bool:
        """Return whether the log ends in an error that is later than all memory reports."""
        if not self.log or self.log[-1][1] != "ERROR":
            return False
        at = time.mktime(time.strptime(self.log[-1][0], "%Y-%m-%d %H:%M:%S"))
        return at > max((path.stat().st_mtime for path in self._of_ranks()), default=-math.inf) - 1

    def _of_ranks(self) -> list[Path]:
        """Return the paths of the memory reports; a rank that was killed has none."""
        return list(self.folder.glob("memory/rank_*.json"))

    def _json(self, name: str, shape: Any) -> dict[str, Any]:
        path = self.folder / name
        return _read_json(path, shape) if path.exists() else {}


class Figures:
    """Figures of metrics.jsonl, in 16 bytes each, because a run may have as many lines as steps.

    Args:
        path: of the file, which need not exist. Truncated lines, which a killed process or machine may leave, are
            skipped.

    Attributes:
        last: the last line of each kind; for kinds on ids, the last with all figures. step: the last step.
    """

    def __init__(self, path: Path) -> None:
        self.last: dict[str, dict[str, Any]] = {}
        self.step = 0
        self._curves: dict[str, dict[str, tuple[array[float], array[float]]]] = {}
        for line in _lines(path):
            kind, step = line["kind"], line["step"]
            self.step = max(self.step, step)
            if not (kind.startswith(IDS) and misfit(line, ID_FIGURES)):
                self.last[kind] = line
            curves = self._curves.setdefault(kind, {})
            for name, value in figures(line):
                if name.rpartition(".")[2] not in _NO_CURVES:
                    steps, values = curves.setdefault(name, (array("d"), array("d")))
                    steps.append(step)
                    values.append(math.nan if value is None else value)

    def names(self, kind: str) -> list[str]:
        """Return the names of the figures in a kind of lines; see `figures`."""
        return list(self._curves.get(kind, ()))

    def curve(self, kind: str, name: str) -> Points:
        """Return the curve of a figure, in a kind of lines, over the steps; empty if there is none."""
        steps, values = self._curves.get(kind, {}).get(name, ((), ()))
        return [(step, None if value != value else value) for step, value in zip(steps, values, strict=True)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of metrics.jsonl."""
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("kind"), str) and isinstance(line.get("step"), int):
                yield line


def figures(line: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of a line with their names (NAME/INNER for those in a mapping); None for null."""
    for name, value in line.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, figure in inner:
            if name not in _NO_FIGURES and not misfit(figure, FIGURE):
                yield f"{name}/{key}" if key else name, figure


def open_record(path: Path, error: str | None = None) -> Record:
    """Return the record of a run directory; for `error` see `Record`.

    Raises:
        UserError: the folder does not hold a run.
    """
    if (path / MARKER).exists():
        above = os.path.normpath(path / ".." / "..")
        hint = f"'{above}'" if (Path(above) / "config.yaml").exists() else "the folder that its run has written to"
        raise UserError(f"'{path}' is a checkpoint, but a run directory is needed; name {hint}")
    if not (path / "config.yaml").exists():
        raise UserError(f"'{path}' holds no run; name a folder that a run has written to, such as runs/NAME-TIME")
    return Record(path, error)


def _read_json(path: Path, shape: Any) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    _check(path, content, shape)
    return content


def _check(path: Path, content: Any, shape: Any) -> None:
    if problem := misfit(content, shape):
        raise _damaged(path, problem)


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(f"'{path}' is damaged ({problem}); remove it, and the page shows the rest")


def read_config(text: str) -> dict[str, Any]:
    """Parse a run's config.yaml to nested mappings; references to variables stay references.

    Raises:
        yaml.YAMLError, ValueError: it is damaged.
    """
    # The YAML loader of OmegaConf reads numbers like configs do; making its nodes would take five times as long.
    values = yaml.load(text, Loader=get_yaml_loader(max_yaml_expanded_nodes=MOST_YAML_NODES)) or {}
    if not isinstance(values, dict):
        raise ValueError("it holds no keys and values")
    return values


def _entries(path: Path) -> list[str]:
    """Return the entries in the last megabyte of a log, each with all of its lines."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL))
        text = file.read().decode("utf-8", "replace")
    return re.split(rf"\n(?={_TIME},)", text.rstrip("\n"))
