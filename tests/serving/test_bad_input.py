"""What predict, recommend, embeddings and evaluate refuse, each in a sentence that names file, column or word."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from launch import ROOT, run_recsys
from retrieval import train_towers

import recsys
from recsys.errors import UserError


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose hour has mapping: identity, and whose user may not be null."""
    folder = tmp_path_factory.mktemp("ranker")
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={folder}/run", "train.max_steps=2", "data.valid=null",
                      "data.test=null", "features.user_id.nulls=refuse")  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_towers(tmp_path_factory.mktemp("towers"), "train.epochs=1")


def with_column(table: pa.Table, name: str, column: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


def bad_rows() -> Iterator[tuple[Any, str]]:
    yield lambda rows: rows.drop_columns("price"), "has no column 'price'"
    yield (
        lambda rows: with_column(rows, "item_id", rows["item_id"].cast("string")),
        "its ids are string in column 'item_id'",
    )
    yield (
        lambda rows: with_column(rows, "item_id", pa.array([[each] for each in rows["item_id"].to_pylist()])),
        "column 'item_id' has lists of ids in",
    )
    yield lambda rows: with_column(rows, "price", rows["device"]), "must hold numbers, found"
    yield (
        lambda rows: with_column(rows, "hour", pa.array([24] * len(rows))),
        "id 24 is outside 0 … 23 (mapping: identity)",
    )
    yield lambda rows: with_column(rows, "user_id", pa.nulls(len(rows), pa.int64())), "nulls: refuse"
    yield lambda rows: with_column(rows, "price", pa.array([float("nan")] * len(rows))), "only finite numbers"
    yield lambda rows: rows.slice(0, 0), "hold no rows"


@pytest.mark.parametrize(("change", "said"), list(bad_rows()), ids=lambda each: each if isinstance(each, str) else "")
def test_rows(change: Any, said: str, ranker: Path, tmp_path: Path) -> None:
    rows = change(pq.read_table(ROOT / "data/sample/test"))
    run = recsys.open_run(ranker)
    with pytest.raises(UserError) as raised:
        run.predict(rows)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert tempfile.gettempdir() not in str(raised.value)  # where the rows were written to, which nobody has named
    pq.write_table(rows, tmp_path / "rows.parquet")
    assert said in run_recsys("evaluate", ranker, tmp_path / "rows.parquet", status=1)


def with_a_null_entry(column: pa.ChunkedArray) -> pa.Array:
    """A category whose dictionary holds a null, which Parquet's cannot."""
    encoded = column.combine_chunks().dictionary_encode()
    entries = pa.concat_arrays([pa.nulls(1, column.type), encoded.dictionary])
    return pa.DictionaryArray.from_arrays(pc.fill_null(pc.add(encoded.indices, 1), 0), entries)


FORMS = (
    lambda column: column.dictionary_encode(),
    with_a_null_entry,
    lambda column: pa.chunked_array([pc.run_end_encode(column.combine_chunks())]),
    lambda column: column.cast(pa.string_view() if pa.types.is_string(column.type) else column.type),
)


def test_columns_in_other_forms_of_arrow(ranker: Path, towers: Path) -> None:
    run, rows = recsys.open_run(ranker), pq.read_table(ROOT / "data/sample/test").slice(0, 50)
    expected = run.predict(rows, keep=["device"])
    for form in FORMS:
        other = rows
        for name in ("device", "category", "item_id", "hour"):
            other = with_column(other, name, form(other[name]))
        assert run.predict(other, keep=["device"]).equals(expected)
    towers_run, users = recsys.open_run(towers), pq.read_table(towers.parent / "valid.parquet")
    lists = users["seen"].combine_chunks()
    encoded = pa.ListArray.from_arrays(lists.offsets, lists.values.dictionary_encode())
    assert towers_run.recommend(with_column(users, "seen", encoded), k=5).equals(towers_run.recommend(users, k=5))
    with pytest.raises(UserError, match=r"^DATA has a column that Parquet cannot hold .*month_day"):
        run.predict(rows.append_column("x", pa.nulls(len(rows), pa.month_day_nano_interval())))


def test_a_column_is_kept_once(ranker: Path) -> None:
    found = recsys.open_run(ranker).predict(str(ROOT / "data/sample/test"), keep=["hour", "hour"])
    assert found.column_names == ["hour", "score"]


def test_files(ranker: Path, tmp_path: Path) -> None:
    run = recsys.open_run(ranker)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "text.parquet").write_text("user_id,item_id\n1,2\n")
    unreadable = "is not a readable Parquet file"
    for name, said in (
        ("nothing", "DATA: "), ("empty.parquet", unreadable), ("text.parquet", unreadable), ("none", "does not exist")
    ):  # fmt: skip
        for use in (run.predict, lambda paths: run.embeddings("item", paths)):
            with pytest.raises(UserError) as raised:
                use(str(tmp_path / name))
            assert said in str(raised.value) and name in str(raised.value) and "\n" not in str(raised.value)


def test_users_and_names(towers: Path) -> None:
    run = recsys.open_run(towers)
    users = pq.read_table(towers.parent / "valid.parquet")
    items = pq.read_table(towers.parent / "items.parquet")
    ids = pa.array([[1, 2]] * len(users))
    for use, said in (
        (lambda: run.recommend(users.drop_columns("history")), "has no column 'history'"),
        (lambda: run.recommend(users.drop_columns("seen")), "; data.seen_column=null goes without, and leaves no ite"),
        (lambda: run.recommend(users, keep=["usr"]), "`keep`: file"),
        (
            lambda: run.recommend(with_column(users, "seen", ids)),
            "ids of type int64 cannot be compared with ids of type s",
        ),
        (lambda: run.recommend(users.slice(0, 0)), "hold no rows"),
        (lambda: run.recommend([]), "DATA is an empty list"),
        (
            lambda: run.recommend([{"user": 1}]),
            "DATA is of type list, but must be paths, an Arrow table, a data frame or a mapping of columns of the same",
        ),
        *(
            (lambda k=k: run.recommend(users, k), f"k is {k!r}, but must be a whole number above 0")
            for k in (0, -1, "5")
        ),
        (
            lambda: run.embeddings("user"),
            "nothing says which users' vectors are wanted; give their rows as `data`",
        ),
        (
            lambda: run.embeddings("tables.user", keep=["user"]),
            "`keep` names columns of users or items, but vectors of table 'user' have only their id",
        ),
        (
            lambda: run.embeddings("itm"),
            "no vectors of 'itm'; did you mean 'item'? (known: user, item, tables.user, tables.item)",
        ),
        (lambda: run.embeddings("tables.itm"), "the run has no vectors of 'tables.itm'"),
        (lambda: run.embeddings("item", items.drop_columns("year")), "has no column 'year'"),
        (lambda: run.embeddings("item", pa.concat_tables([items, items])), "DATA: item item-0 occurs 2 times"),
        (lambda: run.embeddings("tables.user"), "table 'user' has mapping: hash, which keeps no ids"),
    ):
        with pytest.raises(UserError) as raised:
            use()
        assert said in str(raised.value) and "\n" not in str(raised.value), str(raised.value)


def test_groups_of_users_and_items_have_no_auc(towers: Path) -> None:
    told = run_recsys("evaluate", towers, "--group", "user", status=1)
    assert "--group: retrieval metrics have no AUC by group" in told


def test_folders_that_cannot_be(ranker: Path, towers: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = f"{tmp_path}/file/out"
    for words in (("predict", ranker, ROOT / "data/sample/test", out), ("export", ranker, out)):
        told = run_recsys(*words, status=1)
        assert f"error: OUT: '{tmp_path}/file" in told and "cannot be made" in told
    told = run_recsys("embeddings", towers, "item", tmp_path / "out", "--queries", "users", status=1)
    assert "--queries are users on whom the recall of an index is measured; add" in told


def test_faiss_that_is_not_there(towers: Path, tmp_path: Path) -> None:
    words = ("embeddings", towers, "item", tmp_path / "out", "--faiss", "flat")
    told = run_recsys(*words, before=without_faiss, status=1)
    assert "--faiss needs faiss-cpu, which is not installed: `pip install faiss-cpu`" in told
    assert not (tmp_path / "out").exists()


def without_faiss() -> None:
    import sys

    sys.modules["faiss"] = None  # type: ignore[assignment]
