"""The order of a GPU's steps on CPUs, whose numbers are those of their own order up to rounding."""

import os
from typing import Any

from recsys.step import pipeline
from recsys.step.pipeline import CopyingPipeline, OverlappedPipeline
from recsys.step.step import DenseHalf
from recsys.tables import shard


def step_as_gpus() -> Any:
    """Take the pipeline of one GPU, or of several torchrec's, which has its own lookup, and return it.

    Of several, gradients are averaged by DistributedDataParallel.
    """
    of_gpu: Any = CopyingPipeline
    if os.environ.get("WORLD_SIZE", "1") != "1":
        of_gpu = OverlappedPipeline
        shard.local_lookups = lambda *_: (None, [])
    pipeline.PlainPipeline = of_gpu  # type: ignore[misc]
    DenseHalf.late_exchange = property(lambda self: True, lambda self, late: None)  # type: ignore[assignment]
    return of_gpu
