"""Batches made by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.data.batch import Batch, Sampled
from recsys.data.order import Position
from recsys.data.pool import Fence

Lists = Sequence[Sequence[int]]


def jagged(lists: dict[str, Lists]) -> KeyedJaggedTensor:
    """Return the lists of each key, one list of ids per row, as a KeyedJaggedTensor."""
    rows = [row for of_key in lists.values() for row in of_key]
    ids = torch.tensor([number for row in rows for number in row], dtype=torch.int64)
    return KeyedJaggedTensor(list(lists), ids, lengths=torch.tensor([len(row) for row in rows], dtype=torch.int32))


def batch_of(
    weights: Any,
    labels: Any = None,
    lists: dict[str, Lists] | None = None,
    ids: KeyedJaggedTensor | None = None,
    sampled: Sampled | None = None,
) -> Batch:
    """Return a batch of rows with these weights, and labels [rows] or [rows, labels]; parts not given are empty."""
    rows = len(weights)
    numbers = np.zeros((rows, 0)) if labels is None else np.asarray(labels)
    return Batch(
        ids=jagged({"id": [[]] * rows}) if ids is None else ids,
        floats=torch.zeros(rows, 0),
        labels=torch.from_numpy(numbers).float().view(rows, *(numbers.shape[1:] or (1,))),
        weights=torch.from_numpy(np.asarray(weights)).float(),
        lists=None if lists is None else jagged(lists),
        num_rows=rows,
        num_bad_rows=0,
        micro_batches=(0, rows),
        position=Position(),
        fence=Fence(),
        sampled=sampled,
    )
