"""Filters that take a share of the rows by a seed."""

import pyarrow as pa
import pyarrow.parquet as pq
from parquet_files import open_columns

from recsys.data.decode import SegmentReader
from recsys.data.parquet import read_head


def test_a_sample_is_the_same_rows_wherever_the_files_lie(tmp_path):
    """By seed and row; in heads, counts and tables alike."""
    for name in ("a", "b"):
        pq.write_table(
            pa.table({"x": range(6000), "y": [name] * 6000}), tmp_path / f"{name}.parquet", row_group_size=2000
        )

    def rows(folder, text):
        dataset = open_columns(folder, "x", filter=text)
        groups = [table["x"].to_pylist() for table in SegmentReader(dataset).tables()]
        assert list(map(len, groups)) == dataset.row_groups.num_rows.tolist()
        assert read_head(dataset, 50)["x"].to_pylist() == groups[0][:50]
        return groups

    found = rows(tmp_path, "sampled(0.1, 7)")
    assert all(abs(len(group) - 200) < 5 * 13.4 for group in found)
    places = [{row % 2000 for row in group} for group in found]
    assert all(len(a & b) < 60 for a in places for b in places if a is not b), "each row group has its own"
    (tmp_path / "copy").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"{name}.parquet").rename(tmp_path / "copy" / f"{name}.parquet")
    assert rows(tmp_path / "copy", "sampled(0.1, 7)") == found != rows(tmp_path / "copy", "sampled(0.1, 8)")
    small = [set(group) for group in rows(tmp_path / "copy", "sampled(0.05, 7)")]
    assert all(a < set(b) for a, b in zip(small, found, strict=True))
    both = rows(tmp_path / "copy", "x < 1000 or sampled(0.1, 7)")
    assert both[1:3] + both[4:] == found[1:3] + found[4:]
    assert both[0] == [*range(1000), *(x for x in found[0] if x >= 1000)]
    rest = rows(tmp_path / "copy", "not sampled(0.1, 7)")
    assert [sorted(a + b) for a, b in zip(rest, found, strict=True)] == [
        [*range(i, i + 2000)] for i in (0, 2000, 4000)
    ] * 2
    assert rows(tmp_path / "copy", "sampled(1, 7)") == [[*range(i, i + 2000)] for i in (0, 2000, 4000)] * 2
