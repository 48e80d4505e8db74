"""Memory by kind: predicted from the plan, measured at the end, one JSON a rank and one page for people."""

import json
import resource
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import torch

from recsys.config import Config, DataType
from recsys.config.choices import DenseOptimizer, TableOptimizer
from recsys.config.schema import DenseOptimizerConfig
from recsys.process_group import World
from recsys.tables import Shard, local_pieces

SCHEMA_VERSION = 1
_WEIGHT_BYTES = {DataType.FP32: 4, DataType.FP16: 2, DataType.FP8: 1}
_STATE_BYTES = 4  # optimizer state is FP32

Bytes = dict[str, int]


def predict_tables(shards: Iterable[Shard], config: Config, rank: int) -> dict[str, Bytes]:
    """Return, for each table with a piece on `rank`, its weight_bytes and optimizer_bytes there."""
    predicted: dict[str, Bytes] = {}
    for shard in shards:
        if shard.rank != rank:
            continue
        rows, columns = shard.size
        elements = {
            TableOptimizer.sgd: 0,
            TableOptimizer.rowwise_adagrad: rows,
            TableOptimizer.adagrad: rows * columns,
            TableOptimizer.adam: 2 * rows * columns,
            TableOptimizer.lamb: 2 * rows * columns,
            TableOptimizer.partial_rowwise_adam: rows * columns + rows,
            TableOptimizer.partial_rowwise_lamb: rows * columns + rows,
            TableOptimizer.lars_sgd: rows * columns,
        }[config.table_optimizer(shard.table).name]
        entry = predicted.setdefault(shard.table, {"weight_bytes": 0, "optimizer_bytes": 0})
        entry["weight_bytes"] += rows * columns * _WEIGHT_BYTES[config.tables[shard.table].data_type]
        entry["optimizer_bytes"] += elements * _STATE_BYTES
    return predicted


def predict_dense(model: torch.nn.Module, config: Config) -> Bytes:
    """Return the bytes of the dense part from its parameters' shapes, before a step has been run."""
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    size = 4 * sum(shape.numel() for shape in shapes)
    state = sum(_dense_state_elements(shape, config.optimizer.dense) for shape in shapes)
    return {"parameter_bytes": size, "gradient_bytes": size, "optimizer_bytes": 4 * state}


def _dense_state_elements(shape: torch.Size, optimizer: DenseOptimizerConfig) -> int:
    """Return the FP32 numbers that an optimizer keeps for a parameter, counters and norms among them."""
    match optimizer.name:
        case DenseOptimizer.adam | DenseOptimizer.adamw:
            return 2 * shape.numel() + 1
        case DenseOptimizer.adagrad:
            return shape.numel() + 1
        case DenseOptimizer.lamb:
            return 2 * shape.numel() + 3
        case DenseOptimizer.adafactor:
            factors = shape.numel() // shape[-1] + shape.numel() // shape[-2] if len(shape) > 1 else shape.numel()
            return factors + 1
        case DenseOptimizer.sgd:
            return shape.numel() if optimizer.momentum else 0


def measure_tables(weights: dict[str, Any], states: dict[str, Any]) -> dict[str, Bytes]:
    """Return the same as `predict_tables` from the tensors that this rank holds.

    Args:
        weights: by table; states: by TABLE/STATE; ShardedTensors, or tensors that every rank holds.
    """
    measured: dict[str, Bytes] = {}
    for kind, tensors in (("weight_bytes", weights), ("optimizer_bytes", states)):
        for name, value in tensors.items():
            entry = measured.setdefault(name.split("/")[0], {"weight_bytes": 0, "optimizer_bytes": 0})
            entry[kind] += _num_bytes(tensor for tensor, _ in local_pieces(value))
    return measured


def measure_dense(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    """Return the bytes of the dense part as its tensors are."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    states = [value for entry in optimizer.state.values() for value in entry.values()]
    return {
        "parameter_bytes": _num_bytes(parameters),
        "gradient_bytes": _num_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer_bytes": _num_bytes(value for value in states if isinstance(value, torch.Tensor)),
    }


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
    lines += [_row("measured (predicted)", *heads), _row("---", *["---:"] * len(heads))]
    for kind in reports[0]["totals"]["measured"]:
        cells = [_pair(r["totals"]["measured"][kind], r["totals"]["predicted"][kind]) for r in reports]
        lines.append(_row(kind.removesuffix("_bytes").replace("_", " "), *cells))
    for section, prefix in (("loader", "loader "), ("process", "")):
        for kind in reports[0][section]:
            if any(r[section][kind] is not None for r in reports):
                cells = [_mib(r[section][kind]) for r in reports]
                lines.append(_row(prefix + kind.removesuffix("_bytes").replace("_", " "), *cells))
    lines += ["", "## Tables: weights + optimizer state, measured", ""]
    lines += [_row("table", *heads), _row("---", *["---:"] * len(heads))]
    for name in sorted({name for r in reports for name in r["tables"]["measured"]}):
        lines.append(_row(name, *[_table_cell(r["tables"]["measured"].get(name)) for r in reports]))
    return "\n".join(lines) + "\n"


def _table_cell(entry: Bytes | None) -> str:
    return "–" if entry is None else f"{_mib(entry['weight_bytes'])} + {_mib(entry['optimizer_bytes'])}"


def _pair(measured: int, predicted: int) -> str:
    return f"{_mib(measured)} ({_mib(predicted)})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _mib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**20:,.3f}"


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
