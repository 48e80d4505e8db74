"""Distributed training of user-item models with sharded, hashed, mixed-precision embedding tables.

A room may import from those above it:

    errors       errors that end a run, each told in one sentence
    config/      what a run may be told: every key with its type, default, bounds and meaning
    runtime/     the process among others: rank, device, collectives, files, logs, signals, versions
    report/      pages on runs, made of the files that they leave; where their figures go
    ids/         raw ids to table rows: hashes, vocabularies, statistics
    data/        Parquet to batches: sources, footers, filters, order, decoding, windows, collation, the loader
    tables/      the sharded half: tables for torchrec, their bytes, the plan, sharded and replicated tables
    models/      the dense half: models, their blocks and losses, metrics
    step/        one step: look up, compute, agree, update
    checkpoint/  saving, loading, verifying; tables as files
    memory/      will it fit, how long will a step take, what was taken: a traced step, prediction, reports, --dry-run
    training/    a run from its config to its result: the loop, evaluation, resume
    serving/     what is done with a finished run
    datasets/    public, synthetic and delimited data to Parquet, for `recsys prepare`

A batch: data/loader → data/decode → data/window → data/collate → step/pipeline → step/step → models/… → its loss.
"""

from importlib import import_module
from typing import Any

_API = ("Run", "open_run", "train")


def __getattr__(name: str) -> Any:
    """Import the API at its first use, so that `import recsys` takes no time."""
    if name not in _API:
        raise AttributeError(f"module 'recsys' has no attribute '{name}'")
    import_module("recsys.runtime.environment").prepare_environment()
    import_module("recsys.runtime.versions").check_versions()  # libraries that do not go together crash as they load
    return getattr(import_module("recsys.serving.api"), name)
