"""Footers of single row groups: what they say is what Arrow reads of the whole footer, and costs less of large ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data import group_footers
from recsys.data.decode import SegmentReader
from recsys.data.footers import footer_of, parsed_footer
from recsys.data.parquet import open_dataset
from recsys.data.storage import BadDataError
from recsys.data.thrift import row_group_bounds, schema_end, with_one_row_group

COLUMNS = {"user": "config key 'features.user'", "x": "config key 'features.x'"}
_LAST = {
    "flat": pa.array([0.5, None, 2.0, 3.0]),
    "list": pa.array([[1], [], None, [2, 3]]),
    "struct": pa.array([{"a": 1, "b": {"c": "x"}}] * 4),
    "list of structs": pa.array([[{"a.b": 1}], [], None, [{"a.b": 2}]]),
    "map": pa.array([[("k", 1)], [], None, [("l", 2)]], pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("last", _LAST)
def test_bounds_of_row_groups(tmp_path: Path, last: str) -> None:
    table = pa.table({"user": [1, 2, 3, 4], "s": [{"a": 1}] * 4, "last.of all": _LAST[last]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    footer = footer_of((tmp_path / "a.parquet").read_bytes())
    whole, bounds = parsed_footer(footer), row_group_bounds(footer)
    assert len(bounds) == 5
    for i in range(4):
        group = footer[bounds[i] : bounds[i + 1]]
        one = parsed_footer(with_one_row_group(footer[: schema_end(footer)], group, footer[bounds[-1] :]))
        assert one.num_row_groups == 1
        assert one.row_group(0).to_dict() == whole.row_group(i).to_dict()
        assert (one.schema, one.metadata, one.created_by) == (whole.schema, whole.metadata, whole.created_by)


@pytest.mark.parametrize("names", [["x", "x"], ["x", "y", "x"]])
def test_last_columns_of_one_name_are_told(tmp_path: Path, names: list[str]) -> None:
    table = pa.Table.from_arrays([pa.array([1, 2])] * len(names), names)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    with pytest.raises(OSError, match="cannot be told apart"):
        row_group_bounds(footer_of((tmp_path / "a.parquet").read_bytes()))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every footer is a large one; yields the bytes of those that Arrow parses."""
    sizes: list[int] = []
    monkeypatch.setattr(group_footers, "_LARGE_BYTES", 0)
    monkeypatch.setattr(
        group_footers, "parsed_footer", lambda content: (sizes.append(len(content)), parsed_footer(content))[1]
    )
    yield sizes


def test_large_footers_are_not_parsed_whole(tmp_path: Path, parsed: list[int]) -> None:
    for name in ("a", "b"):
        table = pa.table({"user": range(200), "x": [0.5] * 200, **{f"c{i}": range(200) for i in range(5)}})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=1)
    dataset = open_dataset("data.train", str(tmp_path), COLUMNS)
    reader, whole = SegmentReader(dataset), pq.read_metadata(tmp_path / "a.parquet").serialized_size
    for i in range(399, -1, -7):
        assert reader.read(dataset.row_groups.segment(i)).to_pydict() == {"user": [i % 200], "x": [0.5]}
    assert len(parsed) == 58 and max(parsed) < whole / 40
    assert reader.head(5, 1).to_pydict() == {"user": [5], "x": [0.5]}


def test_files_with_large_footers_that_change_or_are_damaged_are_named(tmp_path: Path, parsed: list[int]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"user": range(4), "x": [0.5] * 4}), path, row_group_size=1)
    dataset = open_dataset("data.train", str(path), COLUMNS)
    content, begins = path.read_bytes(), len(path.read_bytes()) - 8 - len(footer_of(path.read_bytes()))
    for start, stop in ((begins, begins + 40), (begins + 200, begins + 400)):
        path.write_bytes(content[:start] + bytes(stop - start) + content[stop:])
        with pytest.raises(BadDataError, match=r"a\.parquet"):
            SegmentReader(dataset).read(dataset.row_groups.segment(3))
    pq.write_table(pa.table({"user": range(2), "x": [0.5] * 2}), path, row_group_size=1)
    fewer = replace(dataset, file_sizes=np.array([path.stat().st_size]))
    with pytest.raises(BadDataError, match=r"row group 3 of .* is not what it was when the run began .it has 0 rows"):
        SegmentReader(fewer).read(fewer.row_groups.segment(3))
