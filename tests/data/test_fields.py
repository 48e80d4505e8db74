"""Fields of structs as columns: the same as the same values in columns of their own, wherever these are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import open_columns
from rows import IDENTITY, OPTIONS

from recsys.data.batch import Batch
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.loader import Loader
from recsys.data.parquet import open_dataset, read_column, read_head
from recsys.data.spec import BatchSpec, FloatColumn, IdColumn
from recsys.errors import UserError

NAMES = ["device.os", "device.build", "geo.city.name", "geo.tags", "items.id", "items.info.title", "plain", "label"]


def drawn(seed: int, num_rows: int) -> pa.Table:
    """Rows in which any part may be null, structs and lists and what lies in them."""
    draw = np.random.default_rng(seed)

    def some(value: Any) -> Any:
        return None if draw.random() < 0.2 else value

    def row(number: int) -> dict[str, Any]:
        items = [
            some({"id": some(int(draw.integers(9))), "info": some({"title": some(f"t{draw.integers(5)}")})})
            for _ in range(draw.integers(4))
        ]
        city = some({"name": some(f"c{draw.integers(4)}"), "size": 1.5})
        return {
            "device": some({"os": some(f"os{draw.integers(3)}"), "build": some(int(draw.integers(100)))}),
            "geo": some({"city": city, "tags": some([some(int(tag)) for tag in draw.integers(7, size=2)])}),
            "items": some(items),
            "plain": number,
            "label": number % 2,
        }

    item = pa.struct({"id": pa.int64(), "info": pa.struct({"title": pa.string()})})
    geo = pa.struct({"city": pa.struct({"name": pa.string(), "size": pa.float64()}), "tags": pa.list_(pa.int64())})
    os = pa.dictionary(pa.int32(), pa.string())  # of which writers count no null of the struct
    kinds = {"device": pa.struct({"os": os, "build": pa.int32()}), "geo": geo, "items": pa.list_(item)}
    schema = pa.schema({**kinds, "plain": pa.int64(), "label": pa.int8()})
    return pa.Table.from_pylist([row(number) for number in range(num_rows)], schema)


def value_of(row: Any, steps: list[str]) -> Any:
    """What a path means: of null it is null, of a list the list of what it is of each element."""
    if isinstance(row, list):
        return [value_of(element, steps) for element in row]
    return row if row is None or not steps else value_of(row[steps[0]], steps[1:])


def flat(table: pa.Table) -> pa.Table:
    """The same values in columns of their own, under the names of the fields."""
    schema = {"device.os": pa.string(), "geo.city.name": pa.string(), "items.info.title": pa.list_(pa.string())}
    schema |= {"device.build": pa.int32(), "geo.tags": pa.list_(pa.int64()), "items.id": pa.list_(pa.int64())}
    schema |= {"plain": pa.int64(), "label": pa.int8()}
    rows = table.to_pylist()
    return pa.table({n: pa.array([value_of(row, n.split(".")) for row in rows], schema[n]) for n in NAMES})


def both(folder: Path, seed: int, num_rows: int, **options: Any) -> tuple[Path, Path]:
    """Write rows with structs, and flat; return the folders."""
    nested = drawn(seed, num_rows)
    for name, table in (("nested", nested), ("flat", flat(nested))):
        (folder / name).mkdir()
        for number, start in enumerate(range(0, num_rows, 100)):
            part, path = table.slice(start, 100), folder / name / f"{number}.parquet"
            pq.write_table(part, path, row_group_size=30, write_page_checksum=True, **options)
    return folder / "nested", folder / "flat"


def opened(folder: Path, filter: str | None = None, **options: Any) -> Dataset:
    return open_columns(folder, *NAMES, filter=filter, **options)


WRITERS = {
    "plain": {"use_dictionary": False},
    "of Spark": {"version": "1.0", "data_page_size": 64},
    "of old names": {"use_compliant_nested_type": False, "data_page_version": "2.0"},
    "without a schema of Arrow's": {"store_schema": False},
}


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_field_is_read_as_a_column_of_its_own(seed: int, options: dict[str, Any], tmp_path: Path) -> None:
    nested, expected = (opened(folder) for folder in both(tmp_path, seed, 250, **options))
    assert nested.schema == expected.schema
    assert nested.row_groups.num_bytes.tolist() == expected.row_groups.num_bytes.tolist()
    for name in NAMES:
        array = read_column(nested, name)
        array.validate(full=True)
        assert array.to_pylist() == read_column(expected, name).to_pylist(), name
    assert read_head(nested, 20).to_pylist() == read_head(expected, 20).to_pylist()


@pytest.mark.parametrize(
    "text",
    [
        "device.os == 'os1'",
        "device.build < 30 and plain > 40",
        "geo.city.name in ['c0', 'c2'] or device.os is None",
        "col('device.build') >= plain",
        "items.id is None",
        "not device.build > 50",
    ],
)
def test_filters_by_fields(text: str, tmp_path: Path) -> None:
    nested, expected = both(tmp_path, 5, 200)
    found, wanted = (opened(folder, text, cache=tmp_path / f"{folder.name}.footers") for folder in (nested, expected))
    assert 0 < found.num_rows < 200
    again = opened(nested, text, cache=tmp_path / "nested.footers")
    for dataset in (found, again):
        assert dataset.row_groups.num_rows.tolist() == wanted.row_groups.num_rows.tolist()
        assert read_column(dataset, "plain").to_pylist() == read_column(wanted, "plain").to_pylist()


def test_statistics_of_a_field_leave_row_groups_out(tmp_path: Path) -> None:
    rows = [{"when": {"day": number // 50}} for number in range(200)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=50)
    dataset = open_columns(tmp_path, "when.day", filter="when.day == 2")
    assert dataset.row_groups.index.tolist() == [2] and dataset.num_rows == 50


SPEC = BatchSpec(
    ids=[
        IdColumn("row", "plain", IDENTITY),
        IdColumn("build", "device.build", IDENTITY),
        IdColumn("tags", "geo.tags", IDENTITY),
        IdColumn("history", "items.id", IDENTITY, max_length=2),
    ],
    floats=[FloatColumn("number", "device.build", 0.5)],
    labels=[FloatColumn("label", "label", None)],
)


def content(batch: Batch) -> list[Any]:
    ids = {key: [values.tolist() for values in batch.ids[key].to_dense()] for key in [part.name for part in SPEC.ids]}
    return [ids, batch.floats.tolist(), batch.labels.tolist(), batch.weights.tolist(), batch.position]


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_are_those_of_flat_columns(world_size: int, num_threads: int, tmp_path: Path) -> None:
    """Shuffled, by several threads, on each of two ranks, over two epochs, and from a position in the middle."""
    nested, expected = (opened(folder) for folder in both(tmp_path, 9, 230))
    options = replace(OPTIONS, num_threads=num_threads)
    for rank in range(world_size):
        loaders = [Loader(dataset, SPEC, options, 24, rank, world_size) for dataset in (nested, expected)]
        found, wanted = ([content(batch) for batch in loader.batches(num_epochs=2)] for loader in loaders)
        assert found == wanted and len(found) == 20
        later = [content(batch) for batch in loaders[0].batches(wanted[6][-1], num_epochs=2)]
        assert later == wanted[7:]


def test_only_the_field_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(drawn(0, 50), tmp_path / "a.parquet")
    read, original = dict[str, pa.DataType](), pq.ParquetFile.read_row_group

    def spy(file: pq.ParquetFile, *arguments: Any, **options: Any) -> pa.Table:
        table = original(file, *arguments, **options)
        read.update(zip(table.column_names, table.schema.types, strict=True))
        return table

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    dataset = open_columns(tmp_path, "device.build", "items.id")
    SegmentReader(dataset).row_group(0)
    item = pa.list_(pa.struct({"id": pa.int64()}))
    assert read == {"device": pa.struct({"build": pa.int32()}), "items": item}


def test_a_column_of_the_same_name_goes_before_a_field(tmp_path: Path) -> None:
    """Also where one file has the column and another the struct, and where fields have dots themselves."""
    struct = pa.array([{"os": "in", "a.b": 7, "a": {"b": 8, "c.d": 9}}] * 2)
    pq.write_table(pa.table({"device": struct, "device.os": ["out", None]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x.y": [3, 4], "device": struct}), tmp_path / "b.parquet")
    names = ["device.os", "device.a.b", "device.a.c.d"]
    dataset = open_columns(tmp_path, *names, filter="device.a.b == 7")
    assert read_column(dataset, "device.os").to_pylist() == ["out", None, "in", "in"]
    assert read_column(dataset, "device.a.b").to_pylist() == [7] * 4
    assert read_column(dataset, "device.a.c.d").to_pylist() == [9] * 4


def test_structs_may_have_other_fields_and_types_in_each_file(tmp_path: Path) -> None:
    for name, kind in {"a": {"x": pa.int8(), "n": pa.int8()}, "b": {"n": pa.int64()}}.items():
        device = pa.array([{"n": 5}, None], pa.struct(kind))
        pq.write_table(pa.table({"device": device}), tmp_path / f"{name}.parquet")
    dataset = open_columns(tmp_path, "device.n")
    assert read_column(dataset, "device.n").equals(pa.array([5, None, 5, None]))
    with pytest.raises(UserError, match=r"b.parquet' has no column 'device.x'.* \(it has: device.n\)"):
        open_dataset("data.train", str(tmp_path), {"device.x": "config key 'features.x'"})


def test_what_lies_in_maps_and_in_lists_of_lists_is_refused(tmp_path: Path) -> None:
    kinds = {"map": pa.map_(pa.string(), pa.int64()), "deep": pa.list_(pa.list_(pa.struct({"a": pa.int64()})))}
    pq.write_table(pa.table({name: pa.nulls(1, kind) for name, kind in kinds.items()}), tmp_path / "a.parquet")
    for name in ("map.value", "map.key_value.value", "deep.a", "deep.list.element"):
        with pytest.raises(UserError, match=rf"has no column '{name}'.* \(it has: map, deep\)"):
            open_dataset("data.train", str(tmp_path), {name: "config key 'features.x'"})


def test_one_of_two_structs_of_a_name_is_not_chosen(tmp_path: Path) -> None:
    columns = [pa.array([{"os": number}]) for number in (1, 2)]
    pq.write_table(pa.Table.from_arrays(columns, ["device", "device"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has 2 columns 'device'; keep only one"):
        open_columns(tmp_path, "device.os")
