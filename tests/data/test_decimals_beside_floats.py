"""Decimals in some files of a column, and floats in others."""

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.parquet import open_dataset, read_column
from recsys.serving import score


@pytest.mark.parametrize("dtype", [pa.float16(), pa.float32(), pa.float64()])
def test_decimals_keep_their_digits_beside_floats_of_other_files(dtype: pa.DataType, tmp_path: Path) -> None:
    """As halves, 1234.56 would be 1235, and 70000.01 infinite."""
    decimals = pa.array([Decimal("1234.56"), Decimal("70000.01")])
    for name, column in (("a", pa.array([0.5], dtype)), ("b", decimals)):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
    dataset = open_dataset("data.train", str(tmp_path), {"x": "this test"})
    assert read_column(dataset, "x").to_pylist() == [0.5, 1234.56, 70000.01]
    assert score.unified(dtype, decimals.type) == dataset.schema.field("x").type
