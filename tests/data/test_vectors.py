"""Float features of several numbers a row: lists of one length become columns of a batch's floats."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversion import refusal
from parquet_files import open_columns
from rows import OPTIONS

from recsys.data.convert import convert_floats
from recsys.data.dataset import Dataset
from recsys.data.loader import Loader
from recsys.data.spec import BatchSpec, FloatColumn, IdColumn, Transform
from recsys.ids import IdentityMapping

VALUES = [[1.0, 2.0, 3.0], None, [4.0, None, 6.0]]
ROWS = 100


def vectors(**settings: Any) -> FloatColumn:
    return FloatColumn("text", "v", **{"dim": 3, **settings})


@pytest.mark.parametrize(
    "array",
    [
        pa.array(VALUES, pa.list_(pa.float32())),
        pa.array(VALUES, pa.list_(pa.float16())),
        pa.array(VALUES, pa.list_(pa.int8())),
        pa.array([None if v is None else [x and Decimal(x) for x in v] for v in VALUES], pa.list_(pa.decimal128(9, 2))),
        pa.array([[9.0, 9.0], *VALUES, [9.0]], pa.list_(pa.float64()))[1:4],
        pa.array(VALUES, pa.list_(pa.float64())).take(pa.array([0, 1, 2])),
    ],
    ids=["float32", "float16", "int8", "decimal", "slice", "taken"],
)
def test_nulls_are_filled(array: pa.Array) -> None:
    def as_list(**settings: Any) -> list[list[float]]:
        return convert_floats(array, vectors(**settings)).tolist()

    assert as_list() == [[1, 2, 3], [0, 0, 0], [4, 0, 6]]
    assert as_list(fill=(7.0, 8.0, 9.0)) == [[1, 2, 3], [7, 8, 9], [4, 8, 6]]
    scaled = Transform(clip=(2.0, None), mean=(2.0, 0.0, 1.0), std=(0.5, 2.0, 0.0))
    assert as_list(transform=scaled, fill=1.0) == [[0, 1, 2], [0, 1, 1], [4, 1, 5]]
    assert "holds 4 nulls, but none are allowed" in refusal(lambda: as_list(fill=None))


def test_a_column_of_nulls_without_a_type() -> None:
    assert convert_floats(pa.nulls(2), vectors(fill=0.5)).tolist() == [[0.5] * 3] * 2


def test_an_empty_list_is_as_null() -> None:
    """As `recsys prepare csv --list` writes for nothing between two commas."""
    array = pa.array([[], [1.0, 2.0, 3.0], None])
    assert convert_floats(array, vectors(fill=0.5)).tolist() == [[0.5] * 3, [1, 2, 3], [0.5] * 3]
    assert "holds 6 nulls" in refusal(lambda: convert_floats(array, vectors(fill=None)))


def test_what_is_under_a_null_list_is_none_of_it() -> None:
    values = pa.array(np.arange(9.0))
    array = pa.ListArray.from_arrays(pa.array([0, 3, 6, 9], pa.int32()), values, mask=pa.array([False, True, False]))
    assert convert_floats(array, vectors()).tolist() == [[0, 1, 2], [0, 0, 0], [6, 7, 8]]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (pa.array([[1.0], [1.0, 2.0, 3.0]]), "holds a list of 1 numbers, where features.text.dim=3 needs 3"),
        (pa.array([1.0]), "must hold lists of 3 numbers, found double; for a number drop its dim"),
        (pa.array([["a", "b", "c"]]), "must hold lists of 3 numbers, found list<item: string>; write them as numbers"),
        (pa.array([[1.0, 2.0, float("nan")]]), "holds nan, but only finite numbers"),
    ],
)
def test_a_mistake_is_told(array: pa.Array, said: str) -> None:
    assert f"column 'v' (text) {said}" in refusal(lambda: convert_floats(array, vectors()))


def dataset(folder: Path) -> Dataset:
    """Return rows whose vectors tell their numbers, in row groups of 7."""
    numbers = np.arange(ROWS)
    flat = np.stack([numbers, numbers + 0.5, -numbers], axis=1).astype(np.float32).reshape(-1)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(flat), 3)
    columns = {"row": numbers, "v": fixed, "x": numbers * 2.0, "pair": [[i, 1.0] for i in numbers.tolist()]}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=7)
    return open_columns(folder / "rows.parquet", *columns)


@pytest.mark.parametrize("batch_size", [8, 30, ROWS + 9])
def test_a_row_keeps_its_vector_whatever_the_order(batch_size: int, tmp_path: Path) -> None:
    floats = [FloatColumn("x", "x"), vectors(), FloatColumn("pair", "pair", dim=2)]
    spec = BatchSpec([IdColumn("row", "row", IdentityMapping(ROWS))], floats)
    seen = []
    for batch in Loader(dataset(tmp_path), spec, OPTIONS, batch_size).batches():
        lists = batch.ids["row"]
        there = lists.lengths().bool()
        seen += (rows := lists.values().tolist())
        expected = [[2.0 * i, i, i + 0.5, -i, i, 1.0] for i in rows]
        assert batch.floats[there].tolist() == expected
        assert not batch.floats[~there].any()
    assert sorted(seen) == list(range(ROWS)) and seen != sorted(seen)
