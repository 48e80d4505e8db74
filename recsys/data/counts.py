"""How often each table row occurs in a dataset."""

import numpy as np

from recsys.data.collate import BatchSpec, IdColumn, convert
from recsys.data.order import Segment
from recsys.data.parquet import Dataset, SegmentReader


def count_ids(dataset: Dataset, part: IdColumn, num_embeddings: int, rank: int, world_size: int) -> np.ndarray:
    """Return how often a column holds each table row: int64 [num_embeddings], over this rank's share of the data."""
    assert part.column is not None
    reader = SegmentReader([part.column])
    spec = BatchSpec(ids=[part], floats=[])
    counts = np.zeros(num_embeddings, np.int64)
    for group in dataset.row_groups[rank::world_size]:
        table = reader.read(Segment(group.path, group.index, 0, group.num_rows))
        counts += np.bincount(convert(table, spec).ids[0].values, minlength=num_embeddings)
    return counts
