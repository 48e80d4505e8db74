"""Memory reports of a run: rank_K.json of every rank, and report.md over all of them.

docs/memory.md explains each field.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recsys.memory.facts import RankMemory
from recsys.memory.growth import describe_growth
from recsys.memory.measure import Timeline, allocator, process_memory
from recsys.memory.page import Cell, kind_rows, rank_table, when
from recsys.memory.tensors import Bytes
from recsys.report.text import listed, size
from recsys.runtime.cgroups import cgroup_bytes
from recsys.runtime.files import replace_file
from recsys.runtime.machine import Topology

SCHEMA_VERSION = 2
DRY_RUN_PAGE, DRY_RUN_JSON = "dry_run.md", "dry_run.json"  # in the folder of the reports of runs
_APART = 0.05  # ranks that differ by less are shown as one, since measurements vary
# Kinds that measured peaks exclude: outside a GPU's allocator, in other processes, or there before the baseline.
_UNMEASURED = ("context", "allocator_reserve", "process", "loader_processes")
_COMMUNICATION = ("collective_ids", "lookup_ids", "looked_up", "looked_up_gradient", "pooled", "pooled_gradient")


def rank_report(prediction: RankMemory, topology: Topology, timeline: Timeline, loader: Bytes) -> dict[str, Any]:
    """Return the part of rank_K.json on a process: its peaks, measured and predicted, and what it holds now.

    Args:
        loader: measured host memory of the loader, by kind.
    """
    process, highest = process_memory(topology.device, timeline), timeline.peak()
    on_gpu = topology.on_gpu
    where = "device" if on_gpu else "host"
    phases = _phases(prediction, timeline, where)
    predicted, predicted_phase = max((phases[phase]["predicted_bytes"], phase) for phase in prediction.phases)
    at_peak = prediction.phases[predicted_phase][where]
    measured = max(peak["measured_bytes"] or 0 for peak in phases.values())
    limit = topology.device_bytes if on_gpu else topology.host_share_bytes
    used = process["device_peak_allocated_bytes"] if on_gpu else process["peak_rss_bytes"]
    return {
        "phases": phases,
        "peak": {
            "phase": max(timeline.device_peaks, key=timeline.device_peaks.__getitem__) if on_gpu else highest.phase,
            "step": highest.step,
            "measured_bytes": measured,
            "predicted_bytes": predicted,
            "predicted_phase": predicted_phase,
            "unexplained_bytes": measured - predicted,
            "error": _error(predicted, measured),
            "by_kind_predicted": {kind: size for kind, size in at_peak.items() if kind not in _UNMEASURED},
            "beside_predicted": {kind: at_peak[kind] for kind in _UNMEASURED if kind in at_peak and kind != "process"},
        },
        "activations": {"predicted_bytes": at_peak.get("activations", 0)},
        "communication": {kind: at_peak[kind] for kind in _COMMUNICATION if kind in at_peak},
        "allocator": allocator(topology.device),
        "host": process
        | {
            "baseline_bytes": timeline.baseline_bytes,
            "cgroup_limit_bytes": cgroup_bytes(),
            "pinned_asked_bytes": loader.get("batch_bytes", 0) if on_gpu else 0,
            "locked_limit_bytes": topology.locked_bytes,
        },
        "headroom": {"limit_bytes": limit, "used_bytes": used, "free_bytes": limit - used},
        "timeline": {"samples": timeline.samples, "spans": [asdict(span) for span in timeline.spans]},
    }


def _phases(prediction: RankMemory, timeline: Timeline, where: str) -> dict[str, dict[str, Any]]:
    """Return predicted and measured peak of each phase: of a GPU's allocator, or of this process above its baseline."""
    base = timeline.baseline_bytes
    measured = timeline.device_peaks
    if where == "host":
        measured = {phase: peak - base for phase, peak in timeline.peaks().items()}
    peaks: dict[str, dict[str, Any]] = {}
    for phase in dict.fromkeys([*prediction.phases, *measured]):
        kinds = prediction.phases.get(phase)
        predicted = None if kinds is None else sum(v for kind, v in kinds[where].items() if kind not in _UNMEASURED)
        peaks[phase] = _compared(predicted, measured.get(phase))
    return peaks


def _compared(predicted: int | None, measured: int | None) -> dict[str, Any]:
    return {"predicted_bytes": predicted, "measured_bytes": measured, "error": _error(predicted, measured)}


def _error(predicted: int | None, measured: int | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


def tensor_lines(tables: list[dict[str, Any]], dense: dict[str, Bytes]) -> list[dict[str, Any]]:
    """Return predicted, measured and error of each kind of tensor.

    Args:
        tables: result of `table_entries`. dense: "predicted" and "measured" bytes by kind.
    """
    sums: dict[str, list[int]] = {}
    for kind in ("weight", "optimizer"):
        sums[f"table_{kind}"] = [sum(x[when][f"{kind}_bytes"] for x in tables) for when in ("predicted", "measured")]
    for kind in dense["predicted"]:
        sums[f"dense_{kind.removesuffix('_bytes')}"] = [dense[when][kind] for when in ("predicted", "measured")]
    return [{"kind": kind, **_compared(*both)} for kind, both in sums.items()]


def write_rank(folder: Path, report: dict[str, Any]) -> None:
    """Write rank_K.json."""
    folder.mkdir(exist_ok=True)
    replace_file(folder / f"rank_{report['identity']['rank']}.json", json.dumps(report, indent=1) + "\n")


def write_page(folder: Path, layers: str) -> None:
    """Write report.md from the rank_K.json files of a folder.

    Args:
        layers: the layers' table as Markdown.
    """
    reports = [json.loads(path.read_text()) for path in folder.glob("rank_*.json")]
    reports.sort(key=lambda report: report["identity"]["rank"])
    replace_file(folder / "report.md", format_report(reports, layers))


def format_report(reports: list[dict[str, Any]], layers: str) -> str:
    """Return report.md from the reports of all ranks, and the layers' table."""
    identity = reports[0]["identity"]
    lines = [f"# Memory of {identity['name']}, {identity['status']} at step {identity['step']}", ""]
    lines += [f"- {sentence}" for sentence in _summary(reports)]
    rows: dict[str, list[Cell]] = {}
    for i, line in enumerate(reports[0]["lines"]):
        rows[line["kind"].replace("_", " ")] = [_pair(report["lines"][i]) for report in reports]
    for phase in reports[0]["phases"]:
        rows[f"peak in {phase}"] = [_pair(report["phases"].get(phase, {})) for report in reports]
    for section in ("loader", "host", "allocator"):
        rows |= _section(section, reports)
    lines += ["", *rank_table("measured (predicted)", rows, _APART)]
    rows = kind_rows([r["peak"]["by_kind_predicted"] | r["peak"]["beside_predicted"] for r in reports])
    lines += ["", "## Predicted at the peak, by kind", "", *rank_table("kind", rows, _APART)]
    entries = {entry["name"]: entry for r in reports for entry in r["tables"]}
    rows = {_describe(entry): [_table_cell(r["tables"], name) for r in reports] for name, entry in entries.items()}
    lines += ["", "## Tables: weights (optimizer state), measured", "", *rank_table("table", rows, _APART)]
    return "\n".join([*lines, "", layers]).rstrip() + "\n"


def _summary(reports: list[dict[str, Any]]) -> list[str]:
    fullest = max(reports, key=lambda report: report["peak"]["measured_bytes"])
    peak, rank, headroom = fullest["peak"], fullest["identity"]["rank"], fullest["headroom"]
    on_gpu = fullest["identity"]["device"].startswith("cuda")
    sentences = [
        f"Peak: {size(peak['measured_bytes'])} on rank {rank} ({when(peak)}), "
        f"{size(peak['predicted_bytes'])} predicted; {_OF_GPU if on_gpu else _OF_PROCESS}",
        f"Of {size(headroom['limit_bytes'])} {size(headroom['free_bytes'])} were never used on that rank",
        *_machines(reports),
        f"Imbalance (largest rank over the mean): {_imbalance(reports)}",
    ]
    growths = [report["growth"] for report in reports if report["growth"]]
    if growths:
        most = max(growths, key=lambda growth: growth["bytes_per_1000_steps"]["process"])
        steps = f"from step {most['first_step']:,} to {most['last_step']:,}"
        sentences.append(f"Growth {steps}, of the rank that grew most: {describe_growth(most['bytes_per_1000_steps'])}")
    idle = [report["identity"]["rank"] for report in reports if not report["tables"]]
    return [*sentences, f"No table is on {listed(idle)}"] if idle else sentences


def _machines(reports: list[dict[str, Any]]) -> list[str]:
    """Return a sentence on which ranks were on which machine, if these were several."""
    ranks: dict[str, list[int]] = {}
    for report in reports:
        ranks.setdefault(report["identity"]["host"], []).append(report["identity"]["rank"])
    return ["Machines: " + "; ".join(f"{listed(of)} on {host}" for host, of in ranks.items())] if len(ranks) > 1 else []


_OF_PROCESS = "peaks are of the process above its baseline, measured after imports and the start of its process group"
_OF_GPU = "peaks are of what torch's allocator had allocated on the GPU"


def _section(section: str, reports: list[dict[str, Any]]) -> dict[str, list[Cell]]:
    rows: dict[str, list[Cell]] = {}
    for kind in reports[0][section] or ():
        values = [report[section][kind] for report in reports]
        if kind.endswith("_bytes") and any(value is not None for value in values):
            rows[f"{section} {kind.removesuffix('_bytes').replace('_', ' ')}"] = [(value,) for value in values]
    return rows


def _imbalance(reports: list[dict[str, Any]]) -> str:
    shares = []
    for i, line in enumerate(reports[0]["lines"]):
        values = [report["lines"][i]["measured_bytes"] for report in reports]
        if sum(values):
            shares.append(f"{line['kind'].replace('_', ' ')} {max(values) * len(values) / sum(values):.2f}")
    return ", ".join(shares)


def _describe(entry: dict[str, Any]) -> str:
    return f"{entry['name']} ({entry['data_type']}, {entry['sharding_type']}, {entry['compute_kernel']})"


def _table_cell(tables: list[dict[str, Any]], name: str) -> Cell:
    measured = [table["measured"] for table in tables if table["name"] == name]
    return (measured[0]["weight_bytes"], measured[0]["optimizer_bytes"]) if measured else "–"


def _pair(line: dict[str, Any]) -> Cell:
    return line.get("measured_bytes"), line.get("predicted_bytes")
