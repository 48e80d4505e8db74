"""Test metrics of a config over seeds; see `benchmark.py seeds --help`."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from launcher import earlier, write

ROOT = Path(__file__).resolve().parent.parent


def run_seed(config: str, seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Train one seed in a process of its own and return its result.json."""
    run_dir = folder / f"seed-{seed}"
    command = [sys.executable, "train.py", config, *overrides, f"seed={seed}", f"run.dir={run_dir}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def summarise(config: str, overrides: list[str], results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return mean, sample standard deviation and values by seed of every test metric, and where they were measured."""
    first = next(iter(results.values()))
    metrics = {}
    for name in first["metrics"]["test"]:
        values = [result["metrics"]["test"][name] for result in results.values()]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        metrics[name] = {"mean": statistics.mean(values), "stdev": spread, "values": values}
    return {
        "config": config,
        "overrides": overrides,
        "seeds": list(results),
        "test": metrics,
        "seconds": [result["seconds"] for result in results.values()],
        "samples_per_s": [result["samples_per_s"] for result in results.values()],
        "device": first["device"],
        "versions": first["versions"],
        "git_commit": first["git_commit"],
    }


def earlier_seeds(content: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the results of the seeds in a summary, in the form of `run_seed`."""
    of_all: dict[str, Any] = {key: content[key] for key in ("device", "versions", "git_commit") if key in content}
    return {
        seed: {
            "metrics": {"test": {name: each["values"][i] for name, each in content["test"].items()}},
            **{key: content[key][i] for key in ("seconds", "samples_per_s")},
            **of_all,
        }
        for i, seed in enumerate(content.get("seeds", ()))
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py seeds`; print and return the summary."""
    asked = {"config": arguments.config, "overrides": arguments.overrides}
    results = earlier_seeds(earlier(arguments.out, asked))
    with tempfile.TemporaryDirectory() as folder:
        for seed in [each for each in arguments.seeds if each not in results]:
            results[seed] = run_seed(arguments.config, seed, arguments.overrides, Path(folder))
            shown = {name: round(value, 4) for name, value in results[seed]["metrics"]["test"].items()}
            print(f"seed {seed}: {shown}", flush=True)
            write(arguments.out, summarise(arguments.config, arguments.overrides, results))
    summary = summarise(arguments.config, arguments.overrides, results)
    for name, values in summary["test"].items():
        print(f"{name}: {values['mean']:.4f} ± {values['stdev']:.4f}")
    return summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py seeds`."""
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, help="JSON file to write; seeds that it has are not run again")
