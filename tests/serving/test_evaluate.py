"""`--evaluate`: a run's metrics on other data, and the run left as it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from launch import ROOT, evaluate, run_recsys

from recsys.errors import UserError
from recsys.serving.evaluate import _sizes
from recsys.serving.finished import find_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with a vocabulary and figures of its data, which are gone, and whose best checkpoint is not its last; its
    learning rate goes by the metric of early stopping, which no evaluation has."""
    folder = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(ROOT / "data" / "sample" / "train", folder / "train")
    run_recsys(
        "train", "configs/dlrm_sample.yaml", f"data.train={folder}/train", f"run.dir={folder}/run", "train.epochs=8",
        "tables.user={mapping: vocabulary, min_count: 2}", "features.price={standardise: true, nulls: mean}",
        "train.eval_every_epochs=1", "train.early_stop={metric: auc, patience: 2}",
        "optimizer.dense.learning_rate=0.03", "optimizer.schedule={name: plateau, plateau_patience: 1}",
    )  # fmt: skip
    shutil.rmtree(folder / "train")
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["best_step"] < result["steps"]
    return folder / "run", result


def content(run: Path) -> dict[Path, bytes]:
    paths = [path for path in run.rglob("*") if path.is_file() and "evaluations" not in path.parts]
    return {path: path.read_bytes() for path in paths}


def test_a_run_is_evaluated_as_it_was_and_left_alone(run: tuple[Path, dict[str, Any]]) -> None:
    run_dir, result = run
    before = content(run_dir)
    assert evaluate(run_dir) == result["metrics"]
    on_two = evaluate(run_dir, "data.test=data/sample/valid", "train.eval_batch_size=64", nproc=2)
    torch.testing.assert_close(on_two, {"test": result["metrics"]["valid"]}, rtol=0, atol=1e-6)
    last = max((run_dir / "checkpoints").glob("step-*"))
    assert evaluate(last, "data.test=data/sample/test")["test"]["auc"] != result["metrics"]["test"]["auc"]
    assert content(run_dir) == before and len(list((run_dir / "evaluations").iterdir())) == 3


def test_other_rows_and_another_place(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    found = evaluate(run[0], "data.test=data/sample/test", "data.filter=hour < 12", f"run.dir={tmp_path}/mine")
    hours = pq.read_table(ROOT / "data" / "sample" / "test", columns=["hour"])["hour"].to_numpy()
    assert list(found) == ["test"] and found["test"]["rows"] == (hours < 12).sum()
    (written,) = (tmp_path / "mine" / "evaluations").glob("*/result.json")
    assert json.loads(written.read_text())["data"]["test"]["filter"] == "hour < 12"


def test_metrics_by_the_values_of_a_column(run: tuple[Path, dict[str, Any]]) -> None:
    whole = evaluate(run[0], "data.test=data/sample/test", "--by", "device", nproc=2)
    (written,) = [
        found["by"]["device"]["test"]
        for path in (run[0] / "evaluations").glob("*/result.json")
        if (found := json.loads(path.read_text()))["by"]
    ]
    assert sum(metrics["rows"] for metrics in written.values()) == whole["test"]["rows"]
    assert "null" in written
    value = next(value for value in written if value != "null")
    alone = evaluate(run[0], "data.test=data/sample/test", f"data.filter=device == '{value}'")["test"]
    torch.testing.assert_close(written[value], alone, rtol=0, atol=1e-6)


def result_of(run: Path, folder: Path, *arguments: str, nproc: int = 1) -> dict[str, Any]:
    evaluate(run, "data.test=data/sample/test", f"run.dir={folder}", *arguments, nproc=nproc)
    (written,) = (folder / "evaluations").glob("*/result.json")
    return json.loads(written.read_text())


def test_groups_intervals_and_cold_ids_on_any_ranks(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    words = "data.train=data/sample/train", "--by", "item_id", "--cold", "25"
    drawn = "--group", "user_id", "--bootstrap", "40"
    alone = result_of(run[0], tmp_path / "1", *words, *drawn)
    other = result_of(run[0], tmp_path / "2", *words, *drawn, "train.eval_batch_size=64", nproc=2)
    for key in ("metrics", "intervals", "by", "intervals_by"):
        torch.testing.assert_close(other[key], alone[key], rtol=0, atol=1e-6)
    (low, high), metrics = alone["intervals"]["test"]["gauc"], alone["metrics"]["test"]
    assert 0 < low < metrics["gauc"] < high < 1 and set(alone["intervals"]["test"]) == set(metrics) - {"rows"}

    train, test = (pq.read_table(ROOT / "data" / "sample" / name)["item_id"].to_numpy() for name in ("train", "test"))
    ids, counts = np.unique(train, return_counts=True)
    num_warm = int(np.isin(test, ids[counts >= 25]).sum())
    slices = alone["by"]["item_id"]["test"]
    for name, bounds in alone["intervals_by"]["item_id"]["test"].items():
        assert set(bounds) == set(slices[name]) - {"rows"} and bounds["auc"][0] < slices[name]["auc"] < bounds["auc"][1]
    counted = {name: each["rows"] for name, each in slices.items()}
    assert counted == {"count 0-24": len(test) - num_warm, "count 25+": num_warm}
    assert alone["data"]["train"]["rows"] == len(train)
    rows = result_of(run[0], tmp_path / "3", "--bootstrap", "40")["intervals"]["test"]
    assert "gauc" not in rows and rows["auc"] != alone["intervals"]["test"]["auc"]


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"auc": 0.5, "rows": 1234.0}, ", 1,234 rows"),
        ({"recall@5": 0.5, "users": 7.0}, ", 7 users"),
        ({"click.auc": 0.5, "click.rows": 7.0, "buy.auc": 0.5, "buy.rows": 7.0}, ", 7 rows"),
        ({"click.auc": 0.5, "click.rows": 7.0, "buy.auc": 0.5, "buy.rows": 5.0}, ", 7 click.rows, 5 buy.rows"),
        ({"auc": 0.5, "rows": 1.0}, ", 1 row"),
        ({"mine": 0.5}, ""),
    ],
)
def test_how_many_rows_a_slice_has(metrics: dict[str, float], told: str) -> None:
    assert _sizes(metrics) == told


@pytest.mark.slow
def test_what_metrics_lose_when_a_feature_is_permuted(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """On any number of ranks and streams the same; the most by the feature that labels go by, nothing by a constant."""
    table = pq.read_table(ROOT / "data" / "sample" / "test")
    items = table["item_id"].to_numpy()
    table = table.set_column(table.column_names.index("label"), "label", pa.array((items % 3 == 0).astype(float)))
    table = table.set_column(table.column_names.index("hour"), "hour", pa.array(np.full(len(table), 5)))
    for number in range(3):
        path = tmp_path / f"day={number}" / "rows.parquet"
        path.parent.mkdir()
        pq.write_table(table.slice(number * 150, 150), path, row_group_size=64)
    losses, metrics = [], None
    for nproc, changes in ((1, ["data.num_streams=1"]), (2, ["train.eval_batch_size=64"])):
        words = [run[0], *(tmp_path / f"day={number}" for number in range(3)), f"run.dir={tmp_path}/{nproc}"]
        printed = run_recsys("evaluate", *words, *changes, "--importance", "2", nproc=nproc)
        (written,) = (tmp_path / str(nproc) / "evaluations").glob("*/result.json")
        result = json.loads(written.read_text())
        losses.append(result["importance"]["test"])
        metrics = result["metrics"]["test"]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-6)
    assert set(losses[0]) == {"user_id", "item_id", "history", "category", "device", "hour", "price"}
    assert metrics["rows"] == 450 and losses[0]["hour"] == {"auc": 0, "log_loss": 0, "normalized_entropy": 0}
    in_order = [each["auc"] for each in losses[0].values()]
    assert in_order == sorted(in_order, reverse=True) and max(map(abs, in_order)) > 1e-3
    assert "test loses by permuting" in printed


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["tables.item.hash_seed=3"], "'tables.item.hash_seed' is fixed by what the run has trained"),
        (["modl.top_k=[3]"], "did you mean 'model.top_k'?"),
        (["data.valid=null", "data.test=null"], "there is nothing to evaluate; set data.valid or data.test"),
        (["--by", "colour"], "--by: file"),
        (["--cold", "3"], "--cold splits the values of a column; name it with --by"),
        (["--group", "history"], "--group: column 'history' is list<"),
        (["--group", "price"], "--group: column 'price': ids must be whole numbers"),
        (["--importance", "0"], "'0' is not a whole number above 0"),
        (["data/nowhere"], "config key 'data.test': 'data/nowhere' does not exist"),
        (["data.test=STRINGS"], "'tables.item': its ids are string in column 'item_id' of data.test and int64"),
    ],
)
def test_mistakes(overrides: list[str], said: str, run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    table = pq.read_table(ROOT / "data" / "sample" / "test")
    position = table.column_names.index("item_id")
    pq.write_table(table.set_column(position, "item_id", table["item_id"].cast("string")), tmp_path / "a.parquet")
    words = [text.replace("STRINGS", f"{tmp_path}/a.parquet") for text in overrides]
    assert said in run_recsys("evaluate", run[0], *words, status=2 if words[0] == "--importance" else 1)


def test_what_is_no_run(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "none", "does not exist"),
        (ROOT / "configs/dlrm_sample.yaml", "holds no checkpoint"),
    ):
        with pytest.raises(UserError, match=f"^RUN: '{path}' {said}; name a run directory"):
            find_run(str(path), [])
