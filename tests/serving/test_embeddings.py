"""`recsys embeddings`: vectors of tables and towers by raw id, on any number of ranks, and the index of items."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, run_recsys
from retrieval import NUM_ITEMS, NUM_USERS, train_towers

import recsys
from recsys.checkpoint import export_table
from recsys.ids import HashMapping, IdentityMapping, KeptRows
from recsys.serving import embeddings as embeddings_module
from recsys.serving import index as index_module


def small_pieces() -> None:
    embeddings_module.BLOCK_ROWS, embeddings_module._IDS_AT_ONCE = 70, 16


def written(*arguments: Any, nproc: int = 1) -> pa.Table:
    run_recsys("embeddings", *arguments, nproc=nproc, before=small_pieces)
    return pq.read_table(arguments[2])


def matrix(table: pa.Table) -> np.ndarray:
    return np.stack(table["vector"].to_numpy())


def vectors_by_row(run: Path, table: str, folder: Path) -> tuple[pa.Table, np.ndarray]:
    export_table(run, table, folder / f"{table}.parquet")
    exported = pq.read_table(folder / f"{table}.parquet")
    return exported, matrix(exported)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with tables of each kind of mapping, split over two ranks by rows and by columns."""
    folder = tmp_path_factory.mktemp("ranker")
    run_recsys(
        "train", "configs/dlrm_sample.yaml", f"run.dir={folder}/run", "train.max_steps=10", "tables.item.num_hashes=2",
        "tables.user={mapping: vocabulary, min_count: 2}", "tables.price={num_embeddings: 50, embedding_dim: 8}",
        "features.bucket={table: price, column: price, boundaries: [1, 10, 20]}",
        "optimizer.tables.name=adagrad", "tables.user.sharding_type=column_wise", "tables.item.sharding_type=row_wise",
        nproc=2,
    )  # fmt: skip
    return folder / "run"


@pytest.mark.slow
def test_tables_whose_ids_the_run_knows(ranker: Path, tmp_path: Path) -> None:
    users = written(ranker, "user", tmp_path / "users", nproc=3)
    exported, vectors = vectors_by_row(ranker, "user", tmp_path)
    assert users["id"].to_pylist() == [each for each in exported["id"].to_pylist() if each is not None]
    np.testing.assert_array_equal(matrix(users), vectors[1 : 1 + len(users)])
    hours = written(ranker, "tables.hour", tmp_path / "hours")
    assert hours["id"].to_pylist() == list(range(24))
    np.testing.assert_array_equal(matrix(hours), vectors_by_row(ranker, "hour", tmp_path)[1])
    assert written(ranker, "price", tmp_path / "price")["id"].to_pylist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_ids_of_a_hashed_table_are_those_of_the_data(ranker: Path, tmp_path: Path) -> None:
    test = ROOT / "data/sample/test"
    found = written(ranker, "item", tmp_path / "one", "--data", test)
    rows = pq.read_table(test, columns=["item_id", "history"])
    in_lists = [each for row in rows["history"].to_pylist() for each in row or ()]
    ids = found["id"].to_pylist()
    assert set(ids) == {*rows["item_id"].to_pylist(), *in_lists} - {None} and len(set(ids)) == len(ids)
    places = HashMapping(1000, 0, num_hashes=2).rows(found["id"].combine_chunks())
    expected = vectors_by_row(ranker, "item", tmp_path)[1][places].reshape(len(ids), 2, -1).mean(1)
    np.testing.assert_allclose(matrix(found), expected, rtol=0, atol=1e-6)
    assert written(ranker, "item", tmp_path / "three", "--data", test, nproc=3).equals(found)

    run = recsys.open_run(ranker)
    assert run.embeddings("item", test).equals(found)
    pq.write_table(rows.select(["item_id"]), tmp_path / "items.parquet")
    assert set(run.embeddings("item", str(tmp_path / "items.parquet"))["id"].to_pylist()) <= set(ids)
    pq.write_table(rows, tmp_path / "items_later.parquet")
    both = recsys.open_run(ranker, "data.optional_columns=[history]").embeddings("item", f"{tmp_path}/items*.parquet")
    assert set(both["id"].to_pylist()) == set(ids)
    none = run.embeddings("item", {"item_id": pa.nulls(3, pa.int64())})
    assert len(none) == 0 and none.schema == found.schema


def test_ids_of_a_pruned_table_have_the_rows_that_training_gave_them(tmp_path: Path) -> None:
    """As `recsys compress` leaves tables: rows that are kept follow each other, the others share the one behind."""
    before = {"user": 300, "item": 400, "hour": 24}
    kept = {name: np.random.default_rng(0).random(size) < 0.5 for name, size in before.items()}
    overrides = ["tables.item.num_hashes=2"]
    for name, rows in kept.items():
        rows[0] = True
        KeptRows(pa.array(rows)).write(tmp_path / f"{name}.kept")
        settings = f"{{num_embeddings: {rows.sum() + 1}, kept_rows: {tmp_path}/{name}.kept}}"
        overrides.append(f"tables.{name}={settings}")
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={tmp_path}/run", "train.max_steps=2", *overrides)
    run, data = recsys.open_run(tmp_path / "run"), ROOT / "data/sample/test"
    unpruned = HashMapping(before["user"], 0), HashMapping(before["item"], 0, num_hashes=2), IdentityMapping(24)
    for (name, rows), mapping in zip(kept.items(), unpruned, strict=True):
        found = run.embeddings(f"tables.{name}", None if name == "hour" else data)
        places = mapping.rows(found["id"].combine_chunks())
        places = np.where(rows[places], np.cumsum(rows)[places] - 1, rows.sum())
        vectors = vectors_by_row(tmp_path / "run", name, tmp_path)[1][places]
        expected = vectors.reshape(len(found), mapping.rows_per_id, -1).mean(1)
        np.testing.assert_allclose(matrix(found), expected, rtol=0, atol=1e-6)
    assert found["id"].to_pylist() == list(range(24))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["usr"], "the run has no vectors of 'usr'; did you mean 'user'?"),
        (["item"], "table 'item' has mapping: hash, which keeps no ids; give data that hold the wanted ids as --data"),
        (["user", "--faiss", "flat"], "--faiss indexes vectors of items, not of 'user'"),
        (["item", "--data", "STRINGS"], "its ids are string in column 'item_id' of DATA and int64"),
        (["hour", "--data", "HOURS"], "id 24 is outside 0 … 23"),
        (
            ["price", "--data", "HOURS"],
            "ids of table 'price' are buckets of numbers, which the run knows; leave out --d",
        ),
        (["item", "--data", "nowhere"], "DATA: 'nowhere' does not exist"),
        (["device", "--data", "HOURS"], "has no column 'device'"),
    ],
)
def test_mistakes(arguments: list[str], said: str, ranker: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"hour": [3, 24]}), tmp_path / "HOURS")
    pq.write_table(pa.table({"item_id": ["a"]}), tmp_path / "STRINGS")
    words = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    assert said in run_recsys("embeddings", ranker, words[0], tmp_path / "out", *words[1:], status=1)


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_towers(tmp_path_factory.mktemp("towers"), "train.epochs=4")


def test_vectors_of_towers_and_their_index(towers: Path, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    valid = towers.parent / "valid.parquet"
    users = written(towers, "user", tmp_path / "users", "--data", valid)
    pq.write_table(pq.read_table(valid).slice(0, 2), two := tmp_path / "two.parquet")  # of three ranks one has none
    arguments = ("--faiss", "flat", "--queries", two)
    items = written(towers, "item", tmp_path / "items", *arguments, nproc=3)
    assert users["user"].to_pylist() == list(range(NUM_USERS)) and items.column_names == ["item", "vector"]
    assert items["item"].equals(pq.read_table(towers.parent / "items.parquet")["item"])
    run = recsys.open_run(towers)
    np.testing.assert_allclose(matrix(run.embeddings("item")), matrix(items), rtol=0, atol=1e-6)
    no_lists = pq.read_table(valid, columns=["user", "history"])
    np.testing.assert_allclose(matrix(run.embeddings("user", no_lists)), matrix(users), rtol=0, atol=1e-6)

    index = faiss.read_index(str(tmp_path / "items/_index.faiss"))
    scores, places = index.search(matrix(users), 20)
    exact = matrix(users) @ matrix(items).T
    np.testing.assert_allclose(scores, -np.sort(-exact)[:, :20], rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(exact, places, 1), scores, rtol=0, atol=1e-6)
    report = json.loads((tmp_path / "items/_index.json").read_text())
    assert report["recall@20"] == 1 and report["rows"] == NUM_ITEMS
    assert report["queries"] == {"number": 2, "of": str(two)}


def test_rows_of_a_table_that_is_called_as_a_tower(towers: Path, tmp_path: Path) -> None:
    corpus = towers.parent / "items.parquet"  # which lacks the column of the other feature of the table
    rows = written(towers, "tables.item", tmp_path / "rows", "--data", corpus)
    vectors = written(towers, "item", tmp_path / "vectors", "--data", corpus)
    assert sorted(rows["id"].to_pylist()) == sorted(vectors["item"].to_pylist())
    assert rows.schema.field("vector").type.list_size == 8


def test_an_approximate_index_of_a_single_item_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    pq.write_table(pa.table({"vector": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))}), tmp_path / "part-0.parquet")
    index_module.build_index(tmp_path, "ivfpq", None, "items")
    report = json.loads((tmp_path / index_module.REPORT).read_text())
    assert (report["index"], report["recall@1"]) == ("Flat", 1)


def test_of_items_with_equal_vectors_any_is_found(tmp_path: Path) -> None:
    """Three quarters of the items have one vector; FAISS and the exact products take 20 of them, not the same."""
    pytest.importorskip("faiss")
    drawn = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    drawn[:30] = drawn[29]
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate([drawn[::-1], drawn]).reshape(-1)), 8)
    pq.write_table(pa.table({"vector": lists}), tmp_path / "part-0.parquet")
    index_module.build_index(tmp_path, "flat", None, "items")
    assert json.loads((tmp_path / index_module.REPORT).read_text())["recall@20"] == 1


@pytest.mark.slow
def test_an_approximate_index_tells_its_recall(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    faiss = pytest.importorskip("faiss")
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((3000, 16)).astype(np.float32)
    for number, part in enumerate(np.array_split(vectors, 3)):
        lists = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), 16)
        pq.write_table(pa.table({"vector": lists}), tmp_path / f"part-00000-{number:05d}.parquet")
    index_module.build_index(tmp_path, "ivfpq", None, "items")
    assert "WARNING" not in "".join(capfd.readouterr())  # one for each of 8 codes, of too few vectors
    report = json.loads((tmp_path / index_module.REPORT).read_text())
    queries = vectors[::3]
    index = faiss.read_index(str(tmp_path / index_module.INDEX))
    found, exact = index.search(queries, 20)[1], np.argsort(-(queries @ vectors.T))[:, :20]
    recall = np.mean([len({*a} & {*b}) / 20 for a, b in zip(found.tolist(), exact.tolist(), strict=True)])
    assert report["recall@20"] == pytest.approx(recall, abs=1e-4) and 0.05 < recall < 1
    assert report["index"].startswith("IVF46,PQ8x8") and report["queries"]["number"] == 1000
