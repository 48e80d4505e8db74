"""Bytes and metrics of a config after `recsys compress`, over seeds."""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher import earlier, write

from recsys.runtime.versions import git_commit

ROOT = Path(__file__).resolve().parent.parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this measurement."""
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="of the training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--runs", type=Path, required=True, help="folder of the runs; finished ones are not trained again"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; seeds that it has are not run again")
    parser.add_argument(
        "--compress", nargs=argparse.REMAINDER, required=True, help="words of recsys compress, the last"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and compress each seed, write the summary after each, and return it."""
    asked = {"config": arguments.config, "overrides": arguments.overrides, "compress": arguments.compress}
    summary = content = {"seeds": {}, **earlier(arguments.out, asked)}
    for seed in [each for each in arguments.seeds if str(each) not in content["seeds"]]:
        content["seeds"][str(seed)] = _of_seed(arguments, seed)
        summary = {**asked, "seeds": content["seeds"], "mean": _means(list(content["seeds"].values()))}
        write(arguments.out, summary)
        print(f"seed {seed}: {json.dumps(content['seeds'][str(seed)])}", flush=True)
    return summary


def _of_seed(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    trained, small = arguments.runs / f"seed-{seed}", arguments.runs / f"{arguments.out.stem}-{seed}"
    if not (trained / "result.json").exists():
        _recsys("train", arguments.config, *arguments.overrides, f"seed={seed}", f"run.dir={trained}")
    shutil.rmtree(small, ignore_errors=True)
    _recsys("compress", str(trained), str(small), *arguments.compress)
    report = json.loads((small / "compression.json").read_text())
    first, last = report["stages"][0], report["stages"][-1]
    metric, data = report["metric"], report["data"]
    values = {data: [first["metrics"], last["metrics"]], "test": [first["test"], last["test"]]}
    result = json.loads((trained / "result.json").read_text())
    return {
        "accepted": [f"{stage['name']}: {stage['accepted']}" for stage in report["stages"][1:]],
        "bytes": [first["seen_bytes"], last["seen_bytes"]],
        "times_less": first["seen_bytes"] / last["seen_bytes"],
        **{role: [each[metric] for each in pair] for role, pair in values.items() if pair[0]},
        **{f"{role}_lost": pair[0][metric] - pair[1][metric] for role, pair in values.items() if pair[0]},
        "at_most": last["loss"]["at_most"],
        "git_commit": {"trained": result["git_commit"], "compressed": git_commit()},
        "versions": report["versions"],
    }


def _recsys(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "recsys", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _means(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and sample standard deviation of each number."""
    names = [name for name, value in seeds[0].items() if isinstance(value, float)]
    columns = {name: [seed[name] for seed in seeds] for name in names}
    return {
        name: {"mean": statistics.mean(each), "stdev": statistics.stdev(each) if len(each) > 1 else 0.0}
        for name, each in columns.items()
    }
