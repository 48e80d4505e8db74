"""Filters of columns whose types Python has no values of, and of those that compare with no literal."""

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import open_columns

from recsys.data.conditions import Bounds
from recsys.data.filters import parse_filter
from recsys.data.parquet import open_dataset, read_column
from recsys.errors import UserError


def write(path: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_nanoseconds_in_a_list_of_times(tmp_path: Path) -> None:
    """Python's times end at microseconds."""
    path = write(tmp_path / "a.parquet", t=pa.array([1, 2, 3, None], pa.timestamp("ns")))
    moments = [f"1970-01-01 00:00:00.00000000{i}" for i in (1, 3, 4)]
    for text, expected in ((f"t in {moments}", 2), (f"t not in {moments}", 1)):
        assert open_dataset("data.train", str(path), {"t": "this test"}, filter=text).num_rows == expected


@pytest.mark.parametrize("dtype", [pa.time32("ms"), pa.time64("us"), pa.binary(16)])  # the last one of UUIDs
def test_no_literal_is_asked_for_where_none_compares(dtype: pa.DataType) -> None:
    schema = pa.schema({"x": dtype, "y": dtype})
    with pytest.raises(UserError, match=r"'x' is .*'18:30'; such a column has only 'is None', .* one of its type$"):
        parse_filter("x == '18:30'").bind(schema)
    parse_filter("x is None or x == y").bind(schema)


@pytest.mark.parametrize("dtype", [pa.large_string(), pa.large_binary()])
def test_texts_however_they_are_held(dtype: pa.DataType) -> None:
    """A log with 2 GiB of texts is held as large ones."""
    table = pa.table({"x": pa.array(["a", "b", None]).cast(dtype)})
    for text in ("x == 'b'", "x in ['b', 'c']"):
        assert parse_filter(text).bind(table.schema).mask(table).to_pylist() == [False, True, None]


@pytest.mark.parametrize("name", ["µs", "gro\u0308ße", "ﬁle", "µs.ﬁle"])
def test_names_of_columns_are_taken_as_they_are_written(tmp_path: Path, name: str) -> None:
    """Python reads these names as others, with which they look alike."""
    pq.write_table(pa.table({"row": [0, 1], name: [1, 2]}), tmp_path / "a.parquet")
    dataset = open_columns(tmp_path, "row", filter=f"row < 2 and\n {name} > 1")
    assert read_column(dataset, "row").to_pylist() == [1]


def test_a_long_list_of_literals_takes_little_memory_for_many_row_groups() -> None:
    row_groups, dtypes = 2000, pa.schema({"x": pa.int64()})
    condition = parse_filter(f"x in {list(range(0, 4000, 4))}").bind(dtypes)
    ends, some, all_of_them = pa.array(range(row_groups)), np.arange(row_groups) % 3 > 0, np.ones(row_groups, bool)
    tracemalloc.start()
    outcomes = condition.outcomes({"x": Bounds(ends, ends, some, all_of_them)}, row_groups)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * row_groups  # a byte for each literal and row group would be 1000
    assert np.array_equal(outcomes.true, np.arange(row_groups) % 4 == 0) and np.array_equal(outcomes.null, some)
    [inner] = condition.parts
    assert inner._literals is inner._literals  # nor are they converted again for each row group
