"""Speed of a whole training run, and its share of time waiting for data; see `benchmark.py training --help`."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.datasets.writer import write_parts

ROOT = Path(__file__).resolve().parent.parent
NUM_IDS, NUM_FLOATS = 8, 4
ROWS_PER_FILE, ROW_GROUP_ROWS = 262_144, 65_536


def write_files(folder: Path, num_rows: int) -> None:
    """Write 8 ids with power-law popularity, 4 floats and a label that depends on these."""
    generator = np.random.default_rng(1)

    def tables() -> Any:
        for _ in range(0, num_rows, ROW_GROUP_ROWS):
            ids = generator.zipf(1.3, (NUM_IDS, ROW_GROUP_ROWS)) % 1_000_000
            columns: dict[str, Any] = {f"id_{i}": ids[i] * (2 * i + 3) for i in range(NUM_IDS)}
            floats = generator.random((NUM_FLOATS, ROW_GROUP_ROWS), np.float32)
            columns |= {f"float_{i}": floats[i] for i in range(NUM_FLOATS)}
            chance = 0.2 + 0.3 * floats[0] + 0.2 * (ids[0] % 2)
            columns["label"] = (generator.random(ROW_GROUP_ROWS) < chance).astype(np.int8)
            yield pa.table(columns)

    write_parts(tables(), folder, ROW_GROUP_ROWS, ROWS_PER_FILE)


def config_text(data: Path) -> str:
    """Return the config of a DLRM with 8 tables of dimension 16, and steps of 2048 rows."""
    ids = ", ".join(f"id_{i}: {{table: t{i}}}" for i in range(NUM_IDS))
    floats = ", ".join(f"float_{i}: {{type: float}}" for i in range(NUM_FLOATS))
    tables = ", ".join(f"t{i}: {{num_embeddings: 200000, embedding_dim: 16}}" for i in range(NUM_IDS))
    return (
        f"data: {{train: {data}, label_column: label}}\nfeatures: {{{ids}, {floats}}}\ntables: {{{tables}}}\n"
        "model: {name: dlrm, bottom_mlp: [32], top_mlp: [64, 32]}\n"
        "train: {global_batch_size: 2048, log_every_steps: 200}\n"
    )


def files(num_rows: int) -> Path:
    """Return the folder of the files; write them if they are missing."""
    data = ROOT / f"data/.cache/training-benchmark/{num_rows}-rows"
    if not data.exists():
        write_files(data.with_suffix(".tmp"), num_rows)
        data.with_suffix(".tmp").rename(data)
    return data


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py training`."""
    data, results = files(arguments.rows), []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "training.yaml"
        config.write_text(config_text(data))
        for repeat in range(arguments.repeats):
            run_dir = Path(folder) / f"run-{repeat}"
            command = [sys.executable, "train.py", str(config), f"run.dir={run_dir}", *arguments.overrides]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            results.append(json.loads((run_dir / "result.json").read_text()))
            shown = {key: results[-1][key] for key in ("samples_per_s", "wait_share", "seconds")}
            print(f"repeat {repeat + 1}: {shown}", flush=True)
    return {
        "rows": arguments.rows,
        "overrides": arguments.overrides,
        "wait_share": statistics.median(result["wait_share"] for result in results),
        "wait_shares": [result["wait_share"] for result in results],
        "samples_per_s": [result["samples_per_s"] for result in results],
        "peak_rss_bytes": [result["peak_rss_bytes"] for result in results],
        "device": results[0]["device"],
        "versions": results[0]["versions"],
        "git_commit": results[0]["git_commit"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py training`."""
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--rows", type=int, default=2_097_152)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
