"""Configs on one process and on two: how much their losses differ, and peaks of memory, predicted and measured.

See `benchmark.py configs --help`. A config trains some steps on its data and is evaluated; its first lines say how to
prepare the data. A config that the file has already, or whose data are missing, is left out.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmark_peaks import MIB, ROOT, is_near, train
from launcher import earlier, write

from recsys.config import load_config
from recsys.runtime.versions import git_commit


def compare(config: str, steps: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Train a config on one rank and on two, and return the differences of the losses and the peak of each rank."""
    losses, peaks = [], {}
    for nproc in (1, 2):
        run = folder / f"{nproc}"
        shown = (f"train.max_steps={steps}", "train.log_every_steps=1", "run.num_threads=1")
        for rank, report in enumerate(train(Path(config), run, nproc, *shown, *overrides)):
            sizes = {name: report["peak"][name] for name in ("phase", "predicted_bytes", "measured_bytes")}
            peaks[f"rank {rank} of {nproc}"] = sizes
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["loss"] for record in records if record["kind"] == "train"])
    apart = [abs(one - two) for one, two in zip(*losses, strict=True)]
    return {
        "steps": len(apart),
        "last_loss": losses[0][-1],
        "largest_difference": max(apart),
        "largest_of_20_steps": max(apart[:20]),
        "peaks": peaks,
        "commit": git_commit(),
    }


def told(config: str, result: dict[str, Any]) -> str:
    """Return a line on a config: differences, and peaks as predicted / measured, marked if they are not near."""
    peaks = []
    for name, sizes in result["peaks"].items():
        predicted, measured = sizes["predicted_bytes"], sizes["measured_bytes"]
        mark = "" if is_near(predicted, measured) else " !"
        peaks.append(f"{name} {predicted / MIB:.0f} / {measured / MIB:.0f}{mark}")
    apart = f"{result['largest_difference']:.1e} apart ({result['largest_of_20_steps']:.1e} in 20 steps)"
    return f"{Path(config).stem}: {apart}; {', '.join(peaks)} MiB"


def has_data(config: str) -> bool:
    """Return whether the training data of a config exist."""
    train_data = load_config(config, []).data.train
    paths = train_data if isinstance(train_data, list) else [train_data]
    return all((ROOT / str(path)).exists() for path in paths)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py configs`."""
    result = {"configs": {}, **earlier(arguments.out, {"overrides": arguments.overrides})}
    for config in arguments.configs:
        name = Path(config).stem
        if name in result["configs"]:
            continue
        if not has_data(config):
            print(f"{name}: its data are not there")
            continue
        with tempfile.TemporaryDirectory() as folder:
            result["configs"][name] = compare(config, arguments.steps, arguments.overrides, Path(folder))
        print(told(config, result["configs"][name]), flush=True)
        write(arguments.out, result)
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py configs`."""
    parser.add_argument("configs", metavar="CONFIG", nargs="+")
    parser.add_argument("--overrides", metavar="key=value", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="JSON file to write")
