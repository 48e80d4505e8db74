"""`recsys calibrate`: measured speeds of computation, lookups and exchanges on this kind of device."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys.config import Config, Device, as_value, load_config
from recsys.data.inputs import open_inputs
from recsys.errors import TerminatedError
from recsys.memory import Timeline
from recsys.memory.data_facts import data_facts
from recsys.memory.speeds import DATA_AMOUNTS, STEP_AMOUNTS, Speeds
from recsys.memory.step_time import Load, fit_amounts, step_load
from recsys.memory.trace import rehearse
from recsys.report.writers import Writer
from recsys.runtime.live import Task
from recsys.runtime.logs import quiet_libraries
from recsys.runtime.machine import device_name, topology_of
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import World, open_world
from recsys.training.build import build_model
from recsys.training.device_speeds import measure_operators
from recsys.training.trainer import Trainer

_TRAINED_S = 0.8  # seconds of a training, after the warm-up
_WARM_STEPS, _LINES = 12, 5  # steps between two lines of the warm-up; lines of the training that count
_ROWS_FILE = "part-0.parquet"
_ROWS, _NUM_IDS, _LENGTH, _MOST_IDS = 131_072, 16, 10, 1e6  # rows, columns of ids, mean ids of a list, distinct ids


def calibrate(out: Path, device: Device, num_threads: int | None) -> int:
    """Measure on all ranks at once, and write the file; return the exit status 0."""
    quiet_libraries()
    with open_world(device, num_threads) as world:
        speeds = measure(world, num_threads)
        if world.rank == 0:
            speeds.save(out)
            print(f"{out}: {speeds.ranks} × {speeds.device}; {_errors(speeds)}")
    return 0


def measure(world: World, num_threads: int | None = None) -> Speeds:
    """Return the speeds of the devices of all ranks while all compute."""
    speeds = Speeds(
        device=device_name(world.device),
        device_type=world.device.type,
        ranks=world.world_size,
        local_ranks=world.local_world_size,
        threads=torch.get_num_threads(),
        **measure_operators(world),
        data=dict.fromkeys(DATA_AMOUNTS, 0.0),
        step=dict.fromkeys(STEP_AMOUNTS, 0.0),
        fits=(),
        versions=installed_versions(),
    )
    return _fitted(speeds, world, num_threads)


def _references(data: Path) -> Iterator[Config]:
    """Yield configs that differ in the amounts of `DATA_AMOUNTS` and `STEP_AMOUNTS`."""
    for batch, num_ids, num_lists, dim, num_floats, layers, num_split in _REFERENCES:
        ids, lists = [f"id_{i}" for i in range(num_ids)], [f"list_{i}" for i in range(num_lists)]
        floats = [f"float_{i}" for i in range(num_floats)]
        named = [f"features.{name}={{table: {name}}}" for name in ids]
        named += [f"features.{name}={{table: {name}, max_length: {2 * _LENGTH}}}" for name in lists]
        named += [f"features.{name}={{type: float}}" for name in floats]
        named += [f"tables.{name}={{num_embeddings: 100000, embedding_dim: {dim}}}" for name in (*ids, *lists)]
        named += [f"tables.{name}.sharding_type=row_wise" for name in ids[:num_split]]
        named += [f"model.bottom_mlp={[layers[0]] if floats else []}", f"model.top_mlp={list(layers)}"]
        named += [f"train.global_batch_size={batch}", f"data.train={as_value(str(data / _ROWS_FILE))}"]
        yield load_config(data / "base.yaml", named)


# Rows of a rank, features of one id, of lists, their dimension, floats, layers, features whose table is split by rows.
_REFERENCES = (
    (256, 2, 0, 16, 0, (16,), 0),
    (256, 16, 0, 16, 0, (16,), 0),
    (128, 2, 0, 8, 0, (16,) * 10, 0),
    (2048, 8, 0, 16, 4, (64, 32), 0),
    (2048, 4, 0, 64, 0, (256, 128), 0),
    (1024, 2, 2, 32, 0, (64,), 0),
    (512, 0, 4, 16, 8, (128, 64), 0),
    (8192, 8, 0, 16, 4, (64, 32), 0),
    (8192, 2, 0, 8, 16, (16,), 0),
    (1024, 2, 0, 64, 0, (256,) * 5, 0),
    (4096, 16, 2, 8, 0, (32,), 0),
    (1024, 4, 1, 16, 0, (64,), 1),
    (512, 8, 0, 16, 0, (32,), 8),
    (2048, 8, 1, 16, 0, (32,), 4),
)


def _write_rows(folder: Path) -> None:
    """Write rows of ids, lists, floats and a label."""
    generator = np.random.default_rng(1)

    def ids(number: int) -> np.ndarray:
        # As often as 1 / id: most lookups of logs are of popular ids, whose rows are in a core's cache.
        return (_MOST_IDS ** generator.random(number)).astype(np.int64)

    columns: dict[str, Any] = {f"id_{i}": ids(_ROWS) for i in range(_NUM_IDS)}
    columns |= {f"float_{i}": generator.random(_ROWS, np.float32) for i in range(_NUM_IDS)}
    for i in range(4):
        ends = np.concatenate([[0], np.cumsum(generator.integers(1, 2 * _LENGTH, size=_ROWS))]).astype(np.int32)
        columns[f"list_{i}"] = pa.ListArray.from_arrays(ends, ids(ends[-1]))
    columns["label"] = generator.integers(2, size=_ROWS).astype(np.int8)
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / _ROWS_FILE, row_group_size=1 << 15)
    (folder / "base.yaml").write_text("data: {label_column: label}\nmodel: {name: dlrm}\ntrain: {epochs: 1000000}\n")


def _fitted(speeds: Speeds, world: World, num_threads: int | None) -> Speeds:
    """Return speeds with costs of data and steps, fitted to short trainings beyond their operators and exchanges."""
    loads: list[Load] = []
    measured: list[tuple[float, float]] = []
    with TemporaryDirectory() as scratch, Task("training", len(_REFERENCES), is_shown=world.rank == 0) as task:
        folder = Path(world.from_rank_zero(lambda: scratch))
        world.from_rank_zero(lambda: _write_rows(folder / "data"))
        for config in _references(folder / "data"):
            batch = config.train.global_batch_size * world.world_size
            run = replace(config.run, device=Device[world.device.type], num_threads=num_threads)
            config = replace(config, train=replace(config.train, global_batch_size=batch), run=run)
            load, times = _trained(config, world, folder)
            loads.append(load)
            measured.append(times)
            task.done += 1
        world.barrier()
    amounts, weights = [load.amounts for load in loads], [total for total, _ in measured]
    predicted = [sum(load.parts(speeds).values()) for load in loads]  # of operators and exchanges, before the fit
    unexplained = [total - waited - seconds for (total, waited), seconds in zip(measured, predicted, strict=True)]
    data = fit_amounts(amounts, DATA_AMOUNTS, [waited for _, waited in measured], weights)
    fitted = replace(speeds, data=data, step=fit_amounts(amounts, STEP_AMOUNTS, unexplained, weights))
    fits = [
        {"rows": load.amounts["row"], "measured_s": total, "fitted_s": sum(load.parts(fitted).values())}
        for load, total in zip(loads, weights, strict=True)
    ]
    return replace(fitted, fits=fits)


def _trained(config: Config, world: World, folder: Path) -> tuple[Load, tuple[float, float]]:
    """Return the load of a step, its seconds, and how many of them training waited for data; of rank 0."""
    inputs = open_inputs(config, world)
    built, topology = build_model(inputs), topology_of(config, world)
    data = data_facts(config, inputs, world.world_size)
    batch = config.train.global_batch_size
    dense = rehearse(config, data, batch // world.world_size, world.device)
    load = step_load(config, data, dense, topology, built.shards)
    timeline = Timeline(world.device)

    def train(steps: int, lines: int) -> "_Lines":
        config.train.max_steps, config.train.log_every_steps = steps * lines, steps
        run_dir = world.from_rank_zero(lambda: Path(mkdtemp(dir=folder)))
        trainer = Trainer(inputs, built, run_dir, timeline)
        trainer.writer = lines_writer = _Lines()
        if trainer.fit():  # by a signal, which was handled as a request to stop
            raise TerminatedError
        world.from_rank_zero(lambda: rmtree(run_dir))
        return lines_writer

    warm = train(_WARM_STEPS, 2).seconds(batch)[0]
    steps = world.from_rank_zero(lambda: math.ceil(max(_WARM_STEPS, _TRAINED_S / _LINES / warm)))
    times = train(steps, _LINES + 1).seconds(batch)
    timeline.close()
    return load, world.from_rank_zero(lambda: times)


class _Lines(Writer):
    """Writer that keeps the speeds of training."""

    def __init__(self) -> None:
        super().__init__()
        self._values: list[Mapping[str, Any]] = []

    def write(self, line: dict[str, Any]) -> None:
        if line["kind"] == "train":
            self._values.append(line)

    def seconds(self, batch: int) -> tuple[float, float]:
        """Return the seconds of a step, and how many of them it waited for data: the median line, without the first."""
        times = [(batch / line["samples_per_s"], line["wait_share"]) for line in self._values[1:]]
        middle = statistics.median
        return middle(total for total, _ in times), middle(total * share for total, share in times)


def _errors(speeds: Speeds) -> str:
    errors = [abs(fit["fitted_s"] / fit["measured_s"] - 1) for fit in speeds.fits]
    most, half = max(errors), statistics.median(errors)
    return f"{len(errors)} trainings fitted within {most:.0%}, half of them within {half:.0%}"
