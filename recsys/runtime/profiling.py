"""Profiler traces of some training steps, for chrome://tracing or Perfetto, and in words where their time went."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from recsys.errors import why
from recsys.runtime.files import replace_file, replacing
from recsys.runtime.logs import logger
from recsys.runtime.profile_text import profile_text

_SKIPPED_STEPS = 10  # whose times are those of a start
_WARM_UP_STEPS = 2  # of the profiler itself


@contextmanager
def traced_steps(num_steps: int, path: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Trace steps 13 … 12 + `num_steps`; yield a function to be called after every step.

    The lookups and updates of tables are marked `## tables: …`; allocations within are those of tables.

    Args:
        num_steps: 0 traces none.
        path: of the JSON file, whose folder is made, and beside it a text; neither is written if training ends before.
    """
    if not num_steps:
        yield lambda: None
        return
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    path.parent.mkdir(exist_ok=True)

    def write(done: profile) -> None:
        try:
            with replacing(path) as aside:
                done.export_chrome_trace(str(aside))
                with aside.open("rb") as file:  # Kineto tells of no error
                    file.seek(-2, os.SEEK_END)
                    if b"}" not in file.read():
                        raise OSError("it is cut short, as on a full disk")
            text = profile_text(done.events() or (), path.stem.replace("_", " "))
            replace_file(path.with_suffix(".txt"), text)
        except OSError as error:
            logger.warning("'%s' cannot be written (%s); training goes on without it", path, why(error))

    with profile(
        activities=activities,
        schedule=schedule(skip_first=_SKIPPED_STEPS, wait=0, warmup=_WARM_UP_STEPS, active=num_steps, repeat=1),
        on_trace_ready=write,
        profile_memory=True,
    ) as profiler:
        yield profiler.step
