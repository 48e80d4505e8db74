"""Figures of a run besides its losses and metrics, for metrics.jsonl and the trackers."""

from typing import Any

import numpy as np
import torch

from recsys.checkpoint import TrainState
from recsys.config import Config
from recsys.data.inputs import Inputs
from recsys.data.loader import Loader
from recsys.memory.growth import memory_now
from recsys.report.record import IDS
from recsys.report.writers import Writer
from recsys.runtime.world import World
from recsys.tables.spec import local_shards
from recsys.training.build import Built
from recsys.training.evaluation import item_vectors

NORM_LIMITS = np.concatenate([[0.0], np.logspace(-8, 4, 97)])  # eight between each two powers of ten
_CHUNK_ROWS = 1 << 16


def step_figures(built: Built, config: Config, state: TrainState, factor: float, loader: Loader) -> dict[str, Any]:
    """Return learning rates, gradient norm, loss scale, this rank's memory, epoch and rows, after a step.

    Args:
        factor: factor of the learning rates in the schedule. loader: of data.train.
    """
    half, optimizer = built.step.dense, config.optimizer
    rates = {"dense": optimizer.dense.learning_rate * factor, "tables": optimizer.tables.learning_rate * factor}
    figures: dict[str, Any] = {"learning_rate": rates, "gradient_norm": half.gradient_norm()}
    if half.loss_scale.growth_steps is not None or half.loss_scale.value != 1:
        figures["loss_scale"] = half.loss_scale.value
    figures["memory"] = memory_now(half.sums.device, loader.host_bytes)
    return figures | {"epoch": state.position.epoch, "rows": state.position.num_rows}


def log_tables(writer: Writer, step: int, inputs: Inputs, built: Built, state: TrainState, num_steps: int) -> None:
    """Write row norms, if asked for, and `Inputs.id_report` of each id feature, at an evaluation; collective.

    Args:
        step: that was evaluated. num_steps: of the run; at its end `log_end` writes the report of ids.
    """
    if inputs.config.run.track.row_norms:
        log_row_norms(writer, step, built.tensors.tables(), inputs.world)
    if step == state.step < num_steps:
        for feature, figures in inputs.id_report(state.rows_read).items():
            writer.log(IDS + feature, {"step": step, **figures})


def log_row_norms(writer: Writer, step: int, tables: dict[str, Any], world: World) -> None:
    """Write a histogram of the norms of each table's rows, with bins between `NORM_LIMITS`; collective.

    In a table split by columns, these are norms of parts of rows. Norms beyond the last limit are in the last bin.
    """
    limits = torch.from_numpy(NORM_LIMITS).float()
    for name, weights in tables.items():
        counts = torch.zeros(len(NORM_LIMITS) - 1)
        if hasattr(weights, "local_shards") or world.rank == 0:
            for shard, _ in local_shards(weights):
                for rows in shard.detach().split(_CHUNK_ROWS):
                    lengths = rows.float().norm(dim=1).cpu()
                    bins = (torch.bucketize(lengths, limits, right=True) - 1).clamp(max=len(counts) - 1)
                    counts += torch.bincount(bins, minlength=len(counts))
        writer.histogram(f"row_norms/{name}", step, world.sum(counts).numpy(), NORM_LIMITS)


def log_end(writer: Writer, inputs: Inputs, built: Built, result: dict[str, Any], report: dict[str, Any]) -> None:
    """Write the last figures of a run: ids by feature, memory by kind, and vectors of items; collective.

    Args:
        result: content of result.json. report: on memory, of this rank.
    """
    step = result["steps"]
    for feature, figures in result["data"]["ids"].items():
        writer.last({"kind": IDS + feature, "step": step, **figures})
    peaks = {phase: peak["measured_bytes"] for phase, peak in report["phases"].items()}
    writer.last({"kind": "memory", "step": step, "peak": peaks})
    writer.last({"kind": "memory", "step": step, **{line["kind"]: line["measured_bytes"] for line in report["lines"]}})
    if inputs.config.run.track.item_vectors and inputs.corpus is not None and result["status"] == "done":
        built.model.eval()
        with torch.no_grad():
            vectors = item_vectors(inputs, built.model).whole().numpy()
        writer.vectors("items", step, vectors, inputs.corpus.to_pylist())
