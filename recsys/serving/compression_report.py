"""Reports of a compression: its stages as Markdown, JSON and a drawing."""

from dataclasses import asdict, dataclass
from pathlib import Path

from recsys.report.drawing import draw_bars
from recsys.runtime.files import replace_file
from recsys.runtime.logs import to_json
from recsys.runtime.versions import installed_versions
from recsys.serving.trials import Trial, Trials


@dataclass(frozen=True)
class Stage:
    """A step of a compression: its name, a remark on what was accepted, and the trial of the run after it."""

    name: str
    remark: str
    trial: Trial


def write_report(stages: list[Stage], trials: Trials, max_loss: str, allowed: float, out: Path) -> None:
    """Write compression.json, .md and .svg.

    Args:
        max_loss: as written by the user. allowed: the same as a number, in units of the metric.
    """
    content = {
        "run": str(trials.source.path),
        "metric": trials.metric,
        "data": trials.role,
        "max_loss": max_loss,
        "allowed_loss": allowed,
        "stages": [{"name": s.name, "accepted": s.remark, **asdict(s.trial)} for s in stages],
        "versions": installed_versions(),
    }
    replace_file(out / "compression.json", to_json(content, indent=1) + "\n")
    replace_file(out / "compression.md", as_markdown(stages, trials.metric, trials.role))
    replace_file(out / "compression.svg", as_svg(stages, trials.metric))


def as_markdown(stages: list[Stage], metric: str, role: str) -> str:
    """Return a table with a row for each stage; bytes of tables count rows whose ids are in data.train.

    A second column counts all rows; its bytes fall when rows of ids that were never seen are pruned.
    """
    first, has_test = stages[0].trial, stages[0].trial.test is not None
    header = ["Stage", "What was accepted", "Tables, bytes", "Less", "All rows, bytes", "Dense part, bytes"]
    header += [f"{metric}, {role}", "Lost, at most", "Scoring, s", *([f"{metric}, test"] if has_test else [])]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * 2}{'---:|' * (len(header) - 2)}"]
    for stage in stages:
        trial = stage.trial
        cells = [
            *(stage.name, stage.remark, f"{trial.seen_bytes:,}", f"{first.seen_bytes / max(1, trial.seen_bytes):.1f}×"),
            *(f"{trial.all_bytes:,}", f"{trial.dense_bytes:,}"),
            *(f"{trial.metrics[metric]:.5f}", f"{trial.loss.value:.5f}, {trial.loss.at_most:.5f}"),
            f"{trial.seconds:.2f}",
        ]
        cells += [f"{trial.test[metric]:.5f}"] if trial.test is not None else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def as_svg(stages: list[Stage], metric: str) -> str:
    """Return a bar for the bytes of the tables after each stage, with the metric next to it."""
    trials, names = [stage.trial for stage in stages], [stage.name for stage in stages]
    lengths = [trial.seen_bytes / max(1, *(other.seen_bytes for other in trials)) for trial in trials]
    labels = [f"{trial.seen_bytes:,} bytes, {metric} {trial.metrics[metric]:.4f}" for trial in trials]
    return draw_bars(list(zip(names, lengths, labels, strict=True)), left=140, width=760)
