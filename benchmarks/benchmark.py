"""Measure: test metrics of a config over seeds, what loader, shuffling, training, memory cost. Results are JSON."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.runtime.versions import exit_unless_installed  # noqa: E402

exit_unless_installed()

import benchmark_attention  # noqa: E402
import benchmark_checkpoints  # noqa: E402
import benchmark_compress  # noqa: E402
import benchmark_configs  # noqa: E402
import benchmark_dense  # noqa: E402
import benchmark_loader  # noqa: E402
import benchmark_matrix  # noqa: E402
import benchmark_peaks  # noqa: E402
import benchmark_predict  # noqa: E402
import benchmark_random  # noqa: E402
import benchmark_shuffle  # noqa: E402
import benchmark_step  # noqa: E402
import benchmark_time  # noqa: E402
import benchmark_training  # noqa: E402
from launcher import machine  # noqa: E402


def run_seed(config: str, seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Train one seed in a process of its own and return its result.json."""
    run_dir = folder / f"seed-{seed}"
    command = [sys.executable, "train.py", config, *overrides, f"seed={seed}", f"run.dir={run_dir}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def summarise(config: str, overrides: list[str], results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return mean, sample standard deviation and each seed's value of every test metric, with where it was measured."""
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


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    seeds = commands.add_parser("seeds", help="test metrics over seeds")
    seeds.add_argument("config", metavar="CONFIG")
    seeds.add_argument("overrides", metavar="key=value", nargs="*")
    seeds.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    seeds.add_argument("--out", type=Path, help="JSON file to write; seeds that it has are not run again")
    loader = commands.add_parser("loader", help="the loader's CPU time against bare decoding; the last line is JSON")
    benchmark_loader.add_arguments(loader)
    shuffle = commands.add_parser("shuffle", help="how far apart neighbours of a file are trained")
    benchmark_shuffle.add_arguments(shuffle)
    training = commands.add_parser("training", help="speed of a DLRM of 8 ids, and its share of time waiting for data")
    benchmark_training.add_arguments(training)
    step = commands.add_parser("step", help="our trainer against a bare torchrec loop; the last line is JSON")
    benchmark_step.add_arguments(step)
    checkpoints = commands.add_parser("checkpoints", help="seconds of training that a checkpoint of 1.6 M rows costs")
    benchmark_checkpoints.add_arguments(checkpoints)
    peaks = commands.add_parser("peaks", help="peaks of memory, predicted and measured, of runs of many shapes")
    benchmark_peaks.add_arguments(peaks)
    dense = commands.add_parser("dense", help="bytes and time that train.dense_sharding saves and costs, by width")
    benchmark_dense.add_arguments(dense)
    matrix = commands.add_parser(
        "matrix", help="every type × optimizer × kernel of tables: trains, leaves out bad steps"
    )
    benchmark_matrix.add_arguments(matrix)
    predict = commands.add_parser("predict", help="rate of predictions against that of evaluation, and their memory")
    benchmark_predict.add_arguments(predict)
    random = commands.add_parser("random", help="peaks of memory, predicted and measured, of random configs and data")
    benchmark_random.add_arguments(random)
    compress = commands.add_parser("compress", help="bytes and metric that recsys compress leaves, over seeds")
    benchmark_compress.add_arguments(compress)
    times = commands.add_parser("time", help="samples/s, as a dry run predicts them and as training measures them")
    benchmark_time.add_arguments(times)
    configs = commands.add_parser("configs", help="losses on one process and on two, and peaks of memory")
    benchmark_configs.add_arguments(configs)
    attention = commands.add_parser("attention", help="jagged attention against padded: time and memory")
    benchmark_attention.add_arguments(attention)
    arguments = parser.parse_args()
    measure: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "seeds": measure_seeds,
        "loader": benchmark_loader.run,
        "shuffle": benchmark_shuffle.run,
        "training": benchmark_training.run,
        "step": benchmark_step.run,
        "checkpoints": benchmark_checkpoints.run,
        "matrix": partial(benchmark_matrix.run, write=write),
        "peaks": partial(benchmark_peaks.run, write=write),
        "random": partial(benchmark_random.run, write=write),
        "time": benchmark_time.run,
        "dense": benchmark_dense.run,
        "predict": benchmark_predict.run,
        "attention": benchmark_attention.run,
        "configs": partial(benchmark_configs.run, write=write),
        "compress": partial(benchmark_compress.run, write=write),
    }
    result = measure[arguments.command](arguments)
    if int(os.environ.get("RANK", "0")) > 0:
        return
    result = write(arguments.out, result)
    if arguments.command in ("loader", "step", "checkpoints"):
        print(json.dumps(result))


def write(out: Path | None, result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the machine it is from, written to a file if one is named."""
    result = {**result, "machine": machine()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def earlier_seeds(arguments: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Return the results of the seeds that the file to write has already, of the same config and overrides."""
    if arguments.out is None or not arguments.out.exists():
        return {}
    content = json.loads(arguments.out.read_text())
    if (content["config"], content["overrides"]) != (arguments.config, arguments.overrides):
        sys.exit(f"{arguments.out} is of {content['config']} {content['overrides']}; name another file")
    of_all = {key: content[key] for key in ("device", "versions", "git_commit")}
    return {
        seed: {
            "metrics": {"test": {name: each["values"][i] for name, each in content["test"].items()}},
            **{key: content[key][i] for key in ("seconds", "samples_per_s")},
            **of_all,
        }
        for i, seed in enumerate(content["seeds"])
    }


def measure_seeds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train each seed, print and return the summary."""
    results = earlier_seeds(arguments)
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


if __name__ == "__main__":
    main()
