"""Speed of predictions compared with evaluation, and their memory; see `benchmark.py predict --help`."""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from recsys.data.inputs import open_inputs
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import open_world
from recsys.serving.finished import Finished, OpenRun, find_run
from recsys.serving.predict import scores_of_rows, write_blocks
from recsys.training.evaluation import evaluate_dataset
from recsys.training.learning import learn_facts

ROOT = Path(__file__).resolve().parent.parent
FILES = 10  # one file of drawn rows, and links to it: the memory of predict does not depend on what rows hold


def recsys(*words: str) -> list[str]:
    """Return the command line of `recsys WORDS`."""
    return [sys.executable, "-m", "recsys", *words]


def prepared(rows: int) -> tuple[Path, Path]:
    """Return a run of the sample's config, and a folder of rows to predict; make them if they are missing."""
    folder = ROOT / f"data/.cache/predict-benchmark/{rows}-rows"
    if not (folder / "logs/_prepared.json").exists():
        made = ["--test-rows", str(rows // FILES), "--files", "1", "--out", str(folder / "logs"), "--overwrite"]
        subprocess.run(recsys("prepare", "synthetic", "--rows", "200000", *made), cwd=ROOT, check=True)
        (drawn,) = (folder / "logs/test").glob("*.parquet")
        for number in range(1, FILES):
            drawn.with_name(f"part-{number:05d}.parquet").hardlink_to(drawn)
    if not (folder / "run/result.json").exists():
        data = [f"data.{role}={folder}/logs/{role}" for role in ("train", "valid", "test")]
        settings = ["train.max_steps=100", "data.weight_column=null", f"run.dir={folder}/run", "run.overwrite=true"]
        subprocess.run(
            recsys("train", "configs/dlrm_sample.yaml", *data[:2], "data.test=null", *settings), cwd=ROOT, check=True
        )
    return folder / "run", folder / "logs/test"


def rates(run_dir: Path, data: Path, repeats: int, overrides: list[str]) -> dict[str, dict[str, list[float]]]:
    """Return rows per second, and per second of CPU time, of training's evaluation and of predictions, run in turn."""
    run = find_run(str(run_dir), [*overrides, f"data.test={data}"])
    with open_world(run.config.run.device, run.config.run.num_threads) as world:
        opened = OpenRun(run.in_order(1), world, [], run.given("rows", str(data), None))
        measured = in_turn(run, opened, repeats)
        del opened
    return measured


def in_turn(run: Finished, opened: OpenRun, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return the result of `rates`; the first evaluation and prediction do not count, because they are slower."""
    inputs = learn_facts(open_inputs(run.config, opened.world, roles=["test"]), run.run_dir, opened.source)
    task, number = {"columns": ["user_id", "item_id"]}, count()
    actions: dict[str, Callable[[Path], object]] = {
        "evaluation": lambda out: evaluate_dataset(inputs, opened.model, "test"),
        "prediction": lambda out: write_blocks(opened, out / str(next(number)), "rows", task, scores_of_rows),
    }
    measured: dict[str, dict[str, list[float]]] = {name: {"rows_per_s": [], "rows_per_cpu_s": []} for name in actions}
    with tempfile.TemporaryDirectory() as out:
        for repeat in range(repeats + 1):
            for name, action in actions.items():
                start, cpu_start = time.monotonic(), time.process_time()
                action(Path(out))
                seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
                opened.model.eval()
                if repeat:
                    measured[name]["rows_per_s"].append(inputs.datasets["test"].num_rows / seconds)
                    measured[name]["rows_per_cpu_s"].append(inputs.datasets["test"].num_rows / cpu_seconds)
    return measured


def peak_bytes(run_dir: Path, data: Path, overrides: list[str]) -> int:
    """Return the peak of resident memory of `recsys predict`, run in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        process = subprocess.Popen(recsys("predict", str(run_dir), str(data), out, *overrides), cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"recsys predict ended with status {status}")
    return usage.ru_maxrss * 1024


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py predict`."""
    run_dir, data = prepared(arguments.rows)
    first = min(data.glob("*.parquet"))
    peaks = {  # before this process grows: the peak of a child is at least the memory of its parent
        str(rows): peak_bytes(run_dir, path, arguments.overrides)
        for rows, path in ((arguments.rows // FILES, first), (arguments.rows, data))
    }
    measured = rates(run_dir, first, arguments.repeats, arguments.overrides)
    if arguments.remove:
        shutil.rmtree(run_dir.parent)
    ratios = {
        unit: statistics.median(
            p / e for p, e in zip(measured["prediction"][unit], measured["evaluation"][unit], strict=True)
        )
        for unit in ("rows_per_s", "rows_per_cpu_s")
    }
    return {
        "rows": arguments.rows // FILES,
        "overrides": arguments.overrides,
        **measured,
        "prediction_to_evaluation": ratios,
        "peak_rss_bytes_by_rows": peaks,
        "versions": installed_versions(),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py predict`."""
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--remove", action="store_true", help="the rows and the run at the end")
    parser.add_argument("--out", type=Path, help="JSON file to write")
