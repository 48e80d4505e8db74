"""What TensorBoard costs a training: CPU seconds of its stretches with it and without, in turn, in one run.

    python benchmarks/tracking_cost.py configs/dlrm_movielens.yaml data.valid=null data.test=null \\
        train.eval_every_epochs=null train.epochs=80 run.num_threads=1 --out benchmarks/tracking_cost.json

Without it, metrics.jsonl alone is written. The seconds are of all threads. Stretches differ by a few percent by what
else the machine does, which is more than there is to be seen; so the CPU seconds of what writes, by the clocks of its
threads, are told too.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.runtime.environment import prepare_environment  # noqa: E402

prepare_environment()  # before pyarrow is imported

from launcher import machine  # noqa: E402

from recsys.config import load_config  # noqa: E402
from recsys.report.writers import TensorBoard  # noqa: E402
from recsys.runtime.versions import installed_versions  # noqa: E402
from recsys.training.run import run  # noqa: E402
from recsys.training.trainer import Trainer  # noqa: E402


class Stretches:
    """CPU seconds of stretches of so many lines of the log each, with TensorBoard in the order yes, no, no, yes."""

    def __init__(self, lines: int) -> None:
        self._lines, self._num_told, self._start = lines, 0, 0.0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.main_thread = self.writer_thread = 0.0
        self._write, self._tell = TensorBoard.write, Trainer._tell

    @property
    def is_on(self) -> bool:
        return self._num_told // self._lines % 4 in (0, 3)

    def write(self, writer: TensorBoard, line: dict[str, Any]) -> None:
        """Stand in for `TensorBoard.write`."""
        if self.is_on:
            start = time.thread_time()
            self._write(writer, line)
            self.main_thread += time.thread_time() - start

    def tell(self, trainer: Trainer) -> None:
        """Stand in for `Trainer._tell`, at the end of each line's steps."""
        was_on = self.is_on
        self._tell(trainer)
        self._num_told += 1
        if self._num_told % self._lines:
            return
        now = time.process_time()
        if self._num_told > self._lines:  # the first stretch warms up
            self.seconds[was_on].append(now - self._start)
        self._start = now
        for thread in threading.enumerate():
            if type(thread).__name__ == "_AsyncWriterThread" and thread.ident:
                self.writer_thread = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main() -> None:
    """Parse the command line, train, write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--lines", type=int, default=3, help="of the log, in a stretch (default: 3)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    stretches = Stretches(arguments.lines)
    setattr(TensorBoard, "write", lambda writer, line: stretches.write(writer, line))  # noqa: B010
    setattr(Trainer, "_tell", lambda trainer: stretches.tell(trainer))  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        keys = [*arguments.overrides, "run.track.to=[tensorboard]", f"run.dir={folder}/run"]
        run(load_config(arguments.config, keys))
    pairs = list(zip(stretches.seconds[True], stretches.seconds[False], strict=False))
    costs = [on / off - 1 for on, off in pairs]
    result = {
        "config": arguments.config,
        "overrides": arguments.overrides,
        "lines": arguments.lines,
        "pairs": pairs,
        "median_cost": statistics.median(costs),
        "mean_cost": statistics.mean(costs),
        "standard_error": statistics.stdev(costs) / len(costs) ** 0.5,
        "written_by_main_thread": stretches.main_thread / sum(stretches.seconds[True]),
        "written_by_own_thread": stretches.writer_thread / sum(stretches.seconds[True]),
        "machine": machine(),
        "versions": installed_versions(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print({name: value for name, value in result.items() if isinstance(value, float)}, len(pairs), "pairs")


if __name__ == "__main__":
    main()
