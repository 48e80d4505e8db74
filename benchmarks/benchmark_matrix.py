"""Whether every type × optimizer × kernel of tables trains, and skips bad steps; see `benchmark.py matrix --help`."""

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from launcher import write

from recsys.config import ComputeKernel, Device, load_config
from recsys.config.choices import DataType
from recsys.config.device import check_device
from recsys.config.table_optimizers import TableOptimizer
from recsys.data.batch import Batch
from recsys.data.inputs import open_inputs
from recsys.errors import UserError
from recsys.runtime.logs import quiet_libraries
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import World, open_world
from recsys.step.pipeline import TimedIterator, build_pipeline
from recsys.tables.updates import table_tensors
from recsys.training.build import Built, build_model

CONFIG = "configs/dlrm_sample.yaml"
NUM_STEPS, BATCH_SIZE = 8, 256
# In addition to the product of the three: other settings with which a step works differently on GPUs.
OTHERS = {
    "decay": ["optimizer.tables.weight_decay=0.01"],
    "state in BF16": ["optimizer.tables.name=partial_rowwise_adam", "optimizer.tables.state_dtype=BF16"],
    "stochastic rounding": ["tables.user.data_type=FP16", "tables.user.stochastic_rounding=true"],
    "BF16 autocast": ["precision.autocast=bf16"],
    "FP16 autocast": ["precision.autocast=fp16"],
    "BF16 vectors": ["precision.output_dtype=BF16"],
    "FP16 vectors": ["precision.output_dtype=FP16"],
    "TF32": ["precision.tf32=true"],
    "attention": ["model.attention={history: item_id}"],
    "dropout": ["model.dropout=0.1"],
    "micro-batches": ["train.micro_batch_size=64", "train.activation_checkpointing=true"],
    "offload": ["train.activation_offload=true"],
    "clipped": ["optimizer.dense.clip_norm=1"],
    "quantised": ["tables.user.quantize=INT8"],
    "unread": ["train.check_every_step=false"],
    "compiled": ["train.compile=true"],
    **{f"dense {name}": [f"optimizer.dense.name={name}"] for name in ("sgd", "adamw", "adagrad", "adafactor")},
}


def cases() -> dict[str, list[str]]:
    """Return the overrides of each case by its name, the plain ones first."""
    overrides = {}
    for kernel, dtype, optimizer in product(ComputeKernel, DataType, TableOptimizer):
        if optimizer.value.path is None and kernel is not ComputeKernel.fused:
            continue  # configs refuse this
        tables = ("user", "item", "category")
        options = [f"tables.{table}.compute_kernel={kernel.name}" for table in tables]
        options += [f"tables.{table}.data_type={dtype.name}" for table in tables]
        options += [f"tables.{table}.init_range=0.1" for table in tables if dtype is DataType.FP8]
        overrides[f"{dtype.name} {optimizer.name} {kernel.name}"] = [
            *options,
            f"optimizer.tables.name={optimizer.name}",
        ]
    return {**dict(list(overrides.items())[:1]), **OTHERS, **overrides}


def measure(overrides: list[str], world: World) -> dict[str, Any]:
    """Train some steps and a bad one; return the losses, what the bad step changed, and where the host waited."""
    config = load_config(CONFIG, [f"train.global_batch_size={BATCH_SIZE}", "train.max_bad_steps=9", *overrides])
    try:
        instead = check_device(config, world.device.type == "cuda")
    except UserError as error:
        return {"refused": str(error)}
    torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")
    inputs = open_inputs(config, world)
    built = build_model(inputs)
    with closing(inputs.loader("train").batches()) as batches:
        held = list(islice(batches, NUM_STEPS))
    bad = replace(held[0].to(torch.device("cpu")), content=None)
    bad.floats = torch.full_like(bad.floats, torch.nan)
    losses = _train(built, held[:-4], world, 0)
    with _host_waits(world.device) as waits:
        losses += _train(built, held[-4:], world, len(losses))
    before = _state(built)
    _train(built, [bad], world, len(losses))
    after = _state(built)
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    return {"losses": losses, "instead": instead, "changed_by_a_bad_step": changed, "host_waits": dict(waits)}


def _train(built: Built, batches: list[Batch], world: World, first: int) -> list[float]:
    pipeline, outputs = build_pipeline(built.model, built.dense_optimizer, world.device, debug=False), []
    timed = TimedIterator(iter(batches))
    for number in range(first, first + len(batches)):
        built.table_updates.begin(1.0, partial(_of_all, number))
        outputs.append(pipeline.progress(timed))
    pipeline.detach()
    for output in outputs:
        output.read()
    return [output.loss for output in outputs]


def _of_all(num_updates: int, _: str) -> int:
    return num_updates


def _state(built: Built) -> dict[str, torch.Tensor]:
    """Return copies of everything that training changes, as bytes on the host, by name."""
    tensors = dict(built.dense_model.state_dict())
    for number, state in enumerate(built.dense_optimizer.state.values()):
        tensors |= {f"optimizer {number} {name}": value for name, value in state.items() if torch.is_tensor(value)}
    for name, table in {**table_tensors(built.model), **built.table_updates.state()}.items():
        shards = table.local_shards() if hasattr(table, "local_shards") else []
        tensors |= {f"{name} {i}": shard.tensor for i, shard in enumerate(shards)} or {name: table}
    return {
        name: value.detach().cpu().contiguous().view(-1).view(torch.uint8).clone() for name, value in tensors.items()
    }


@contextmanager
def _host_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Count by file and line where the host waits for a GPU, except for waits for events."""
    places: Counter[str] = Counter()
    if device.type != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places.update(f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroni" in str(each.message))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py matrix`; if a case fails, its error is its result, and the others continue.

    Cases that are in the output file are not measured again, so that this can restart itself if a GPU only returns
    errors after one.
    """
    quiet_libraries()
    results: dict[str, Any] = {}
    if arguments.out is not None and arguments.out.exists():
        results = json.loads(arguments.out.read_text())["cases"]
    chosen = list(cases().items())[: arguments.most]
    result: dict[str, Any] = {"cases": results}
    with open_world(arguments.device, 1) as world:
        for name, overrides in [each for each in chosen if each[0] not in results]:
            try:
                results[name] = measure([*overrides, *arguments.overrides], world)
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            shown = {key: value for key, value in results[name].items() if key != "losses" and value}
            print(f"{name}: {shown or results[name].get('losses', [])[-1:]}", flush=True)
            result = {"cases": results, "device": str(world.device), "versions": installed_versions()}
            write(arguments.out, result)
            if arguments.out is not None and "error" in results[name] and not _answers(world.device):
                os.execv(sys.executable, [sys.executable, *sys.argv])
    return result


def _answers(device: torch.device) -> bool:
    """Return whether a device still computes; after some errors, the GPU of a process does not."""
    try:
        return bool(torch.ones(1, device=device).item())
    except RuntimeError:
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py matrix`."""
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.auto)
    parser.add_argument("--most", type=int, help="stop after so many")
    parser.add_argument("--out", type=Path, help="JSON file to write")
