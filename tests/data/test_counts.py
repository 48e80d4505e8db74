"""Counts of table rows over a dataset, shared out over the ranks."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.config import NullPolicy
from recsys.data.counts import count_ids
from recsys.data.parquet import open_dataset
from recsys.data.spec import IdColumn
from recsys.ids import IdentityMapping

HISTORIES = [[n % 7] * (n % 5) + [None] * (n % 2) for n in range(40)]


@pytest.mark.parametrize("world_size", [1, 3, 7, 50])
@pytest.mark.parametrize("null", [NullPolicy.reserved, NullPolicy.empty])
def test_ranks_together_count_every_id_once(tmp_path, world_size, null):
    table = pa.table({"history": pa.array(HISTORIES)})
    pq.write_table(table[:23], tmp_path / "a.parquet", row_group_size=6)
    pq.write_table(table[23:], tmp_path / "b.parquet", row_group_size=3)
    dataset = open_dataset("data.train", str(tmp_path), {"history": "key"}, max_rows=31)
    part = IdColumn("history", "history", IdentityMapping(10), null)
    ranks = [count_ids(dataset, part, 10, rank, world_size) for rank in range(world_size)]
    assert {counts.dtype for counts in ranks} == {np.dtype(np.int64)}
    ids = [id for history in HISTORIES[:31] for id in history if id is not None or null is NullPolicy.reserved]
    assert np.sum(ranks, axis=0).tolist() == [sum((id or 0) == row for id in ids) for row in range(10)]
