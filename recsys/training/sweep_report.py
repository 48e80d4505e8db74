"""Reports of a search: its trials as JSON, Markdown and a drawing."""

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recsys.report.drawing import draw_bars
from recsys.runtime.files import replace_file
from recsys.runtime.logs import to_json
from recsys.runtime.versions import installed_versions

_MOST_BARS = 40


@dataclass(frozen=True)
class Tried:
    """A trial: values of keys, metric of each seed, bytes of tables, seconds, and a remark if it has no result."""

    number: int
    settings: dict[str, str]
    values: list[float]
    bytes: int | None
    seconds: float | None
    remark: str

    @property
    def mean(self) -> float:
        """Mean of the metric over the seeds; only of a trial that has values."""
        return statistics.mean(self.values)

    def told(self) -> str:
        """Return mean and spread."""
        spread = f" ± {statistics.stdev(self.values):.5f}" if len(self.values) > 1 else ""
        return f"{self.mean:.5f}{spread}"


def pareto(tried: Sequence[Tried], higher: bool) -> list[Tried]:
    """Return the trials that no other beats in both metric and bytes, the fewest bytes first."""
    best: list[Tried] = []
    for trial in sorted(tried, key=lambda t: (t.bytes or 0, -t.mean if higher else t.mean)):
        if not best or (trial.mean > best[-1].mean if higher else trial.mean < best[-1].mean):
            best.append(trial)
    return best


def write_report(
    out: Path, tried: Sequence[Tried], metric: str, higher: bool, by_bytes: bool, command: Sequence[str]
) -> None:
    """Write sweep.json, .md and .svg.

    Args:
        higher: whether a higher metric is better. by_bytes: whether bytes count too. command: common to all trials.
    """
    complete = sorted((trial for trial in tried if trial.values), key=lambda t: -t.mean if higher else t.mean)
    front = pareto(complete, higher) if by_bytes else complete[:1]
    content = {
        "command": list(command),
        "metric": metric,
        "data": "valid",
        "best": [trial.number for trial in front],
        "trials": [asdict(trial) for trial in tried],
        "versions": installed_versions(),
    }
    replace_file(out / "sweep.json", to_json(content, indent=1) + "\n")
    parts = [f"# {len(tried)} trials of `{shlex.join(command)}`, {len(complete)} to their end\n"]
    if by_bytes and front:
        parts += [f"No other trial has both, a better {metric} and fewer bytes of tables:\n", _table(front, metric)]
    if front:
        best = [*command, *(f"{key}={value}" for key, value in complete[0].settings.items())]
        parts.append(f"The best {metric}, on data.valid: `{shlex.join(best)}`\n")
    rest = [trial for trial in tried if not trial.values]
    parts += ["All trials, the best first:\n", _table([*complete, *rest], metric)]
    replace_file(out / "sweep.md", "\n".join(parts))
    replace_file(out / "sweep.svg", _drawing(front if by_bytes else complete[:_MOST_BARS], metric, by_bytes))


def _table(tried: Sequence[Tried], metric: str) -> str:
    keys = list(tried[0].settings)
    header = ["Trial", *(f"`{key}`" for key in keys), metric, "Tables, bytes", "Seconds", ""]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * (len(keys) + 1)}---:|---:|---:|---|"]
    for trial in tried:
        number_of_bytes = "" if trial.bytes is None else f"{trial.bytes:,}"
        seconds = "" if trial.seconds is None else f"{trial.seconds:.0f}"
        values = [_short(trial.settings.get(key, "")) for key in keys]
        cells = [
            str(trial.number),
            *values,
            trial.told() if trial.values else "",
            number_of_bytes,
            seconds,
            trial.remark,
        ]
        escaped = [cell.replace("|", r"\|") for cell in cells]  # Markdown ends a cell there, in code too
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


def _short(value: str) -> str:
    try:
        return value if value.lstrip("-").isdecimal() else f"{float(value):.4g}"
    except ValueError:
        return value


def _drawing(tried: Sequence[Tried], metric: str, by_bytes: bool) -> str:
    lengths = [float(trial.bytes or 0) if by_bytes else abs(trial.mean) for trial in tried]
    labels = [f"{metric} {trial.told()}, {trial.bytes or 0:,} bytes" for trial in tried]
    names = [f"trial {trial.number}" for trial in tried]
    scaled = [length / (max(lengths) or 1) for length in lengths]
    return draw_bars(list(zip(names, scaled, labels, strict=True)), left=100, width=800)
