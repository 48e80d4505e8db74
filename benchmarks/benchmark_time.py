"""Speed that a dry run predicts, compared with that of training; see `benchmark.py time --help`."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmark_training
from launcher import launch_command

from recsys.runtime.versions import installed_versions

ROOT = Path(__file__).resolve().parent.parent
# Configs of configs/, without evaluations; `drawn` is the config of `benchmark.py step`.
CONFIGS: dict[str, tuple[str, ...]] = {
    "drawn, 2,048 rows": ("drawn",),
    "drawn, 8,192 rows": ("drawn", "train.global_batch_size=8192"),
    "dlrm_movielens": ("configs/dlrm_movielens.yaml",),
    "dlrm_frappe": ("configs/dlrm_frappe.yaml",),
    "dlrm_frappe_dim64": ("configs/dlrm_frappe_dim64.yaml",),
    "dcn_frappe": ("configs/dcn_frappe.yaml",),
    "deepfm_frappe": ("configs/deepfm_frappe.yaml",),
    "final_mlp_frappe": ("configs/final_mlp_frappe.yaml",),
    "mmoe_movielens": ("configs/mmoe_movielens.yaml",),
    "two_tower_movielens_1m": ("configs/two_tower_movielens_1m.yaml",),
}
_ALONE = ("data.valid=null", "data.test=null", "train.eval_every_epochs=null", "train.early_stop.metric=null",
          "optimizer.schedule.name=constant")  # fmt: skip
_LINES = 8  # lines with the speed in each training, besides the first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py time`."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(CONFIGS))
    parser.add_argument("--repeats", type=int, default=5, help="calibrations, each followed by a training of all")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a training")
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--out", type=Path, help="JSON file to write")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py time`."""
    by_run: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repeats):
            for ranks in arguments.ranks:
                speeds = Path(folder) / f"speeds-{ranks}.json"
                words = ["-m", "recsys", "calibrate", str(speeds), "--threads", str(arguments.threads)]
                _output([*launch_command(ranks), *words])
                for name in arguments.only:
                    predicted = _predicted(name, ranks, speeds, Path(folder), arguments.threads)
                    measured = _measured(name, ranks, arguments.seconds * predicted, Path(folder), arguments.threads)
                    each = by_run.setdefault(f"{name}, ranks: {ranks}", {"predicted": [], "measured": []})
                    each["predicted"].append(round(predicted))
                    each["measured"].append(round(measured))
                    print(f"{name}, ranks: {ranks}: {predicted / measured - 1:+.0%}", flush=True)
    for each in by_run.values():
        ratios = [p / m for p, m in zip(each["predicted"], each["measured"], strict=True)]
        each["ratio"] = round(statistics.median(ratios), 3)
    within = sum(abs(each["ratio"] - 1) <= 0.2 for each in by_run.values())
    return {"within_20_percent": within, "of": len(by_run), "samples_per_s": by_run, "versions": installed_versions()}


def _config(name: str, folder: Path) -> list[str]:
    """Return a config's file and overrides."""
    config, *overrides = CONFIGS[name]
    if config == "drawn":
        config = str(folder / "drawn.yaml")
        Path(config).write_text(benchmark_training.config_text(benchmark_training.files(1 << 20)))
        return [config, *overrides]
    return [config, *overrides, *_ALONE]


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def _predicted(name: str, ranks: int, speeds: Path, folder: Path, threads: int) -> float:
    """Return the samples/s that a dry run predicts."""
    words = [f"topology.speeds={speeds}", f"topology.world_size={ranks}", f"run.num_threads={threads}"]
    words += [f"run.dir={folder}/dry", "memory.fit=false"]
    _output([sys.executable, "train.py", *_config(name, folder), "--dry-run", *words])
    prediction: dict[str, Any] = json.loads((folder / "dry/memory/dry_run.json").read_text())["time"]
    return float(prediction["samples_per_s"])


def _measured(name: str, ranks: int, rows: float, folder: Path, threads: int) -> float:
    """Return the samples/s of a training of about `rows` rows: the median of the speeds it logs, except the first."""
    config = _config(name, folder)
    batch = _batch(config)
    steps = max(5, int(rows / batch / _LINES))
    words = [f"train.max_steps={steps * (_LINES + 1)}", f"train.log_every_steps={steps}", "train.epochs=1000"]
    words += [f"run.num_threads={threads}", f"run.dir={folder}/run", "run.overwrite=true"]
    _output([*launch_command(ranks), "train.py", *config, *words])
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return statistics.median([line["samples_per_s"] for line in lines if line["kind"] == "train"][1:])


def _batch(config: list[str]) -> int:
    from recsys.config import load_config

    return load_config(ROOT / config[0], config[1:]).train.global_batch_size
