"""How often each table row occurs in a dataset."""

from dataclasses import replace

import numpy as np

from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.spec import BatchSpec, IdColumn
from recsys.data.window import Ragged, convert_table


def count_ids(dataset: Dataset, part: IdColumn, num_embeddings: int, rank: int, world_size: int) -> np.ndarray:
    """Return how often a column holds each table row: int64 [num_embeddings], over this rank's share of the data."""
    assert part.column is not None
    reader = SegmentReader(dataset, [part.column])
    spec = BatchSpec(ids=[replace(part, statistics=None)], floats=[])
    counts = np.zeros(num_embeddings, np.int64)
    for i in range(rank, len(dataset.row_groups), world_size):
        columns = convert_table(reader.read(dataset.row_groups.segment(i)), spec)
        found = columns.ids[0]
        rows = found.values if isinstance(found, Ragged) else columns.scalars[found]
        counts += np.bincount(rows, minlength=num_embeddings)
    return counts
