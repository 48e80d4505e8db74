"""Profiler traces of some training steps, for chrome://tracing or Perfetto, and a text on where their time went."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from recsys.errors import why
from recsys.runtime.files import replace_file, replacing
from recsys.runtime.logs import logger

_SKIPPED_STEPS = 10  # the first steps take longer
_WARM_UP_STEPS = 2  # of the profiler itself
# An event belongs to the first part whose pattern is in its name or, if none is, in the name of an event that called
# it. Names are those of torch, torchrec, FBGEMM and this package.
_PARTS = {
    "waiting for data": r"## (next_batch|load_batch)",
    "exchange": r"c10d::|nccl:|gloo:|all2all|all_to_all|AllToAll|All2All|ReduceScatter|AllGather|all_gather|"
    r"\bwait\(\)|Awaitable|sparse_data_dist|output_dist|record_param_comms",
    "update": r"## tables: update|Optimizer\.step|## optimizer|embedding_backward",
    "lookup": r"\[lookup\]|fbgemm::|split_embedding|dist_init",
}
_DENSE, _OF_MODEL = "dense", r"aten::|Backward\d*$|recsys::|autograd::engine|DistributedDataParallel"
_PYTHON = "Python and the rest"
_TRY = {
    "waiting for data": "more data.num_threads or data.prefetch_batches, larger row groups, a nearer disk",
    "exchange": "a larger train.global_batch_size, FP16 as precision.forward_wire and backward_wire",
    "update": "optimizer.tables.name=rowwise_adagrad, narrower tables, fewer ids a row",
    "lookup": "a smaller features.X.max_length, narrower tables, data_type: FP16",
    _DENSE: "precision.autocast=bf16 where the device is fast at it, train.compile=true, narrower layers",
    _PYTHON: "a larger train.global_batch_size, so that each step does more",
}
_STEP = "ProfilerStep"


@contextmanager
def traced_steps(num_steps: int, path: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Trace steps 13 … 12 + `num_steps`; yield a function to be called after every step.

    Lookups and updates of tables are marked `## tables: …`; allocations within these marks are those of tables.

    Args:
        num_steps: 0: no step is traced.
        path: of the JSON file; a text is written next to it, and its folder is made. If training ends earlier, neither
            is written.
    """
    if not num_steps:
        yield lambda: None
        return
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    path.parent.mkdir(exist_ok=True)

    def write(done: profile) -> None:
        try:
            with replacing(path) as aside:
                done.export_chrome_trace(str(aside))
                with aside.open("rb") as file:  # because Kineto does not report errors
                    file.seek(-2, os.SEEK_END)
                    if b"}" not in file.read():
                        raise OSError("it is cut short, as on a full disk")
            text = profile_text(done.events() or (), path.stem.replace("_", " "))
            replace_file(path.with_suffix(".txt"), text)
        except OSError as error:
            logger.warning("'%s' cannot be written (%s); training continues without it", path, why(error))

    with profile(
        activities=activities,
        schedule=schedule(skip_first=_SKIPPED_STEPS, wait=0, warmup=_WARM_UP_STEPS, active=num_steps, repeat=1),
        on_trace_ready=write,
        profile_memory=True,
    ) as profiler:
        yield profiler.step


def profile_text(events: Sequence[Any], where: str) -> str:
    """Return ten lines on how the training thread spent the time of the profiled steps.

    Each event counts with its own time, without the events that it called. With a GPU, this is the time of the host,
    which waits for it.

    Args:
        events: `torch.profiler.profile.events()`. where: the rank, for the first line.
    """
    thread, num_steps = None, 0
    seconds = dict.fromkeys([*_PARTS, _DENSE, _PYTHON], 0.0)
    for event in events:
        if event.name.startswith(_STEP):
            thread, num_steps = event.thread, num_steps + 1
    for event in events:
        part = _part_of(event) if event.thread == thread else None
        if part is not None:
            seconds[part] += event.self_cpu_time_total / 1e6
    total, num_steps, width = sum(seconds.values()) or 1.0, max(1, num_steps), max(map(len, seconds))
    lines = [f"{where}: {num_steps} steps of {1000 * total / num_steps:.2f} ms"]
    for name, value in seconds.items():
        lines.append(f"{name:<{width}}  {value / total:6.1%}  {1000 * value / num_steps:9.2f} ms a step")
    largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:3]
    return "\n".join([*lines, *(f"{name}: try {_TRY[name]}" for name in largest)]) + "\n"


def _part_of(event: Any) -> str | None:
    """Return the part that an event, or an event that called it, belongs to; None outside the profiled steps."""
    part, own = None, _DENSE if re.search(_OF_MODEL, event.name) else _PYTHON
    while event is not None:
        if event.name.startswith(_STEP):
            return part or own
        part = part or _named(event.name)
        event = event.cpu_parent
    return None


@lru_cache(maxsize=4096)
def _named(name: str) -> str | None:
    return next((part for part, pattern in _PARTS.items() if re.search(pattern, name)), None)
