"""Files whose columns differ in type, read as one data set."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from parquet_files import open_columns

from recsys.data.loader import Loader, LoaderOptions
from recsys.data.spec import BatchSpec, IdColumn
from recsys.ids import HashMapping, IdentityMapping


def options(window_bytes: int = 1 << 20) -> LoaderOptions:
    return LoaderOptions(
        seed=1,
        shuffle=window_bytes > 1,
        num_streams=1,
        window_bytes=window_bytes,
        num_threads=0,
        prefetch_batches=1,
        pin_device=None,
    )


def test_files_of_different_but_fitting_types(tmp_path):
    columns: list[Any] = [
        pa.array(["x", "y"]).dictionary_encode(),
        pa.array(["z", "x"]).dictionary_encode(),
        pa.nulls(2),
    ]
    histories = [pa.array([[1], []], pa.list_(pa.int32())), pa.array([[2], None]), pa.array([[], []])]
    for f, (column, history) in enumerate(zip(columns, histories, strict=True)):
        pq.write_table(pa.table({"id": column, "history": history}), tmp_path / f"{f}.parquet")
    dataset = open_columns(tmp_path, "id", "history")
    mapping = HashMapping(1000, 0)
    x, y, z = mapping.rows(pa.array(["x", "y", "z"])).tolist()
    spec = BatchSpec([IdColumn("id", "id", mapping), IdColumn("history", "history", IdentityMapping(10))], [])
    for window_bytes in (1, 1 << 20):
        (batch,) = Loader(dataset, spec, options(window_bytes), 6).batches()
        pairs = [[t.tolist() for t in batch.ids[key].to_dense()] for key in ("id", "history")]
        found = sorted(zip(*pairs, strict=True))
        assert found == sorted([([x], [1]), ([y], []), ([z], [2]), ([x], []), ([0], []), ([0], [])])
