"""Columns as UUIDs, categories and views, as DuckDB, Polars and pyarrow hold them: `recsys predict`, the API and an
export read the same ids in them."""

import argparse
import subprocess
import sys
import uuid
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, run_recsys

from recsys.data import parquet
from recsys.errors import UserError
from recsys.serving.api import open_run
from recsys.serving.score import ExportError, Scorer, results_of, stored, unified

pytest.importorskip("onnxruntime")
Held = Callable[[pa.Array], pa.Array]


def as_texts(texts: pa.Array) -> pa.Array:
    return texts


def as_categories(texts: pa.Array) -> pa.Array:
    return texts.dictionary_encode()


def as_views(texts: pa.Array) -> pa.Array:
    """Categories as Polars hands them over."""
    encoded = texts.dictionary_encode()
    return pa.DictionaryArray.from_arrays(encoded.indices, encoded.dictionary.cast(pa.string_view()))


def as_plain_views(texts: pa.Array) -> pa.Array:
    return texts.cast(pa.string_view())


def uuids(ids: pa.Array) -> pa.Array:
    numbers = [uuid.UUID(int=id * 3**70 % 2**128).bytes for id in ids.to_pylist()]
    return pa.ExtensionArray.from_storage(pa.uuid(), pa.array(numbers, pa.binary(16)))


def rows(role: str, held: Held) -> pa.Table:
    """The sample with UUIDs for items, those of lists too, and texts in a column, in lists and in structs."""
    table = pq.read_table(ROOT / "data/sample" / role).combine_chunks()
    columns = {name: table[name].chunk(0) for name in table.column_names}
    ends = pa.array(np.append(0, np.cumsum(np.arange(len(table)) % 3)), pa.int32())
    tags = columns["category"].take(pa.array(np.arange(ends[-1].as_py()) * 7 % len(table)))
    history = columns["history"]
    return pa.table(
        {
            **columns,
            "item_id": uuids(columns["item_id"]),
            "history": pa.ListArray.from_arrays(history.offsets, uuids(history.values)),
            "category": held(columns["category"]),
            "tags": pa.ListArray.from_arrays(ends, held(tags)),
            "phone": pa.StructArray.from_arrays([held(columns.pop("device"))], ["name"]),
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its export, and what it predicts of the test rows, whose lists of categories lie in several
    row groups."""
    folder = tmp_path_factory.mktemp("types")
    for role in ("train", "test"):
        pq.write_table(rows(role, as_categories), folder / f"{role}.parquet", row_group_size=170)
    settings = [f"data.train={folder}/train.parquet", "data.valid=null", "data.test=null", "train.max_steps=20"]
    features = ["features.device.column=phone.name", "features.tags={table: category}"]
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={folder}/run", *settings, *features)
    run_recsys("predict", folder / "run", folder / "test.parquet", folder / "predicted")
    run_recsys("export", folder / "run", folder / "out")
    return folder


@pytest.mark.slow
def test_an_export_reads_a_file_as_training_does(run: Path) -> None:
    command = [sys.executable, run / "out/score.py", "predict", run / "test.parquet", run / "scores.parquet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = pq.read_table(run / "scores.parquet"), pq.read_table(run / "predicted")
    assert ours.drop("score").equals(theirs.drop("score"))
    np.testing.assert_allclose(ours["score"], theirs["score"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("held", [as_texts, as_categories, as_views, as_plain_views])
def test_tables_in_memory(run: Path, held: Held) -> None:
    expected = np.tile(pq.read_table(run / "predicted")["score"], 3)
    table = pa.concat_tables([rows("test", held)] * 3).combine_chunks()  # more rows than pyarrow writes at once
    for score in (Scorer(run / "out").score, open_run(run / "run").predict):
        np.testing.assert_allclose(score(table)["score"], expected, rtol=0, atol=1e-5)


def test_a_column_without_a_type_in_place_of_lists(run: Path) -> None:
    table = rows("test", as_texts)
    empty, untyped = pa.array([[]] * len(table), pa.list_(pa.string())), pa.nulls(len(table))
    for score in (Scorer(run / "out").score, open_run(run / "run").predict):
        place = table.column_names.index("tags")
        expected, found = (score(table.set_column(place, "tags", lists))["score"] for lists in (empty, untyped))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "kind", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda of: pa.list_(of, 2)]
)
@pytest.mark.parametrize("of", [pa.int64(), pa.string(), pa.string_view()], ids=str)
def test_lists_however_they_are_held(kind: Callable[[pa.DataType], pa.DataType], of: pa.DataType) -> None:
    draw = np.random.default_rng(0)
    pairs = [None if draw.random() < 0.2 else draw.integers(0, 9, 2) for _ in range(30)]
    values = [pair if pair is None else [i if of == pa.int64() else f"{i}" for i in pair.tolist()] for pair in pairs]
    if not pa.types.is_fixed_size_list(kind(of)):
        values = [pair and pair[: i % 3] for i, pair in enumerate(values)]
    for stop in range(31):
        lists = pa.array(values[:stop], kind(of))
        assert stored(lists).to_pylist() == values[:stop]
        assert stored(lists[stop // 3 : stop - 1]).to_pylist() == values[stop // 3 : stop][:-1]


def test_views_of_lists_in_any_order_that_share_values() -> None:
    starts, sizes = pa.array([8, 0, 1, 11], pa.int32()), pa.array([4, 3, 4, 0], pa.int32())
    views = pa.ListViewArray.from_arrays(starts, sizes, pa.array(range(12)))
    assert stored(views).to_pylist() == [[8, 9, 10, 11], [0, 1, 2], [1, 2, 3, 4], []]


def scored(folder: Path, data: Path, keep: list[str] | None) -> pa.Table:
    """What `score.py predict` writes."""
    words = argparse.Namespace(command="predict", data=str(data), keep=keep)
    return pa.concat_tables(results_of(Scorer(folder / "out"), words))


NULLS = pa.nulls(20)
TIMES = pa.array(np.arange(20) * 10**6 + 7, pa.timestamp("us"))
EMPTY = pa.array([[]] * 20, pa.list_(pa.null()))
FILES: list[tuple[str, pa.Array, pa.Array]] = [  # a column, what the first file has of it, and the second
    ("x", NULLS, NULLS),
    ("category", NULLS, pa.array(["a"] * 20)),
    ("category", pa.array(["a"] * 20), NULLS),
    ("hour", NULLS, NULLS),
    ("hour", pa.array(range(20), pa.int8()), pa.array(map(float, range(20)))),
    ("history", NULLS, pa.array([[b"a" * 16]] * 20, pa.list_(pa.binary(16)))),
    ("history", NULLS, NULLS),
    ("x", pa.array([1.5] * 20, pa.float32()), pa.array([16777217.1] * 20)),
    ("x", pa.array([1] * 20, pa.int16()), pa.array([70000] * 20)),
    ("x", pa.array([1] * 20), pa.array([0.5] * 20)),
    ("x", TIMES.cast(pa.timestamp("ms"), safe=False), TIMES),
    ("x", NULLS, TIMES),
    ("x", EMPTY, pa.array([[1]] * 20)),
    ("x", pa.array([[1]] * 20, pa.list_(pa.int8())), pa.array([[300]] * 20)),
    ("x", pa.array([1] * 20), pa.array([1] * 20).cast(pa.decimal128(20, 1))),
    ("x", NULLS, pa.array([{"y": 1}] * 20)),
]


@pytest.mark.parametrize(("name", "first", "second"), FILES, ids=lambda each: str(getattr(each, "type", each)))
def test_columns_are_kept_in_a_type_for_all_files(
    name: str, first: pa.Array, second: pa.Array, run: Path, tmp_path: Path
) -> None:
    """An untyped column of nulls takes the other file's type, and no value is rounded to that of the first file."""
    for part, values in enumerate((first, second)):
        table = rows("test", as_texts).slice(20 * part, 20)
        table = table.drop_columns([name] if name in table.column_names else [])
        pq.write_table(table.append_column(name, values), tmp_path / f"{part}.parquet")
    for keep in ([name, "item_id", "phone.name"], *([] if name == "x" else [None])):
        ours, theirs = scored(run, tmp_path, keep), open_run(run / "run").predict(str(tmp_path), keep)
        if keep and name == "history" and second is NULLS:  # only the run knows that the lists were of UUIDs
            theirs = theirs.set_column(0, name, ours[name])
        assert ours.schema.equals(theirs.schema) and ours.drop("score").equals(theirs.drop("score"))
        np.testing.assert_allclose(ours["score"], theirs["score"], rtol=0, atol=1e-5)


def test_a_column_without_one_type_is_named_with_its_file(run: Path, tmp_path: Path) -> None:
    for part, values in enumerate((["7"] * 20, range(20))):
        table = rows("test", as_texts).slice(0, 20).append_column("x", pa.array(values))
        pq.write_table(table, tmp_path / f"{part}.parquet")
    said = f"column 'x' is int64 in '{tmp_path}/1.parquet', but string in the files before it; write it with"
    for score, error in ((partial(scored, run), ExportError), (open_run(run / "run").predict, UserError)):
        with pytest.raises(error, match=said):
            score(str(tmp_path), ["x"])
    assert len(scored(run, tmp_path, None)) == 40


def test_types_of_two_files_become_what_training_makes_of_them() -> None:
    kinds = [pa.null(), pa.bool_(), pa.int8(), pa.int64(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()]
    kinds += [pa.string(), pa.binary(), pa.binary(4), pa.date32(), pa.timestamp("ms"), pa.timestamp("ns", "UTC")]
    kinds += [
        pa.decimal128(9, 2),
        pa.decimal256(60, 3),
        pa.time32("ms"),
        pa.time64("us"),
        pa.struct([("a", pa.int8())]),
    ]
    kinds += [pa.list_(kind) for kind in kinds]

    def told(of: Callable[[pa.DataType, pa.DataType], pa.DataType], *pair: pa.DataType) -> object:
        try:
            return of(*pair)
        except pa.ArrowException as error:
            return type(error)

    for pair in product(kinds, repeat=2):
        assert told(unified, *pair) == told(parquet.unified, *pair), pair
