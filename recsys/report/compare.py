"""`recsys compare`: runs side by side, as text and as one HTML page."""

import json
from collections.abc import Sequence
from pathlib import Path

from recsys.report.charts import NUM_COLOURS, Axis, legend, line_chart
from recsys.report.html import charts, document, table
from recsys.report.record import Record, open_record
from recsys.report.text import number
from recsys.runtime.files import write_output

_PLACES = ("run.dir", "run.name")
_TITLES = {"samples_per_s": "samples/s", "wait_share": "share of time waiting for data"}


def compare(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Print differing settings and results of runs, write a page with their curves, and return its path.

    Args:
        out: default: compare.html in the working directory.

    Raises:
        UserError: a folder does not hold a run, or the page cannot be written. OSError: a file cannot be read.
    """
    runs, page = [open_record(folder) for folder in folders], out or Path("compare.html")
    write_output(page, compare_page(runs))
    print(f"{compare_text(runs)}\n")
    return page


def differing_keys(runs: Sequence[Record]) -> list[list[str]]:
    """Return the config keys that differ, each with its value in every run, or a dash if a run has none."""
    rows: dict[str, list[str]] = {}
    sections = [_sections(run) for run in runs]
    for key in sorted(set().union(*(run.config for run in runs)) - {*_PLACES}):
        values = [run.config.get(key, "–") for run in runs]
        if any(value != values[0] for value in values):
            section = _missing_section(key, sections)
            shown = [value if isinstance(value, str) else json.dumps(value) for value in values]
            rows[section or key] = ["there" if section and value != "–" else value for value in shown]
    return [[key, *values] for key, values in rows.items()]


def _sections(run: Record) -> set[str]:
    """Return the dotted names of the sections of a config that hold keys."""
    words = [key.split(".") for key in run.config]
    return {".".join(names[:depth]) for names in words for depth in range(1, len(names))}


def _missing_section(key: str, sections: Sequence[set[str]]) -> str | None:
    """Return the widest section around a key, such as a feature, that is missing in some run, or None.

    Args:
        sections: the result of `_sections` for each run.
    """
    words = key.split(".")
    around = (".".join(words[:depth]) for depth in range(1, len(words)))
    return next((f"{section}.*" for section in around if any(section not in of_run for of_run in sections)), None)


def results(runs: Sequence[Record]) -> list[list[str]]:
    """Return rows of final figures, each with a value for every run."""
    names: dict[str, list[str]] = {}
    for i, run in enumerate(runs):
        metrics = {f"{role} {name}": number(value) for role in run.metrics for name, value in run.metrics[role].items()}
        for name, value in {**run.endings, **metrics}.items():
            names.setdefault(name, ["–"] * len(runs))[i] = value
    facts = [["status", *(run.status for run in runs)], ["steps", *(number(run.step) for run in runs)]]
    return [*facts, *([name, *values] for name, values in names.items())]


def names_of(runs: Sequence[Record]) -> list[str]:
    """Return a distinct name for each run: that of its folder, with as many parent folders as are needed."""
    parts = [run.folder.resolve().parts for run in runs]
    depth = next((n for n in range(1, 99) if len({folders[-n:] for folders in parts}) == len(set(parts))), 99)
    return ["/".join(folders[-depth:]) for folders in parts]


def compare_text(runs: Sequence[Record]) -> str:
    """Return the config keys that differ, and the results, as two tables of text."""
    names = names_of(runs)
    return "\n\n".join(
        _aligned([[head, *names], *rows])
        for head, rows in (("differing key", differing_keys(runs)), ("result", results(runs)))
    )


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *values in rows:
        cells = (value.rjust(width) for value, width in zip(values, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def compare_page(runs: Sequence[Record]) -> str:
    """Return a page with the results, the config keys that differ, and charts with the curves of all runs."""
    names = names_of(runs)
    caption = "What differs in config.yaml; all other keys are equal"
    config = table(caption, ["key", *names], differing_keys(runs), numbers=False)
    key = legend([(f"c{i % NUM_COLOURS}", name) for i, name in enumerate(names)])
    sections = {
        "Results": table("Figures at the end of each run", ["figure", *names], results(runs)),
        "Curves": _curves(runs, names),
        "Config": config or "<p>No key of the configs differs.</p>",
    }
    return document(f"{len(runs)} runs compared", key, sections)


def _curves(runs: Sequence[Record], names: Sequence[str]) -> str:
    figures = []
    for role in dict.fromkeys(["train", *(role for run in runs for role in run.metrics)]):
        for name in dict.fromkeys(name for run in runs for name in run.figures.names(role)):
            if name.startswith("memory/"):
                continue
            series = {label: run.figures.curve(role, name) for label, run in zip(names, runs, strict=True)}
            is_curve = role == "train" or any(len(points) > 1 for points in series.values())
            if is_curve and len({value for points in series.values() for _, value in points}) > 1:
                title = _TITLES.get(name, name.replace("_", " ").replace("/", ", "))
                figures.append(line_chart(Axis(title, role), series))
    return charts(*figures)
