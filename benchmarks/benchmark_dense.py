"""Memory and time of `train.dense_sharding` for widths of the dense part; see `benchmark.py dense --help`.

torchrun --nproc-per-node 2 benchmarks/benchmark.py dense --out benchmarks/dense.json
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from recsys.config import OptimizerConfig
from recsys.config.choices import Device
from recsys.memory import measure_dense
from recsys.models.base import mlp
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import World, open_world
from recsys.step.dense_shards import DenseShards
from recsys.step.optim import build_dense_optimizer

FEATURES = 256
FORMS = ("none", "optimizer")


class Replicated:
    """Two layers of a width on every rank, with Adam, whose state is sharded or not."""

    def __init__(self, width: int, form: str, world: World) -> None:
        torch.manual_seed(0)
        self.model = mlp(FEATURES, [width, width], 1, 0.0).to(world.device)
        ids = [world.device.index] if world.device.type == "cuda" else None
        self._replica = DistributedDataParallel(self.model, ids, gradient_as_bucket_view=True)
        self._shards = None if form == "none" else DenseShards(self.model, world.rank, world.world_size)
        self.slices = None if self._shards is None else self._shards.slices
        trained = self.model.parameters() if self.slices is None else self.slices
        self.optimizer = build_dense_optimizer(trained, OptimizerConfig())

    def step(self, rows: torch.Tensor) -> None:
        """Train on rows, [rows, FEATURES]."""
        self.model.zero_grad()
        self._replica(rows).square().mean().backward()
        if self._shards is None:
            self.optimizer.step()
        else:
            self._shards.step(self.optimizer)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py dense`: train both forms in turn; return bytes of a rank and median times of a step."""
    measured = {}
    with open_world(arguments.device, 1) as world:
        rows = torch.randn(arguments.rows, FEATURES, device=world.device)
        for width in arguments.widths:
            measured[str(width)] = _measure(
                {form: Replicated(width, form, world) for form in FORMS}, rows, arguments.steps
            )
            if world.rank == 0:
                print(f"two layers of {width}: {measured[str(width)]['ratio']}", flush=True)
        ranks, device = world.world_size, world.device.type
    settings = {"ranks": ranks, "device": device, "rows_of_a_rank": arguments.rows, "steps": arguments.steps}
    return {**settings, "widths": measured, "versions": installed_versions()}


def _measure(forms: dict[str, Replicated], rows: torch.Tensor, steps: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(steps + 2):
        for form, replicated in forms.items():
            start = time.monotonic()
            replicated.step(rows)
            if rows.is_cuda:
                torch.cuda.synchronize()
            seconds[form].append(time.monotonic() - start)
    figures = {
        form: {
            **measure_dense(replicated.model, replicated.optimizer, replicated.slices),
            "ms_a_step": 1e3 * statistics.median(seconds[form][2:]),  # the first two warm up
        }
        for form, replicated in forms.items()
    }
    ratios = [shared / plain for shared, plain in zip(seconds["optimizer"][2:], seconds["none"][2:], strict=True)]
    totals = {form: sum(size for key, size in each.items() if key.endswith("bytes")) for form, each in figures.items()}
    ratio = {"dense_bytes": totals["optimizer"] / totals["none"], "ms_a_step": statistics.median(ratios)}
    return {**figures, "ratio": {key: round(value, 4) for key, value in ratio.items()}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py dense`."""
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024, 2048], help="of both layers")
    parser.add_argument("--rows", type=int, default=512, help="of a rank, in a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", type=Device, default=Device.auto)
    parser.add_argument("--out", type=Path, help="JSON file to write")
