"""Memory reports of a run: rank_K.json of every rank, report.md and report.html over all of them.

docs/memory.md tells the meaning of each field.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from recsys.config import Config
from recsys.memory.facts import RankMemory
from recsys.memory.growth import describe_growth
from recsys.memory.measure import Timeline, allocator, process_memory
from recsys.memory.page import Cell, kind_rows, listed, rank_table, size, when
from recsys.memory.svg import html_page
from recsys.memory.tensors import Bytes
from recsys.runtime.files import replace_file
from recsys.runtime.machine import Topology, cgroup_limit
from recsys.tables.spec import Shard

SCHEMA_VERSION = 2
_APART = 0.05  # ranks that differ by less are shown as one: what is measured differs from time to time
_COMMUNICATION = ("collective_ids", "lookup_ids", "looked_up", "looked_up_gradient", "pooled", "pooled_gradient")


def table_entries(
    config: Config, shards: Iterable[Shard], rank: int, predicted: dict[str, Bytes], measured: dict[str, Bytes]
) -> list[dict[str, Any]]:
    """Return the report's entry of each table with a shard on `rank`."""
    entries = []
    own = [shard for shard in shards if shard.rank == rank]
    for name in dict.fromkeys(shard.table for shard in own):
        mine = [shard for shard in own if shard.table == name]
        entries.append(
            {
                "name": name,
                "pieces": [{"offset": list(p.offset), "rows": p.size[0], "columns": p.size[1]} for p in mine],
                "data_type": config.tables[name].data_type.name,
                "optimizer": config.table_optimizer(name).name.name,
                "sharding_type": mine[0].sharding_type,
                "compute_kernel": mine[0].compute_kernel,
                "predicted": predicted[name],
                "measured": measured.get(name),
            }
        )
    return entries


def rank_report(
    identity: dict[str, Any],
    tables: list[dict[str, Any]],
    dense: dict[str, Bytes],
    loader: Bytes,
    prediction: RankMemory,
    topology: Topology,
    device: torch.device,
    timeline: Timeline,
) -> dict[str, Any]:
    """Return the content of rank_K.json.

    Args:
        identity: of run and rank. tables: as `table_entries` gives. dense: "predicted" and "measured" bytes by kind.
        loader: host memory of the loader by kind, measured.
    """
    process, highest = process_memory(device, timeline), timeline.peak()
    phases = _phases(prediction, timeline, device)
    on_gpu = topology.on_gpu
    where = "device" if on_gpu else "host"
    at_peak = prediction.phases[prediction.peak(where)[1]][where]
    predicted = max(peak["predicted_bytes"] or 0 for peak in phases.values())
    measured = max(peak["measured_bytes"] or 0 for peak in phases.values())
    limit = topology.device_bytes if topology.on_gpu else topology.host_share_bytes
    used = process["device_peak_allocated_bytes"] if topology.on_gpu else process["peak_rss_bytes"]
    return {
        "schema_version": SCHEMA_VERSION,
        "identity": identity,
        "tables": tables,
        "dense": dense,
        "lines": _lines(tables, dense),
        "phases": phases,
        "peak": {
            "phase": max(timeline.device_peaks, key=timeline.device_peaks.__getitem__) if on_gpu else highest.phase,
            "step": highest.step,
            "measured_bytes": measured,
            "predicted_bytes": predicted,
            "predicted_phase": prediction.peak(where)[1],
            "unexplained_bytes": measured - predicted,
            "error": _error(predicted, measured),
            "by_kind_predicted": {kind: size for kind, size in at_peak.items() if kind != "process"},
        },
        "activations": {"predicted_bytes": at_peak.get("activations", 0)},
        "communication": {kind: at_peak[kind] for kind in _COMMUNICATION if kind in at_peak},
        "allocator": allocator(device),
        "loader": loader,
        "host": {
            **process,
            "baseline_bytes": timeline.baseline_bytes,
            "cgroup_limit_bytes": cgroup_limit(),
            "pinned_asked_bytes": loader.get("batch_bytes", 0) if topology.on_gpu else 0,
            "locked_limit_bytes": topology.locked_bytes,
        },
        "headroom": {"limit_bytes": limit, "used_bytes": used, "free_bytes": limit - used},
        "timeline": {
            "samples": [[seconds, size] for seconds, size in timeline.samples],
            "spans": [asdict(span) for span in timeline.spans],
        },
    }


def _phases(prediction: RankMemory, timeline: Timeline, device: torch.device) -> dict[str, dict[str, Any]]:
    """Return predicted and measured peak of each phase: of a GPU's allocator, or of this process above its baseline."""
    where, left_out = ("device", ("context", "allocator_reserve")) if device.type == "cuda" else ("host", ("process",))
    peaks = timeline.peaks()
    measured = timeline.device_peaks if device.type == "cuda" else peaks
    base = 0 if device.type == "cuda" else timeline.baseline_bytes
    peaks_by_phase: dict[str, dict[str, Any]] = {}
    for phase in dict.fromkeys([*prediction.phases, *measured]):
        kinds = prediction.phases.get(phase)
        predicted = None if kinds is None else sum(v for kind, v in kinds[where].items() if kind not in left_out)
        seen = measured[phase] - base if phase in measured else None
        peaks_by_phase[phase] = {"predicted_bytes": predicted, "measured_bytes": seen, "error": _error(predicted, seen)}
    return peaks_by_phase


def _error(predicted: int | None, measured: int | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


def _lines(tables: list[dict[str, Any]], dense: dict[str, Bytes]) -> list[dict[str, Any]]:
    """Return predicted, measured and error of each kind of tensor."""
    sums: dict[str, dict[str, int]] = {}
    for kind in ("weight_bytes", "optimizer_bytes"):
        sums[f"table_{kind}"] = {
            when: sum((entry[when] or {}).get(kind, 0) for entry in tables) for when in ("predicted", "measured")
        }
    for kind in dense["predicted"]:
        sums[f"dense_{kind}"] = {when: dense[when][kind] for when in ("predicted", "measured")}
    return [
        {
            "kind": kind.removesuffix("_bytes"),
            "predicted_bytes": both["predicted"],
            "measured_bytes": both["measured"],
            "error": _error(both["predicted"], both["measured"]),
        }
        for kind, both in sums.items()
    ]


def write_rank(folder: Path, report: dict[str, Any]) -> None:
    """Write rank_K.json."""
    folder.mkdir(exist_ok=True)
    replace_file(folder / f"rank_{report['identity']['rank']}.json", json.dumps(report, indent=1) + "\n")


def write_pages(folder: Path, layers: str) -> None:
    """Write report.md and report.html from the rank_K.json files of a folder.

    Args:
        layers: the layers' table as Markdown.
    """
    reports = [json.loads(path.read_text()) for path in folder.glob("rank_*.json")]
    reports.sort(key=lambda report: report["identity"]["rank"])
    replace_file(folder / "report.md", format_report(reports, layers))
    replace_file(folder / "report.html", html_page(reports))


def format_report(reports: list[dict[str, Any]], layers: str = "") -> str:
    """Return report.md from the reports of all ranks."""
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
    lines += ["", *_table("measured (predicted)", rows)]
    rows = kind_rows([r["peak"]["by_kind_predicted"] for r in reports])
    lines += ["", "## Predicted at the peak, by kind", "", *_table("kind", rows)]
    entries = {entry["name"]: entry for r in reports for entry in r["tables"]}
    rows = {_describe(entry): [_table_cell(r["tables"], name) for r in reports] for name, entry in entries.items()}
    lines += ["", "## Tables: weights (optimizer state), measured", "", *_table("table", rows)]
    return "\n".join([*lines, "", layers]).rstrip() + "\n"


def _table(corner: str, rows: dict[str, list[Cell]]) -> list[str]:
    return rank_table(corner, rows, _APART)


def _summary(reports: list[dict[str, Any]]) -> list[str]:
    fullest = max(reports, key=lambda report: report["peak"]["measured_bytes"])
    peak, rank, headroom = fullest["peak"], fullest["identity"]["rank"], fullest["headroom"]
    on_gpu = fullest["identity"]["device"].startswith("cuda")
    sentences = [
        f"Peak: {size(peak['measured_bytes'])} on rank {rank} ({when(peak)}), "
        f"{size(peak['predicted_bytes'])} predicted; {_OF_GPU if on_gpu else _OF_PROCESS}",
        f"Of {size(headroom['limit_bytes'])} {size(headroom['free_bytes'])} were never used on that rank",
        f"Imbalance (largest rank over the mean): {_imbalance(reports)}",
    ]
    growths = [report["growth"] for report in reports if report["growth"]]
    if growths:
        most = max(growths, key=lambda growth: growth["bytes_per_1000_steps"]["process"])
        steps = f"from step {most['first_step']:,} to {most['last_step']:,}"
        sentences.append(f"Growth {steps}, of the rank that grew most: {describe_growth(most['bytes_per_1000_steps'])}")
    idle = [report["identity"]["rank"] for report in reports if not report["tables"]]
    return [*sentences, f"No table is on {listed(idle)}"] if idle else sentences


_OF_PROCESS = (
    "peaks are of the process above its baseline, which is what it took after imports and the start of its group"
)
_OF_GPU = "peaks are of what torch's allocator gave out on the GPU"


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
    entry = next((table for table in tables if table["name"] == name), None)
    if entry is None:
        return "–"
    measured = entry["measured"] or {"weight_bytes": None, "optimizer_bytes": None}
    return measured["weight_bytes"], measured["optimizer_bytes"]


def _pair(line: dict[str, Any]) -> Cell:
    return line.get("measured_bytes"), line.get("predicted_bytes")
