"""Predicted and measured peaks of memory of runs of many shapes; see `benchmark.py peaks --help`."""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from launcher import launch_command, write

from recsys.runtime.versions import installed_versions

ROOT = Path(__file__).resolve().parent.parent
NUM_FLOATS, NUM_RAW_IDS, ROW_GROUP_ROWS = 4, 1 << 22, 20_000
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A run of some steps on random rows.

    Attributes:
        rows: of the data. ids: features with one id, s0, s1 … lists: features with 0 to 2 * `length` ids, l0, l1 …
        num_embeddings, dim: of the tables t0, t1 …; features of the same number share one. table: other settings.
        nproc: number of ranks.
        model: settings of the model, a DLRM by default.
        overrides: key=value.
    """

    rows: int = 100_000
    ids: int = 8
    lists: int = 0
    length: int = 0
    num_embeddings: int = 200_000
    dim: int = 64
    table: Mapping[str, Any] = field(default_factory=dict)
    nproc: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    def settings(self, data: Path) -> dict[str, Any]:
        """Return the config for train.py."""
        table = {"num_embeddings": self.num_embeddings, "embedding_dim": self.dim, **self.table}
        return {
            "data": {"train": str(data), "label_column": "label"},
            "features": {
                **{f"s{i}": {"table": f"t{i}"} for i in range(self.ids)},
                **{f"l{i}": {"table": f"t{i}"} for i in range(self.lists)},
                **{f"d{i}": {"type": "float"} for i in range(NUM_FLOATS)},
            },
            "tables": {f"t{i}": table for i in range(max(self.ids, self.lists))},
            "model": {"name": "dlrm", **self.model},
            "train": {"global_batch_size": 4096, "max_steps": 12, "epochs": 100},
        }


_WIDE = {"top_mlp": [1024, 1024, 512]}
_TOWERS = {
    "name": "two_tower",
    "user_features": ["s0", "s1", "l0", "d0", "d1"],
    "item_features": ["s2", "s3", "d2", "d3"],
    "item_id": "s2",
    "user_mlp": [256],
    "item_mlp": [256],
}
_EVALUATED = ("train.eval_every_steps=20", "train.max_steps=60", "data.valid=${data.train}")
_BY_ELEMENT = "optimizer.tables.name=adagrad"
_EXPERTS = (
    "tables.t0={num_embeddings: 20000, mapping: vocabulary, experts: {others: [mid, rest], gate: features}}",
    "tables.mid={num_embeddings: 50000, embedding_dim: 16, projected_dim: 64, mapping: vocabulary}",
    "tables.rest={num_embeddings: 200000, embedding_dim: 8, projected_dim: 64}",
    "tables.t1={experts: {others: [e1, e2, e3], by: hash, active: 2}}",
    "tables.e{1..3}={num_embeddings: 200000, embedding_dim: 32, projected_dim: 64}",
    "train.global_batch_size=16384",
)

CASES = {
    "tables": Case(num_embeddings=1_000_000, dim=32),
    "adagrad, FP16": Case(num_embeddings=500_000, table={"data_type": "FP16"}, overrides=(_BY_ELEMENT,)),
    "lists": Case(ids=4, lists=4, length=25, overrides=("train.global_batch_size=16384",)),
    "dense": Case(model=_WIDE, overrides=("train.global_batch_size=32768",)),
    "micro-batches": Case(model=_WIDE, overrides=("train.global_batch_size=32768", "train.micro_batch_size=4096")),
    "windows": Case(rows=1_000_000, ids=16, dim=32, overrides=("train.global_batch_size=8192",)),
    "small": Case(ids=4, num_embeddings=50_000, dim=16, overrides=("train.global_batch_size=1024",)),
    "evaluations": Case(lists=2, length=10, dim=16, overrides=_EVALUATED),
    "large": Case(num_embeddings=2_000_000, dim=48, overrides=("train.global_batch_size=8192",)),
    "checkpointed layers, autocast": Case(
        model=_WIDE,
        overrides=(
            "train.global_batch_size=32768",
            "train.activation_checkpointing=true",
            "precision.autocast=bf16",
        ),
    ),
    "wide layers": Case(ids=4, dim=32, model={"top_mlp": [4096, 4096, 1024]}),
    "two towers": Case(
        ids=4, lists=1, length=20, model=_TOWERS, overrides=("train.global_batch_size=4096", "data.label_column=null")
    ),
    "attention": Case(
        ids=4,
        lists=1,
        length=25,
        dim=32,
        model={"attention": {"l0": "s0"}},
        overrides=("train.global_batch_size=8192",),
    ),
    "one thread": Case(num_embeddings=500_000, overrides=("data.num_threads=0", "data.prefetch_batches=0")),
    "checkpoints in the background": Case(
        num_embeddings=500_000,
        dim=32,
        overrides=("train.async_checkpoints=true", "train.checkpoint_every_steps=10", "train.max_steps=40"),
    ),
    "vocabularies": Case(ids=4, dim=32, num_embeddings=100_000, table={"mapping": "vocabulary", "num_buckets": 8}),
    "FP16 vectors": Case(
        num_embeddings=300_000, overrides=("precision.output_dtype=FP16", "train.global_batch_size=16384")
    ),
    "experts": Case(ids=4, lists=2, length=10, overrides=_EXPERTS),
    "experts on two ranks": Case(ids=4, lists=1, length=10, nproc=2, overrides=_EXPERTS),
    "two ranks": Case(num_embeddings=1_000_000, dim=32, nproc=2, overrides=("optimizer.tables.name=sgd",)),
    "row-wise on two ranks": Case(
        rows=200_000,
        num_embeddings=500_000,
        table={"sharding_type": "row_wise"},
        nproc=2,
        overrides=(_BY_ELEMENT, "train.global_batch_size=8192"),
    ),
    "column-wise on two ranks": Case(
        num_embeddings=500_000,
        table={"sharding_type": "column_wise"},
        nproc=2,
        overrides=(_BY_ELEMENT, "train.global_batch_size=8192"),
    ),
    "replicated on two ranks": Case(
        ids=4,
        num_embeddings=100_000,
        table={"sharding_type": "data_parallel"},
        nproc=2,
        overrides=("train.global_batch_size=8192",),
    ),
    "shared dense optimizer on two ranks": Case(
        ids=4,
        dim=32,
        model={"top_mlp": [4096, 4096, 1024]},
        nproc=2,
        overrides=("train.dense_sharding=optimizer", "train.global_batch_size=2048"),
    ),
    "lists on two ranks, evaluated": Case(
        lists=2,
        length=20,
        table={"sharding_type": "row_wise"},
        nproc=2,
        overrides=("train.global_batch_size=16384", *_EVALUATED),
    ),
    "four ranks": Case(num_embeddings=500_000, nproc=4, overrides=("train.global_batch_size=8192",)),
}


def write_rows(case: Case, path: Path) -> None:
    """Write the rows of a case as one Parquet file in a folder."""
    rng = np.random.default_rng(0)
    columns = {f"s{i}": pa.array(rng.integers(0, NUM_RAW_IDS, case.rows)) for i in range(case.ids)}
    for i in range(case.lists):
        ends = np.concatenate([[0], np.cumsum(rng.integers(0, 2 * case.length + 1, case.rows))]).astype(np.int32)
        columns[f"l{i}"] = pa.ListArray.from_arrays(pa.array(ends), pa.array(rng.integers(0, NUM_RAW_IDS, ends[-1])))
    columns |= {f"d{i}": pa.array(rng.random(case.rows, dtype=np.float32)) for i in range(NUM_FLOATS)}
    columns["label"] = pa.array(rng.integers(0, 2, case.rows).astype(np.int8))
    path.mkdir()
    pq.write_table(pa.table(columns), path / "rows.parquet", row_group_size=ROW_GROUP_ROWS)


def measure(case: Case, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train a case in a folder and return the `peak` of each rank's report.

    Raises:
        RuntimeError: the run fails; the message has the end of its output.
    """
    write_rows(case, folder / "data")
    (folder / "config.yaml").write_text(yaml.safe_dump(case.settings(folder / "data")))
    reports = train(folder / "config.yaml", folder / "run", case.nproc, *case.overrides, *overrides)
    return [report["peak"] for report in reports]


def train(config: Path, run_dir: Path, nproc: int, *overrides: str) -> list[dict[str, Any]]:
    """Train a config in `nproc` processes, and return the report of each.

    Raises:
        RuntimeError: the run fails; the message has the end of its output.
    """
    command = [*launch_command(nproc), "train.py", str(config), f"run.dir={run_dir}", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"the run has failed: {done.stderr[-3000:]}")
    return [json.loads((run_dir / f"memory/rank_{rank}.json").read_text()) for rank in range(nproc)]


def is_near(predicted: int, measured: int) -> bool:
    """Whether a prediction is within 5 % or 32 MiB of what was measured."""
    return abs(predicted - measured) < max(32 * MIB, 0.05 * measured)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py peaks`; write the file after each case. If a case fails, its error is its result."""
    peaks: dict[str, Any] = {}
    result = {"overrides": arguments.overrides, "peaks": peaks, "versions": installed_versions()}
    names = [name for name in arguments.only or CASES if CASES[name].nproc <= arguments.ranks]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        begun = {pool.submit(_measure_apart, CASES[name], arguments.overrides): name for name in names}
        for done in as_completed(begun):
            name = begun[done]
            peaks[name] = {"error": str(done.exception())} if done.exception() else done.result()
            write(arguments.out, result)
            for line in [str(done.exception())] if done.exception() else map(_line, done.result()):
                print(f"{name}: {line}", flush=True)
    result["peaks"] = {name: peaks[name] for name in names}
    return result


def _measure_apart(case: Case, overrides: Sequence[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return measure(case, Path(folder), *overrides)


def _line(peak: Mapping[str, Any]) -> str:
    """Return a peak in words."""
    mib = [round(peak[key] / MIB) for key in ("measured_bytes", "predicted_bytes", "unexplained_bytes")]
    return (
        f"measured {mib[0]:,} MiB in {peak['phase']}, predicted {mib[1]:,} in {peak['predicted_phase']}: "
        f"{peak['error']:+.1%}, {-mib[2]:+,} MiB"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py peaks`."""
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="some of them")
    parser.add_argument("--ranks", type=int, default=4, help="leave cases of more out, such as where GPUs are fewer")
    parser.add_argument("--at-once", type=int, default=1, help="cases: on GPUs, whose peaks others do not change")
    parser.add_argument("--out", type=Path, help="JSON file to write")
