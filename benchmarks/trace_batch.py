"""Print the files of recsys/ that a batch passes, from a row group on disk to its loss.

    python benchmarks/trace_batch.py [CONFIG] [key=value ...]

Trains some steps in one process and observes every call of a Python function, in all threads. A file of recsys/ is on
the way of a batch if one of its functions is called with data or returns data: rows, columns, ids, numbers, vectors or
a batch, that is an Arrow table or array, a NumPy array, a tensor, a jagged tensor, or an object, list, tuple or dict
that directly holds one. Only the steady state up to the loss counts:

- in the threads that read ahead, everything once there is a loader: they decode, convert and collate;
- in the training thread, from the start of a step until the model has returned its losses. The first steps, in which
  torchrec sets its pipeline up, do not count, nor does what follows the loss: backward, the exchange of gradients, the
  optimizers, logging.

Opening the data and building the model do not count either. Files are printed in the order in which they are first
called, those of the reading threads first, each with the functions that data passed.
"""

import argparse
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recsys.runtime.environment import prepare_environment

prepare_environment()  # before pyarrow is imported

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import torch  # noqa: E402
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor  # noqa: E402

from recsys.config import load_config  # noqa: E402
from recsys.data.batch import Batch  # noqa: E402
from recsys.data.inputs import open_inputs  # noqa: E402
from recsys.data.window import Columns  # noqa: E402
from recsys.runtime.world import open_world  # noqa: E402
from recsys.step.pipeline import build_pipeline  # noqa: E402
from recsys.training.build import build_model  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS, STEPS = 4, 8
DATA: tuple[type, ...] = (pa.Table, pa.RecordBatch, pa.Array, pa.ChunkedArray, np.ndarray, torch.Tensor, Batch, Columns)
DATA += (JaggedTensor, KeyedJaggedTensor, KeyedTensor)


def main() -> None:
    """Print the files and their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(ROOT / "configs" / "dlrm_sample.yaml"))
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    arguments = parser.parse_args()
    config = load_config(Path(arguments.config), ["train.global_batch_size=64", *arguments.overrides])
    with open_world(config.run.device, config.run.num_threads, 600) as world:
        inputs = open_inputs(config, world)
        built = build_model(inputs)
        pipeline = build_pipeline(built.model, built.dense_optimizer, world.device, debug=False)
        trace = Trace(threading.get_ident())
        batches = inputs.loader("train").batches()
        threading.setprofile(trace.see)
        sys.setprofile(trace.see)
        try:
            for step in range(WARM_UP_STEPS + STEPS):
                trace.counts_training = step >= WARM_UP_STEPS
                pipeline.progress(batches)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            batches.close()
    passed = trace.reading | {file: trace.reading.get(file, []) + names for file, names in trace.training.items()}
    for number, (file, names) in enumerate(passed.items(), 1):
        print(f"{number:3} {file:28} {', '.join(dict.fromkeys(names))}")
    print(f"{len(passed)} files")


class Trace:
    """Records by file the functions that data pass: in the training thread up to the loss, and in all others."""

    def __init__(self, training_thread: int) -> None:
        self.reading: dict[str, list[str]] = {}
        self.training: dict[str, list[str]] = {}
        self.counts_training = False
        self._training_thread = training_thread

    def see(self, frame: FrameType, event: str, result: Any) -> None:
        """Handle an event of the interpreter: see `sys.setprofile`."""
        code = frame.f_code
        if event not in ("call", "return") or "/recsys/" not in code.co_filename:
            return
        trains = threading.get_ident() == self._training_thread
        if trains and not self.counts_training:
            return
        if event == "return" and code.co_name == "losses":
            self.counts_training = False  # until the next step
        count = code.co_argcount + code.co_kwonlyargcount
        values = [frame.f_locals[name] for name in code.co_varnames[:count] if name != "self"]
        if event == "return":  # an array returned by a function without data is not data, but memory or an order
            values = [] if isinstance(result, np.ndarray) else [result]
        if any(map(_holds_data, values)):
            file = code.co_filename.rpartition("/recsys/")[2]
            names = (self.training if trains else self.reading).setdefault(file, [])
            names += [name for name in [code.co_name] if name not in names]


def _holds_data(value: Any) -> bool:
    if isinstance(value, DATA):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(element, DATA) for element in value)
    fields = vars(value) if hasattr(value, "__dict__") and hasattr(type(value), "__dataclass_fields__") else {}
    return any(isinstance(field, DATA) for field in fields.values())


if __name__ == "__main__":
    main()
