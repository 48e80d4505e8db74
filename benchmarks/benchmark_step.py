"""Our trainer, reading Parquet, against a bare torchrec loop on batches in memory; see `benchmark.py step --help`."""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import benchmark_training
import torch
from bare_loop import Bare, bare_batch, pinned
from launcher import launch_command
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec import EmbeddingBagCollection
from torchrec.datasets.utils import Batch as BareBatch
from torchrec.models.dlrm import DLRM

from recsys.config import Config, load_config
from recsys.data.inputs import Inputs, open_inputs
from recsys.memory import Timeline
from recsys.runtime.environment import MALLOC_SETTINGS
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import World, open_world
from recsys.step.pipeline import TimedIterator, build_pipeline
from recsys.training.build import build_model
from recsys.training.trainer import Trainer

ROWS = 2_097_152
NUM_EMBEDDINGS, DIM = 200_000, 16
BATCHES_IN_MEMORY = 64
PROFILED_STEPS = 60
# Events of the profiler that belong to each part of a step. Events of LOOKUP are inside the range `forward`, those of
# TABLE_BACKWARD inside `backward`, and are subtracted from these.
LOOKUP = re.compile(r"^fbgemm::split_embedding_codegen_lookup|^fbgemm::dense_embedding_codegen_lookup")
TABLE_BACKWARD = re.compile(r"^fbgemm::split_embedding_backward.*_wrapper$")  # includes the operator that it calls
RANGES = {
    "wait": re.compile(r"^next batch$"),
    "input_distribution": re.compile(r"^## (start|wait)_sparse_data_dist"),
    "forward": re.compile(r"^## forward"),
    "backward": re.compile(r"^## backward"),
    "optimizer": re.compile(r"^## optimizer|^## zero_grad"),
}


class Ours:
    """The trainer of this project, run like train.py does."""

    def __init__(self, config: Config, world: World) -> None:
        self._inputs: Inputs = open_inputs(config, world)
        self._built = build_model(self._inputs)
        self._config, self._world = config, world
        self.num_threads = torch.get_num_threads()  # chosen by open_world

    def measure(self) -> dict[str, float]:
        """Train train.max_steps steps from the first row on; return rows/s and the share of time waiting for data."""
        torch.set_num_threads(self.num_threads)
        folder = self._world.from_rank_zero(tempfile.mkdtemp)
        timeline = Timeline(self._world.device)
        trainer = Trainer(self._inputs, self._built, Path(folder), timeline)
        trainer.fit()
        speed = trainer.progress.totals()
        timeline.close()
        self._world.from_rank_zero(lambda: shutil.rmtree(folder))
        return {"rows_per_s": speed["samples_per_s"], "wait_share": speed["wait_share"]}

    def batches_in_memory(self) -> list[BareBatch]:
        """Return batches of the same rows for the bare loop."""
        loader = self._inputs.loader("train")
        with closing(loader.batches()) as batches:
            return [pinned(bare_batch(batch), self._world.device) for batch in islice(batches, BATCHES_IN_MEMORY)]

    def profile(self, steps: int) -> dict[str, float]:
        """Return ms per step of each part, over `steps` steps after as many for warming up; rows may repeat."""
        torch.set_num_threads(self.num_threads)
        loader = self._inputs.loader("train")
        pipeline = build_pipeline(
            self._built.model, self._built.dense_optimizer, self._world.device, self._config.debug
        )
        with closing(loader.batches(num_epochs=3 * steps)) as batches:
            return profiled(pipeline.progress, TimedIterator(batches), steps)


def _bare(batches: list[BareBatch], world: World, sharding: str | None) -> Bare:
    """Return the bare loop of the same DLRM."""
    rows = dict.fromkeys(batches[0].sparse_features.keys(), NUM_EMBEDDINGS)

    def make(tables: EmbeddingBagCollection, num_floats: int, device: torch.device) -> DLRM:
        return DLRM(tables, num_floats, [64, DIM], [64, 32, 1], dense_device=device)

    return Bare(batches, world, rows, DIM, make, sharding)


def _profile(bare: Bare, num_threads: int) -> dict[str, float]:
    """Return ms per step of each part of the bare loop."""
    torch.set_num_threads(num_threads)
    return profiled(bare.progress, bare.batches, PROFILED_STEPS)


class Marked(Iterator[Any]):
    """Passes batches on, marking the wait for each as a range of the profiler."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        with record_function("next batch"):
            return next(self._batches)


def profiled(progress: Callable[[Any], Any], batches: Iterator[Any], steps: int) -> dict[str, float]:
    """Return ms per step by part, over `steps` steps after as many for warming up; this includes profiling itself."""
    marked = Marked(batches)
    for _ in range(steps):
        progress(marked)
    start = time.monotonic()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            progress(marked)
    total = (time.monotonic() - start) * 1e3 / steps

    def sum_of(pattern: re.Pattern[str]) -> float:
        return sum(e.cpu_time_total for e in found.key_averages() if pattern.search(e.key)) / 1e3 / steps

    ranges = {name: sum_of(pattern) for name, pattern in RANGES.items()}
    lookup, table_backward = sum_of(LOOKUP), sum_of(TABLE_BACKWARD)
    parts = {
        "wait": ranges["wait"],
        "input_distribution": ranges["input_distribution"],
        "lookup": lookup,
        "dense": ranges["forward"] - lookup + max(0.0, ranges["backward"] - table_backward),
        "backward": table_backward,
        "optimizer": ranges["optimizer"],
    }
    parts["rest"] = total - sum(parts.values())
    return {name: round(value, 3) for name, value in {"total": total, **parts}.items()}


def measure_batch_size(arguments: argparse.Namespace, data: Path, batch_size: int) -> dict[str, Any]:
    """Interleave our trainer and the bare loop, and return medians over the repeats."""
    steps = max(1, arguments.rows // batch_size)
    overrides = ["model.bottom_mlp=[64]", f"train.global_batch_size={batch_size}", f"train.max_steps={steps}"]
    overrides += arguments.overrides
    if arguments.sharding is not None:
        overrides += [f"tables.t{i}.sharding_type={arguments.sharding}" for i in range(benchmark_training.NUM_IDS)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(benchmark_training.config_text(data))
        file.flush()
        config = load_config(file.name, overrides)
    with open_world(config.run.device, config.run.num_threads) as world:
        ours = Ours(config, world)
        bare = _bare(ours.batches_in_memory(), world, arguments.sharding)
        rates: dict[str, list[float]] = {"ours": [], "wait_share": []}
        for repeat in range(arguments.repeats + 1):
            if arguments.only != "bare":
                found = ours.measure()
                rates["ours"].append(found["rows_per_s"])
                rates["wait_share"].append(found["wait_share"])
            for threads in arguments.threads if arguments.only != "ours" else ():
                rates.setdefault(f"bare_{threads}", []).append(bare.measure(steps, threads))
            if repeat and world.rank == 0:
                last = {name: values[-1] for name, values in rates.items() if values}
                shown = {name: round(value, 3 if name == "wait_share" else None) for name, value in last.items()}
                print(f"batch {batch_size}, repeat {repeat}: {shown}", flush=True)
        # The first repeat only warms up.
        counted: dict[str, list[float]] = {name: values[1:] for name, values in rates.items() if values}
        counted["ours_threads"] = [ours.num_threads]
        if arguments.only:
            return {name: statistics.median(values) for name, values in counted.items()}
        result = compared(counted, arguments, world.world_size)
        parts = {"ours_ms": ours.profile(PROFILED_STEPS), "bare_ms": _profile(bare, result["bare_threads"])}
        del ours, bare
        return {**result, "device": world.device.type, **parts}


def compared(rates: dict[str, list[float]], arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return medians of the rates by name, and the ratios of ours to the bare loop with its best number of threads."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(arguments.threads, key=lambda threads: medians[f"bare_{threads}"])
    ratios = [a / b for a, b in zip(rates["ours"], rates[f"bare_{best}"], strict=True)]
    return {
        "bare_rows_per_second": round(medians[f"bare_{best}"]),
        "ours_rows_per_second": round(medians["ours"]),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "ranks": ranks,
        "sharding": arguments.sharding,
        "bare_threads": best,
        "ours_threads": int(medians["ours_threads"]),
        "wait_share": round(medians["wait_share"], 4),
        "bare_rows_per_second_by_threads": {t: round(medians[f"bare_{t}"]) for t in arguments.threads},
    }


def measure_apart(arguments: argparse.Namespace, data: Path, batch_size: int) -> dict[str, Any]:
    """Measure ours and the bare loop in separate processes, in turn, each with the settings that its users have:
    ours with those of train.py, the bare loop with the defaults of glibc and libgomp, without huge pages."""
    # glibc raises its thresholds to these while a process runs.
    of_glibc = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
    of_gnu = of_glibc | {"GOMP_SPINCOUNT": str(300_000)}  # the default of libgomp
    settings = {"ours": MALLOC_SETTINGS, "bare": {"GLIBC_TUNABLES": "", "THP_MEM_ALLOC_ENABLE": "0", **of_gnu}}
    pairs: list[dict[str, float]] = []
    for _ in range(arguments.repeats):
        pairs.append({})
        for only, variables in settings.items():
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.json"
                changed = ["--batch-size", str(batch_size), "--only", only, "--repeats", "3", "--out", str(out)]
                launch = launch_command(arguments.ranks) if arguments.ranks > 1 else [sys.executable]
                command = [*launch, *(each for each in sys.argv if each != "--apart"), *changed]
                subprocess.run(command, check=True, env=os.environ | variables)
                pairs[-1] |= json.loads(out.read_text())["batches"][str(batch_size)]
    rates = {name: [pair[name] for pair in pairs] for name in pairs[0]}
    return {**compared(rates, arguments, arguments.ranks), "apart": True}


def launch_ranks(arguments: argparse.Namespace, data: Path, batch_size: int) -> dict[str, Any]:
    """Do `measure_batch_size` under torchrun, once for each batch size, because its store serves one process group."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        changed = ["--batch-size", str(batch_size), "--out", str(out)]
        subprocess.run([*launch_command(arguments.ranks), *sys.argv, *changed], check=True)
        result: dict[str, Any] = json.loads(out.read_text())["batches"][str(batch_size)]
        return result


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py step`; the top of the result has the figures of the batch size with the least ratio."""
    data = benchmark_training.files(min(ROWS, arguments.rows))
    measure = launch_ranks if arguments.ranks > 1 and "RANK" not in os.environ else measure_batch_size
    measure = measure_apart if arguments.apart else measure
    batches = {size: measure(arguments, data, size) for size in arguments.batch_size}
    if arguments.only:
        return {"batches": batches}
    least = min(batches.values(), key=lambda found: found["ratio"])
    return {**least, "batches": batches, "versions": installed_versions()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py step`."""
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="OpenMP threads of the bare loop")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help="rows of a block of steps; blocks of ours and bare alternate"
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks, of ours and of the bare loop")
    parser.add_argument("--sharding", help="sharding type of all tables of both; default: each its planner's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["ours", "bare"], help="without the other, and what compares both")
    parser.add_argument("--apart", action="store_true", help="in processes of their own, in turn: see measure_apart")
    parser.add_argument("--out", type=Path, help="JSON file to write")
