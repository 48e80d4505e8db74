"""Cost of checkpoints for training, in the foreground and the background; see `benchmark.py checkpoints --help`."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import benchmark_training

from recsys.config import load_config
from recsys.data.inputs import Inputs, open_inputs
from recsys.errors import UserError
from recsys.memory import Timeline
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import open_world
from recsys.training.build import Built, build_model
from recsys.training.trainer import Trainer

# One checkpoint in the middle of a block, or none; every block also has one at its end.
KINDS = ("none", "foreground", "background")


def block(inputs: Inputs, built: Built, steps: int, kind: str) -> float:
    """Train a block from the first row on; return its seconds."""
    train = inputs.config.train
    train.checkpoint_every_steps = None if kind == "none" else steps * 2 // 3
    train.async_checkpoints = kind == "background"
    with tempfile.TemporaryDirectory() as folder:
        timeline = Timeline(inputs.world.device)
        trainer = Trainer(inputs, built, Path(folder), timeline)
        start = time.monotonic()
        stopped = trainer.fit()
        seconds = time.monotonic() - start
        timeline.close()
    if stopped or trainer.state.step != steps:  # a request to stop stays with the model, so it ends later blocks too
        raise UserError(f"a block ended at step {trainer.state.step} of {steps}, so nothing was measured; run it again")
    return seconds


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py checkpoints`."""
    data = benchmark_training.files(arguments.rows)
    steps = arguments.rows // 2048
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoints.yaml"
        path.write_text(benchmark_training.config_text(data))
        config = load_config(path, [f"train.max_steps={steps}", *arguments.overrides])
    with open_world(config.run.device, config.run.num_threads) as world:
        inputs = open_inputs(config, world)
        built = build_model(inputs)
        block(inputs, built, steps, "none")  # the first block is slower
        for repeat in range(arguments.repeats):
            for kind in KINDS:  # in turn, so that other work of the machine affects all kinds alike
                seconds[kind].append(block(inputs, built, steps, kind))
            print(
                f"repeat {repeat + 1}: { {kind: round(found[-1], 2) for kind, found in seconds.items()} }", flush=True
            )
        num_bytes = sum(local.num_bytes for local in built.tensors.to_load().values())
        del built, inputs
    costs = {
        kind: statistics.median(a - b for a, b in zip(seconds[kind], seconds["none"], strict=True))
        for kind in ("foreground", "background")
    }
    return {
        "rows": arguments.rows,
        "tensor_bytes": num_bytes,
        "seconds_of_a_block": seconds,
        "seconds_of_a_checkpoint": costs,
        "share_at_one_a_minute": {kind: cost / 60 for kind, cost in costs.items()},
        "versions": installed_versions(),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py checkpoints`."""
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--rows", type=int, default=1_048_576, help="of a block")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file to write")
