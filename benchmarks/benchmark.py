"""Measure metrics of a config over seeds, and the cost of loading, shuffling, training and more. Results are JSON."""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recsys.runtime.environment import prepare_environment
from recsys.runtime.versions import exit_unless_installed

exit_unless_installed()
prepare_environment()  # before pyarrow is imported; the bare decoding uses it too

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
import benchmark_seeds  # noqa: E402
import benchmark_shuffle  # noqa: E402
import benchmark_step  # noqa: E402
import benchmark_time  # noqa: E402
import benchmark_training  # noqa: E402
from launcher import write  # noqa: E402

# Command → its module, and what it measures.
MEASUREMENTS = {
    "seeds": (benchmark_seeds, "test metrics over seeds"),
    "loader": (benchmark_loader, "the loader's CPU time against bare decoding; the last line is JSON"),
    "shuffle": (benchmark_shuffle, "how far apart neighbours of a file are trained"),
    "training": (benchmark_training, "speed of a DLRM of 8 ids, and its share of time waiting for data"),
    "step": (benchmark_step, "our trainer against a bare torchrec loop; the last line is JSON"),
    "checkpoints": (benchmark_checkpoints, "seconds of training that a checkpoint of 1.6 M rows costs"),
    "peaks": (benchmark_peaks, "peaks of memory, predicted and measured, of runs of many shapes"),
    "dense": (benchmark_dense, "bytes and time that train.dense_sharding saves and costs, by width"),
    "matrix": (benchmark_matrix, "every type × optimizer × kernel of tables: trains, leaves out bad steps"),
    "predict": (benchmark_predict, "rate of predictions against that of evaluation, and their memory"),
    "random": (benchmark_random, "peaks of memory, predicted and measured, of random configs and data"),
    "compress": (benchmark_compress, "bytes and metric that recsys compress leaves, over seeds"),
    "time": (benchmark_time, "samples/s, as a dry run predicts them and as training measures them"),
    "configs": (benchmark_configs, "losses on one process and on two, and peaks of memory"),
    "attention": (benchmark_attention, "jagged attention against padded: time and memory"),
}


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, about) in MEASUREMENTS.items():
        module.add_arguments(commands.add_parser(name, help=about))
    arguments = parser.parse_args()
    result = MEASUREMENTS[arguments.command][0].run(arguments)
    if int(os.environ.get("RANK", "0")) > 0:
        return
    result = write(arguments.out, result)
    if arguments.command in ("loader", "step", "checkpoints"):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
