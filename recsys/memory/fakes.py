"""A step of the dense part and its inputs, on tensors without memory."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.config import Config
from recsys.config.features import dims_of, float_columns, has_weighted_ids, id_features, table_of_feature
from recsys.data.batch import Batch, Sampled
from recsys.data.order import Position
from recsys.data.pool import Fence
from recsys.memory.facts import DataFacts
from recsys.step.build import build_step
from recsys.step.step import TrainStep
from recsys.tables.row_codes import add_missing_shapes


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors without memory, and leave random generators as they were, so that training draws the same."""
    # A user's own model may draw from Python's and NumPy's generators, and torch draws numbers for fake collectives.
    python, numpy = random.getstate(), np.random.get_state()
    add_missing_shapes()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # a seed is one of the GPU's too
    # --debug checks whether values are finite, and fake tensors have no values.
    with torch.random.fork_rng(gpus), torch.autograd.set_detect_anomaly(False), FakeTensorMode():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def fake_step(config: Config) -> TrainStep:
    """Return the step of a config, with tables that are not sharded."""
    feature = config.model.needs().log_shares_of
    rows = table_of_feature(config, feature).num_embeddings if feature else 0
    return build_step(config, lambda: (torch.zeros(rows), 0))


def fake_inputs(
    config: Config,
    data: DataFacts,
    rows: int,
    bounds: tuple[int, ...],
    drawn: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[KeyedTensor | None, dict[str, JaggedTensor], Batch]:
    """Return the inputs of the dense half for a batch: vectors of rows, vectors of single ids, and the batch.

    Args:
        bounds: rows at which its micro-batches begin and end. drawn: how many of its rows are sampled items.
        dtype: type of the vectors.
    """
    batch = _batch(config, data, rows, bounds)
    if drawn:
        batch.sampled = Sampled(max(0, rows - drawn), 0)
    return *_looked_up(config, data, rows, dtype), batch


def _looked_up(
    config: Config, data: DataFacts, rows: int, dtype: torch.dtype
) -> tuple[KeyedTensor | None, dict[str, JaggedTensor]]:
    """Return the output of the tables for a batch: vectors of rows, and vectors of single ids."""
    dims, unpooled = dims_of(config), config.unpooled_tables()
    by_id = {name: dims.pop(name) for name in list(dims) if config.features[name].table in unpooled}
    values = torch.empty(rows, sum(dims.values()), dtype=dtype, requires_grad=True)
    pooled = KeyedTensor(list(dims), list(dims.values()), values) if dims else None
    lengths, jagged = torch.empty(rows, dtype=torch.int32), {}
    for name, dim in by_id.items():
        vectors = torch.empty(math.ceil(rows * data.mean_ids[name]), dim, dtype=dtype, requires_grad=True)
        jagged[name] = JaggedTensor(vectors, lengths=lengths)
    return pooled, jagged


def _batch(config: Config, data: DataFacts, rows: int, bounds: tuple[int, ...]) -> Batch:
    names = id_features(config)
    counts = [math.ceil(rows * data.mean_ids[name]) for name in names]
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    ids = KeyedJaggedTensor(
        names,
        torch.empty(ends[-1], dtype=torch.int32),
        torch.empty(ends[-1]) if has_weighted_ids(config) else None,
        lengths=torch.empty(len(names) * rows, dtype=torch.int32),
        offsets=torch.empty(len(names) * rows + 1, dtype=torch.int32),
        stride=rows,
        length_per_key=counts,
        offset_per_key=ends,
    )
    floats = torch.empty(rows, len(float_columns(config)))
    id_bounds = tuple(tuple(count * bound // rows for bound in bounds) for count in counts)
    num_labels = len(config.labels()) + len(config.taught_columns())
    dense = floats, torch.empty(rows, num_labels), torch.empty(rows)
    return Batch(ids, *dense, None, rows, 0, bounds, Position(), Fence(), id_bounds)
