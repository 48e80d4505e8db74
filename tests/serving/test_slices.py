"""Slices of evaluations: of rows and of targets, by value and by how often data.train has them."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from launch import ROOT, evaluate, run_recsys
from retrieval import NUM_ITEMS, train_towers

from recsys.config import Device, load_config
from recsys.errors import UserError
from recsys.runtime.world import open_world
from recsys.serving.slices import _item_columns, by_value, count_names, in_order, slices_by

TRAINED = "year < 6"  # leaves out the items i with i % 7 == 6, which training then never sees
TOP_K = (5, 10)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two towers, and users whose targets are unseen, rare, frequent, twice the same, null, or no items."""
    folder = tmp_path_factory.mktemp("slices")
    run = train_towers(folder, f'data.filter={{train: "{TRAINED}"}}', "train.epochs=4")
    users = pq.read_table(folder / "valid.parquet").to_pylist()
    random = np.random.default_rng(3)
    for number, user in enumerate(users):
        others = [f"item-{i}" for i in random.permutation(NUM_ITEMS + 6)[: random.integers(0, 9)]]
        user["targets"] = [*others, None, *others[:1]] if number % 3 else others
    pq.write_table(pa.Table.from_pylist(users), folder / "test.parquet", row_group_size=7)
    return run


def result_of(run: Path, folder: Path, *arguments: str, nproc: int = 1) -> dict[str, Any]:
    evaluate(run, f"data.test={run.parent}/test.parquet", f"run.dir={folder}", *arguments, nproc=nproc)
    (written,) = (folder / "evaluations").glob("*/result.json")
    return json.loads(written.read_text())


def expected(best: list[list[str]], targets: list[list[str]], k: int) -> dict[str, float]:
    """recall@k, ndcg@k and the number of users, of users' best items and of the targets of a slice."""
    recalls, gains = [], []
    for items, wanted in zip(best, map(set, targets), strict=True):
        if wanted:
            hits = np.isin(items[:k], list(wanted))
            discounts = 1 / np.log2(np.arange(2, k + 2))
            recalls.append(hits.sum() / len(wanted))
            gains.append((hits * discounts[: len(hits)]).sum() / discounts[: len(wanted)].sum())
    return {f"recall@{k}": float(np.mean(recalls)), f"ndcg@{k}": float(np.mean(gains)), "users": float(len(recalls))}


def test_targets_by_how_often_training_saw_them(run: Path, tmp_path: Path) -> None:
    """Each target counts in its own slice, as the formula says, on one rank and three; rows that are left out of the
    evaluation still count as trained."""
    words = "--by", "targets", "--cold", "11,1", 'data.filter={test: "user < 33"}'
    alone = result_of(run, tmp_path / "1", *words)
    other = result_of(run, tmp_path / "3", *words, "train.eval_batch_size=9", nproc=3)
    for key in ("metrics", "by"):
        torch.testing.assert_close(other[key], alone[key], rtol=0, atol=1e-6)

    run_recsys("recommend", run, run.parent / "test.parquet", tmp_path / "best", "--k", 10, "data.filter=user < 33")
    best = pq.read_table(tmp_path / "best")["items"].to_pylist()
    users = [user for user in pq.read_table(run.parent / "test.parquet").to_pylist() if user["user"] < 33]
    rows = [row for row in pq.read_table(run.parent / "train.parquet").to_pylist() if row["year"] < 6]
    counts = Counter(row["item"] for row in rows)
    bounds = {"count 0": (0, 0), "count 1-10": (1, 10), "count 11+": (11, np.inf), "not in data.items": (-1, -1)}

    def inside(item: str, low: float, high: float) -> bool:
        return low <= (counts[item] if int(item.removeprefix("item-")) < NUM_ITEMS else -1) <= high

    slices = alone["by"]["targets"]["test"]
    assert list(slices) == list(bounds) and alone["data"]["train"]["rows"] == len(rows)
    for name, ends in bounds.items():
        targets = [[item for item in user["targets"] if item and inside(item, *ends)] for user in users]
        assert sum(map(bool, targets)) > 5
        for k in TOP_K:
            found = {key: slices[name][key] for key in (f"recall@{k}", f"ndcg@{k}", "users")}
            torch.testing.assert_close(found, expected(best, targets, k), rtol=0, atol=1e-6)
    assert slices["not in data.items"]["recall@10"] == 0 < slices["count 0"]["recall@10"]


def test_targets_by_value(run: Path, tmp_path: Path) -> None:
    slices = result_of(run, tmp_path, "--by", "targets")["by"]["targets"]["test"]
    users = pq.read_table(run.parent / "test.parquet")["targets"].to_pylist()
    wanted = {item: sum(item in targets for targets in users) for item in ("item-3", "item-27")}
    assert {item: slices[item]["users"] for item in wanted} == wanted and "null" not in slices
    assert list(slices)[:3] == ["item-0", "item-1", "item-2"] and list(slices)[-1] == "not in data.items"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--by", "history", "--cold", "2"], "--cold: column 'history' is list<"),
        (["--by", "history"], "nearly every row would be a slice; it needs a column with one value a row"),
        (["--by", "group", "--cold", "2"], "--cold: file"),
        (["--by", "user", "--cold", "2", "data.train=TEXTS"], "--cold: column 'user': ids of type int64 cannot be"),
        (["--by", "targets", "--cold", "2", "data.train=nowhere"], "where --cold counts: 'nowhere' does not exist"),
        (["--by", "user", "--cold", "2,x"], "'x' is not a whole number above 0"),
    ],
)
def test_mistakes(words: list[str], said: str, run: Path, tmp_path: Path) -> None:
    table = pq.read_table(run.parent / "train.parquet")
    texts = table.set_column(table.column_names.index("user"), "user", table["user"].cast("string"))
    pq.write_table(texts, tmp_path / "texts.parquet")
    users = pq.read_table(run.parent / "test.parquet").append_column("group", pa.array(range(40)))
    pq.write_table(users, tmp_path / "test.parquet")
    words = [word.replace("TEXTS", f"{tmp_path}/texts.parquet") for word in words]
    changes = [f"data.test={tmp_path}/test.parquet", f"run.dir={tmp_path}/out", *words]
    assert said in run_recsys("evaluate", run, *changes, status=2 if "2,x" in words else 1)


def test_where_items_are_counted() -> None:
    """In lists of a user's items, without those of `neighbours`; or in the rows' own items, without the histories."""
    for name, column in {"two_tower_sample": "item_id", "ultragcn_gowalla": "history"}.items():
        assert _item_columns(load_config(ROOT / "configs" / f"{name}.yaml")) == (column,)


def test_names_and_their_order() -> None:
    assert count_names((1,)) == ["count 0", "count 1+"]
    assert count_names((2, 3, 100)) == ["count 0-1", "count 2", "count 3-99", "count 100+"]
    assert in_order({*count_names((2, 3, 100)), "null"}) == [*count_names((2, 3, 100)), "null"]
    assert in_order({"b", "10", "9", "07", "7"}) == ["07", "7", "9", "10", "b"]


def test_slices_of_times_with_nanoseconds() -> None:
    day = 86_400 * 10**9
    assert by_value(pa.array([day, day + 1, None], pa.timestamp("ns"))).to_pylist() == [
        *("1970-01-02 00:00:00", "1970-01-02 00:00:00.000000001", "null")
    ]
    assert by_value(pa.array([1, 1500], pa.time64("ns"))).to_pylist() == ["00:00:00.000000001", "00:00:00.000001500"]


def test_a_text_that_reads_as_null_is_a_slice_of_its_own() -> None:
    assert by_value(pa.array(["null", None, "ios", "None"])).to_pylist() == ["'null'", "null", "ios", "None"]
    assert by_value(pa.array([-0.0, 0.0, -0.5])).to_pylist() == ["0.0", "0.0", "-0.5"]


def test_cold_ids_of_a_struct_are_refused(tmp_path: Path) -> None:
    """Before data.train is counted, which would end with a traceback of Arrow's."""
    pq.write_table(pa.table({"device": [{"os": "ios"}, None]}), tmp_path / "a.parquet")
    config = load_config(ROOT / "configs" / "dlrm_sample.yaml", [f"data.train={tmp_path}/a.parquet"])
    run = SimpleNamespace(config=config, with_trained_rows=lambda: config)
    with (
        open_world(Device.cpu) as world,
        pytest.raises(UserError, match=r"'device' is struct<os: string>; it needs a column .*'device\.os'"),
    ):
        opened: Any = SimpleNamespace(run=run, world=world, inputs=SimpleNamespace(corpus=None))
        slices_by(opened, "device", (2,))


def test_items_in_texts_are_counted(tmp_path: Path) -> None:
    """Users' lists may be texts with a separator, which are no column of data.train themselves."""
    pq.write_table(pa.table({"history": ["a|b", "b| a", None, "b"]}), tmp_path / "a.parquet")
    changes = [f"data.train={tmp_path}/a.parquet", "features.history.separator='|'", "data.filter=null"]
    config = load_config(ROOT / "configs" / "sasrec_beauty.yaml", changes)
    run = SimpleNamespace(config=config, with_trained_rows=lambda: config)
    corpus = pa.array(["b", "c", "a"])
    with open_world(Device.cpu) as world:
        opened: Any = SimpleNamespace(run=run, world=world, inputs=SimpleNamespace(corpus=corpus))
        slices = slices_by(opened, "targets", (1, 3))
    of_items = [slices._names[place] for place in slices._of_items]
    assert of_items == ["count 3+", "count 0", "count 1-2", "not in data.items"]
