"""Memory by kind: predicted from the plan, measured at the end, one JSON a rank and one page for people."""

import json
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import torch

from recsys.memory.page import mib, row
from recsys.memory.tensors import Bytes
from recsys.process_group import World

SCHEMA_VERSION = 1


def process_memory(device: torch.device) -> dict[str, int | None]:
    """Return this process's resident memory and its peak, Arrow's peak, and the peaks of the GPU if there is one."""
    on_gpu = device.type == "cuda"
    rss = psutil.Process().memory_info().rss
    return {
        "rss_bytes": rss,
        "peak_rss_bytes": max(peak_rss(), rss),  # the kernel batches its counters, and the peak may lag behind
        "arrow_peak_bytes": pa.default_memory_pool().max_memory(),
        "device_peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "device_peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
    }


def peak_rss() -> int:
    """Return the peak of this process's resident memory, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        # Elsewhere than on Linux, where this would count what a launcher took before it became this program.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write_report(
    folder: Path, world: World, tables: dict[str, Any], dense: dict[str, Any], loader: Bytes
) -> tuple[dict[str, Any], str]:
    """Write rank_K.json on every rank and report.md on rank 0.

    Args:
        folder: RUN/memory.
        tables: "predicted" and "measured" bytes by table; dense: the same by kind.
        loader: host memory of the loader by kind, measured.

    Returns:
        What this rank wrote, and the page over all ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "schema_version": SCHEMA_VERSION,
        "rank": world.rank,
        "world_size": world.world_size,
        "host": socket.gethostname(),
        "device": str(world.device),
        "tables": tables,
        "dense": dense,
        "loader": loader,
        "process": process_memory(world.device),
        "totals": {
            when: {
                "table_weight_bytes": sum(entry["weight_bytes"] for entry in tables[when].values()),
                "table_optimizer_bytes": sum(entry["optimizer_bytes"] for entry in tables[when].values()),
                **{f"dense_{kind}": value for kind, value in dense[when].items()},
            }
            for when in ("predicted", "measured")
        },
    }
    (folder / f"rank_{world.rank}.json").write_text(json.dumps(report, indent=1) + "\n")
    reports = world.gather(report)
    page = format_report(reports)
    if world.rank == 0:
        (folder / "report.md").write_text(page)
    return report, page


def format_report(reports: list[dict[str, Any]]) -> str:
    """Return the page for people over the reports of all ranks, as Markdown."""
    lines = ["# Memory by rank (MiB)", ""]
    heads = [f"rank {report['rank']}" for report in reports]
    lines += [row("measured (predicted)", *heads), row("---", *["---:"] * len(heads))]
    for kind in reports[0]["totals"]["measured"]:
        cells = [_pair(r["totals"]["measured"][kind], r["totals"]["predicted"][kind]) for r in reports]
        lines.append(row(kind.removesuffix("_bytes").replace("_", " "), *cells))
    for section, prefix in (("loader", "loader "), ("process", "")):
        for kind in reports[0][section]:
            if any(r[section][kind] is not None for r in reports):
                cells = [mib(r[section][kind]) for r in reports]
                lines.append(row(prefix + kind.removesuffix("_bytes").replace("_", " "), *cells))
    lines += ["", "## Tables: weights + optimizer state, measured", ""]
    lines += [row("table", *heads), row("---", *["---:"] * len(heads))]
    for name in sorted({name for r in reports for name in r["tables"]["measured"]}):
        lines.append(row(name, *[_table_cell(r["tables"]["measured"].get(name)) for r in reports]))
    return "\n".join(lines) + "\n"


def _table_cell(entry: Bytes | None) -> str:
    return "–" if entry is None else f"{mib(entry['weight_bytes'])} + {mib(entry['optimizer_bytes'])}"


def _pair(measured: int, predicted: int) -> str:
    return f"{mib(measured)} ({mib(predicted)})"
