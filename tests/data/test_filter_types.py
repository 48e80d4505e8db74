"""Filters of columns whose types Python has no values of, and of those that compare with no literal."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.parquet import open_dataset


def write(path: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_nanoseconds_in_a_list_of_times(tmp_path: Path) -> None:
    """Python's times end at microseconds."""
    path = write(tmp_path / "a.parquet", t=pa.array([1, 2, 3, None], pa.timestamp("ns")))
    moments = [f"1970-01-01 00:00:00.00000000{i}" for i in (1, 3, 4)]
    for text, expected in ((f"t in {moments}", 2), (f"t not in {moments}", 1)):
        assert open_dataset("data.train", str(path), {"t": "this test"}, filter=text).num_rows == expected
