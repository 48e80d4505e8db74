"""Steps in the order of GPUs, run on CPUs; apart from rounding, numbers are those of the order of CPUs."""

import os
from typing import Any

from recsys.step import pipeline
from recsys.step.pipeline import CopyingPipeline, OverlappedPipeline
from recsys.step.step import DenseHalf
from recsys.tables import shard


def step_as_gpus() -> Any:
    """Let CPUs use the pipeline of one GPU, or on several ranks torchrec's, which has its own lookup; return it.

    With several ranks, DistributedDataParallel averages the gradients.
    """
    of_gpu: Any = CopyingPipeline
    if os.environ.get("WORLD_SIZE", "1") != "1":
        of_gpu = OverlappedPipeline
        shard.local_lookups = lambda *_: (None, [])
    pipeline.PlainPipeline = of_gpu  # type: ignore[misc]
    DenseHalf.late_exchange = property(lambda self: True, lambda self, late: None)  # type: ignore[assignment]
    return of_gpu
