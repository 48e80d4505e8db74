"""A trace of some steps, for chrome://tracing or Perfetto."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_SKIPPED_STEPS = 10  # whose times are those of a start
_WARM_UP_STEPS = 2  # of the profiler itself


@contextmanager
def traced_steps(num_steps: int, path: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after every step; steps 13 … 12 + `num_steps` are traced, with the memory they take.

    The lookups and updates of tables are marked `## tables: …`; allocations within are those of tables.

    Args:
        num_steps: 0 traces none.
        path: of the JSON file, whose folder is made; nothing is written if training ends before.
    """
    if not num_steps:
        yield lambda: None
        return
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    path.parent.mkdir(exist_ok=True)
    with profile(
        activities=activities,
        schedule=schedule(skip_first=_SKIPPED_STEPS, wait=0, warmup=_WARM_UP_STEPS, active=num_steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        profile_memory=True,
    ) as profiler:
        yield profiler.step
