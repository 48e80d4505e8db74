"""RUN/report.html: one page on a run, made from the files in its directory."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from recsys.report.charts import NUM_COLOURS, Axis, line_chart, stacked_bars
from recsys.report.html import charts, document, folded, meter, preformatted, table, tiles
from recsys.report.record import IDS, Record, open_record
from recsys.report.text import listed, number, placements, size
from recsys.runtime.files import write_output

PAGE = "report.html"
_MOST_RANKS = 8  # ranks that are drawn, those with the highest peaks
_MOST_WARNINGS = 50
_ENDS = {"done": "good", "compressed": "good", "failed": "bad", "out of memory": "bad", "killed": "bad"}


def write_report(folder: Path, out: Path | None = None, error: str | None = None) -> Path:
    """Write the page of a run, and return its path.

    Args:
        out: default: report.html in the run directory. error: the error with which the run is ending.

    Raises:
        UserError: the folder does not hold a run, or the page cannot be written. OSError: a file cannot be read.
    """
    page, record = out or folder / PAGE, open_record(folder, error)
    write_output(page, report_page(record))
    return page


@contextmanager
def reported(is_writer: bool) -> Iterator[Callable[[Path], None]]:
    """Yield a function to be called with the run directory; at the end, also after an error, write the page there."""
    folders: list[Path] = []
    error: BaseException | None = None
    try:
        yield folders.append
    except BaseException as raised:
        error = raised
        raise
    finally:
        if is_writer and folders and folders[-1].exists():
            try:
                write_report(folders[-1], error=None if error is None else f"{error}" or type(error).__name__)
            except Exception as problem:  # it must not hide how the run itself ended
                print(f"warning: {folders[-1] / PAGE} was not written ({problem})", file=sys.stderr)


def report_page(run: Record) -> str:
    """Return the page of a run as HTML."""
    sections = {
        "Results": _results(run),
        "Learning": _learning(run),
        "Speed": _speed(run),
        "Profile": _profile(run),
        "Memory": _memory(run),
        "Plan": _plan(run),
        "Ids": _ids(run),
        "Checkpoints": _checkpoints(run),
        "Warnings": _warnings(run),
        "Setting": _setting(run),
    }
    return document(run.name, _head(run), sections)


def _head(run: Record) -> str:
    status = run.status
    places = run.memory[0]["identity"] if run.memory else {}
    device = str(places.get("device", "")).partition(":")[0]
    where = f"on {places['world_size']} × {device}" if places else ""
    read = f"<span class=line>page of {time.strftime('%Y-%m-%d %H:%M')}</span>"
    line = f"<span class='status {_ENDS.get(status, '')}'>{escape(status)}</span> at step {run.step:,} {escape(where)}"
    figures: dict[str, str] = {}
    role = next((role for role in ("test", "valid") if role in run.metrics), None)
    for name, value in list(run.metrics[role].items())[:2] if role else ():
        figures[f"{name}, {role}"] = number(value)
    figures |= run.endings
    problems = [text for _, level, text in run.log if level != "WARNING" and _ENDS.get(status) == "bad"]
    problem = f"<p class=problem>{escape(problems[-1][:2000])}</p>" if problems else ""
    return f"<p class=quiet>{line} · {read}</p>{problem}{tiles(figures) if figures else ''}"


def _results(run: Record) -> str:
    names = dict.fromkeys(name for metrics in run.metrics.values() for name in metrics)
    rows = [[name, *(number(metrics.get(name)) for metrics in run.metrics.values())] for name in names]
    best = run.result.get("best_step")
    caption = "Last evaluation of each dataset" + (f"; the best step is {best:,}" if best is not None else "")
    return table(caption, ["metric", *run.metrics], rows)


def _learning(run: Record) -> str:
    """Draw the losses, and a chart for each metric over the evaluations."""
    train, best = run.curves("train"), run.result.get("best_step")
    marks = {} if best is None else {float(best): f"best step {best:,}"}
    since = "mean since the line before"
    drawn = [line_chart(Axis("Training loss", since, marks=marks), {"loss": train.get("loss", [])})]
    drawn.append(line_chart(Axis("Training loss by label", since, marks=marks), _below("losses", train)))
    evaluations = {role: run.curves(role) for role in run.metrics}
    for name in dict.fromkeys(name for curves in evaluations.values() for name in curves):
        series = {role: curves[name] for role, curves in evaluations.items() if name in curves}
        if any(len(points) > 1 for points in series.values()):
            drawn.append(line_chart(Axis(name, ", ".join(series), marks=marks), series))
    norm = Axis("Gradient norm", "of the dense part, before clipping", least=0)
    drawn.append(line_chart(norm, {"gradient norm": train.get("gradient_norm", [])}))
    for name, points in {**_below("learning_rate", train), "loss scale": train.get("loss_scale", [])}.items():
        if len({value for _, value in points}) > 1:  # a constant is in config.yaml
            title = name if name == "loss scale" else f"Learning rate, {name}"
            drawn.append(line_chart(Axis(title, least=0), {name: points}))
    return charts(*drawn)


def _below(name: str, curves: dict[str, Any]) -> dict[str, Any]:
    """Return the curves whose names begin with `name/`, without that prefix."""
    return {key.removeprefix(f"{name}/"): points for key, points in curves.items() if key.startswith(f"{name}/")}


def _speed(run: Record) -> str:
    train = run.curves("train")
    speed = Axis("Speed", "samples/s", show=lambda value: f"{value:,.0f}", least=0)
    waiting = Axis("Waiting for data", "share of time", show=lambda value: f"{value:.1%}", least=0)
    memory = Axis("Memory of rank 0", "in training", show=size, base=1024, least=0)
    return charts(
        line_chart(speed, {"speed": train.get("samples_per_s", [])}),
        line_chart(waiting, {"waiting": train.get("wait_share", [])}),
        line_chart(memory, _below("memory", train)),
    )


def _profile(run: Record) -> str:
    """Return the text on the time of profiled steps that rank 0 has written."""
    path = run.folder / "profile" / "rank_0.txt"
    return preformatted("Time of the profiled steps", path.read_text()) if path.exists() else ""


def _memory(run: Record) -> str:
    """Draw the predicted peak of each rank, by kind, next to the measured peak, and the memory over time."""
    if not run.memory:
        return ""
    fullest = sorted(run.memory, key=lambda report: report["peak"]["measured_bytes"] or 0, reverse=True)[:_MOST_RANKS]
    bars: dict[str, dict[str, float]] = {}
    for report in fullest:
        rank, peak = report["identity"]["rank"], report["peak"]
        bars[f"rank {rank} predicted"] = {k.replace("_", " "): v for k, v in peak["by_kind_predicted"].items()}
        bars[f"rank {rank} measured"] = {"measured": peak["measured_bytes"] or 0}
    on_gpu = fullest[0]["identity"]["device"].startswith("cuda")
    of = "what torch's allocator had allocated on the GPU" if on_gpu else "the process above what it used after imports"
    left_out = len(run.memory) - len(fullest)
    among = f" The {len(fullest)} fullest of {len(run.memory)} ranks are shown." if left_out else ""
    if run.config.get("run.profile_steps"):
        among += " What profiling took is among what was measured, and was not predicted."
    begun = {span["phase"]: span["start_s"] for span in reversed(fullest[0]["timeline"]["spans"])}
    order = sorted(fullest[0]["phases"], key=lambda phase: (phase == "other", begun.get(phase, float("inf"))))
    phases = {phase: [report["phases"].get(phase, {}) for report in fullest] for phase in order}
    rows = [
        [phase, *(_both(values) for values in of_ranks)]
        for phase, of_ranks in phases.items()
        if any(values.get("measured_bytes") for values in of_ranks)
    ]
    lines = [[line["kind"].replace("_", " ")] for line in fullest[0]["lines"]]
    for report in fullest:
        for row, line in zip(lines, report["lines"], strict=True):
            row.append(_both(line))
    ranks = [f"rank {report['identity']['rank']}" for report in fullest]
    return (
        f"<p>Peaks are of {of}.{among}</p>{stacked_bars(bars, plain='measured')}{charts(*map(_timeline, fullest))}"
        f"<div class=tables>{table('Measured (predicted) peak by phase', ['phase', *ranks], rows)}"
        f"{table('Measured (predicted) bytes of tensors', ['kind', *ranks], lines)}</div>"
    )


def _both(values: dict[str, Any]) -> str:
    return f"{size(values.get('measured_bytes'))} ({size(values.get('predicted_bytes'))})"


def _timeline(report: dict[str, Any]) -> str:
    """Draw a rank's resident memory over its phases; the title has the peak, which the samples may miss."""
    spans = [span for span in report["timeline"]["spans"] if span["phase"] not in ("step", "other")]
    top = max((span["peak_bytes"] for span in report["timeline"]["spans"]), default=0)
    predicted = report["host"]["baseline_bytes"] + report["peak"]["predicted_bytes"]
    on_gpu = report["identity"]["device"].startswith("cuda")  # the prediction is then the GPU's peak, not this one
    axis = Axis(
        f"Rank {report['identity']['rank']}, resident memory",
        f"peak {size(top)}",
        x_label="seconds",
        show=size,
        base=1024,
        least=0,
        bands=[(span["start_s"], span["stop_s"], span["phase"]) for span in spans],
        level=None if on_gpu else (predicted, f"predicted peak {size(predicted)}"),
    )
    return line_chart(axis, {"resident": report["timeline"]["samples"]})


def _plan(run: Record) -> str:
    """Draw the shards of tables on each rank, and list them."""
    ranks: dict[int, dict[str, float]] = {}
    for report in run.memory:
        for entry in report["tables"]:
            tables = ranks.setdefault(report["identity"]["rank"], {})
            tables[entry["name"]] = sum(entry["measured"].values())
    show: Callable[[float], str] = size
    if not ranks:
        show = lambda value: f"{value:,.0f} numbers"  # noqa: E731
        for shard in run.shards:
            tables = ranks.setdefault(shard.rank, {})
            tables[shard.table] = tables.get(shard.table, 0) + shard.size[0] * shard.size[1]
    by_fill = sorted(ranks, key=lambda rank: sum(ranks[rank].values()), reverse=True)
    shown = sorted(by_fill if len(by_fill) <= 16 else [*by_fill[:8], *by_fill[-8:]])
    data_types = {entry["name"]: entry["data_type"] for report in run.memory for entry in report["tables"]}
    rows = [
        [name, split.replace("_", " "), kernel.replace("_", " "), data_types.get(name, "–"), where]
        for (name, split, kernel), where in placements(run.shards).items()
    ]
    among = ""
    if len(shown) < len(ranks):
        among = f"<p>The 8 fullest and the 8 emptiest of {len(ranks)} ranks are drawn.</p>"
    idle = set(range(run.memory[0]["identity"]["world_size"])) - set(ranks) if run.memory else set()
    among += f"<p>No table is on {listed(idle)}.</p>" if idle else ""
    bars = stacked_bars({f"rank {rank}": ranks[rank] for rank in shown}, show) if ranks else ""
    columns = ["table", "split", "kernel", "type", "rows × columns"]
    return f"{among}{bars}{table('Where the rows and columns of each table are', columns, rows)}"


def _ids(run: Record) -> str:
    rows = []
    for name, report in run.ids.items():
        shares = [report.get(key) for key in ("occupancy", "collision_rate", "out_of_vocabulary_share")]
        about = "" if report.get("exact", True) else "≈ "
        rows.append(
            [
                name,
                *(number(report.get(key)) for key in ("ids", "nulls")),
                about + number(report.get("distinct_ids")),
                number(report.get("rows")),
                *(meter(share, "–" if share is None else f"{share:.2%}") for share in shares),
            ]
        )
    columns = ["feature", "ids", "nulls", "distinct", "table rows", "occupied", "colliding", "out of vocabulary"]
    experts = [
        [expert, number(use["lookups"]), meter(use["share"], f"{use['share']:.2%}")]
        for uses in run.result.get("data", {}).get("experts", {}).values()
        for expert, use in uses.items()
    ]
    use = table("Use of experts", ["expert", "ids looked up", "share of its table's"], experts) if experts else ""
    return table("Ids that training has seen, by feature", columns, rows) + _ids_over_time(run) + use


def _ids_over_time(run: Record) -> str:
    """Draw the number of distinct ids and the share of colliding ids of features over the evaluations."""
    last = float(run.step)
    most = sorted(run.ids, key=lambda name: run.ids[name]["distinct_ids"], reverse=True)[:NUM_COLOURS]
    shown = {"distinct_ids": Axis("Distinct ids", "so far", least=0)}
    shown["collision_rate"] = Axis("Colliding ids", "share so far", show=lambda value: f"{value:.1%}", least=0)
    drawn = []
    for figure, axis in shown.items():
        curves = {name: run.curves(IDS + name).get(figure, []) for name in most}
        ends = {name: [(last, run.ids[name][figure])] if run.result else [] for name in most}
        if any(curves.values()):
            drawn.append(line_chart(axis, {name: [*curves[name], *ends[name]] for name in most}))
    return charts(*drawn)


def _checkpoints(run: Record) -> str:
    best = run.result.get("best_step")
    rows = []
    for name, at, num_bytes in run.checkpoints:
        step = int(name.removeprefix("step-"))
        rows.append([f"{step:,}" + (" (best)" if step == best else ""), _clock(at), size(num_bytes)])
    return table("Kept in checkpoints/", ["step", "saved", "size"], rows)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _warnings(run: Record) -> str:
    rows = [[at or "at the end", level.lower(), text[:4000]] for at, level, text in run.log[-_MOST_WARNINGS:]]
    last = f", the last {_MOST_WARNINGS}" if len(run.log) > _MOST_WARNINGS else ""
    return table(f"Warnings and errors of all ranks{last}", ["time", "kind", "what"], rows) or "<p>None.</p>"


def _setting(run: Record) -> str:
    identity = run.memory[0]["identity"] if run.memory else {}
    facts = {"git commit": run.result.get("git_commit") or identity.get("git_commit")}
    facts |= run.result.get("versions") or identity.get("versions", {})
    facts |= {key: identity.get(key) for key in ("host", "seed", "config_hash", "plan_hash")}
    rows = [[name.replace("_", " "), str(value)] for name, value in facts.items() if value is not None]
    config = folded(f"config.yaml, {len(run.config_text.splitlines()):,} lines", run.config_text)
    return table("Versions and identity", ["what", "which"], rows) + config
