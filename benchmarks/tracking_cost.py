"""What TensorBoard costs a training: CPU seconds of whole runs with and without it, in turn, and of its writing.

    python benchmarks/tracking_cost.py configs/dlrm_movielens.yaml train.epochs=20 train.eval_every_epochs=1 \\
        run.num_threads=1 --out benchmarks/tracking_cost.json

Without it, only metrics.jsonl is written. The seconds of a run include all threads, from its start to its end. Other
work of the machine changes these by a percent or more; so the parts of TensorBoard are measured too, by the clocks of
their threads: the import of the package, the calls in the main thread, and the thread that writes the file.
"""

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.runtime.environment import prepare_environment  # noqa: E402

prepare_environment()  # before pyarrow is imported

from launcher import write  # noqa: E402

import recsys.training.run as training  # noqa: E402
from recsys.config import load_config  # noqa: E402
from recsys.report.trackers import TensorBoard  # noqa: E402
from recsys.runtime.versions import installed_versions  # noqa: E402

PARTS = ("import", "main thread", "own thread")


def run_once(config: str, keys: list[str], out: Path) -> None:
    """Train in this process, and write the CPU seconds of the process and of the parts of TensorBoard."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def time_calls(owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                seconds[part] += time.thread_time() - start
                if part == "import" and "run.track.to=[]" not in keys:
                    thread = sys.modules["tensorboard.summary.writer.event_file_writer"]._AsyncWriterThread
                    time_calls(thread, "run", "own thread")

        setattr(owner, name, timed)

    time_calls(training, "import_trackers", "import")
    for name in ("__init__", "write", "text", "close"):
        time_calls(TensorBoard, name, "main thread")
    with tempfile.TemporaryDirectory() as folder:
        training.run(load_config(config, [*keys, f"run.dir={folder}/run"]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    out.write_text(json.dumps({"process": used.ru_utime + used.ru_stime, **seconds}))


def run_apart(config: str, keys: list[str]) -> dict[str, float]:
    """Do `run_once` in a process of its own, and return what it writes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([sys.executable, __file__, config, *keys, "--once", "--out", file.name], check=True)
        return json.loads(Path(file.name).read_text())


def main() -> None:
    """Parse the command line, train in turn, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--pairs", type=int, default=4, help="of runs, with TensorBoard and without (default: 4)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)  # a run of a pair
    arguments = parser.parse_args()
    if arguments.once:
        return run_once(arguments.config, arguments.overrides, arguments.out)
    pairs = []
    for i in range(arguments.pairs):
        order = ("[tensorboard]", "[]") if i % 2 else ("[]", "[tensorboard]")
        pair = {to: run_apart(arguments.config, [*arguments.overrides, f"run.track.to={to}"]) for to in order}
        pairs.append((pair["[tensorboard]"], pair["[]"]))
        print(*pairs[-1], flush=True)
    costs = [tracked["process"] / untracked["process"] - 1 for tracked, untracked in pairs]
    result = {
        "config": arguments.config,
        "overrides": arguments.overrides,
        "pairs": pairs,
        "median_cost": statistics.median(costs),
        "mean_cost": statistics.mean(costs),
        "standard_error": statistics.stdev(costs) / len(costs) ** 0.5 if len(costs) > 1 else None,
        "share_of_what_writes": {
            part: statistics.mean(tracked[part] / tracked["process"] for tracked, _ in pairs) for part in PARTS
        },
        "versions": installed_versions(),
    }
    write(arguments.out, result)


if __name__ == "__main__":
    main()
