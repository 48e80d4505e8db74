"""`recsys predict` and `recsys recommend`: every row once and in order, on any number of ranks, with raw ids."""

import gc
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, evaluate, fork_train, run_recsys

from recsys.models.label_metrics import auc
from recsys.serving import parts as parts_module
from recsys.serving import predict as predict_module
from recsys.training import alike

BLOCK_ROWS = 60


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The test rows of the sample, as ten files of unequal length; the schema's metadata name their folder."""
    folder = tmp_path_factory.mktemp("rows")
    table = pq.read_table(ROOT / "data/sample/test").slice(0, 449)
    ends = np.sort(np.random.default_rng(0).choice(np.arange(1, len(table)), 9, replace=False))
    for i, (start, end) in enumerate(zip([0, *ends], [*ends, len(table)], strict=True)):
        pq.write_table(table.slice(start, end - start), folder / f"{i:02d}.parquet", row_group_size=50)
    return table.replace_schema_metadata({"folder": str(folder)})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose training data are gone."""
    folder = tmp_path_factory.mktemp("ranker")
    shutil.copytree(ROOT / "data/sample/train", folder / "train")
    run_recsys("train", "configs/dlrm_sample.yaml", f"data.train={folder}/train", f"run.dir={folder}/run",
                      "train.max_steps=30", "tables.user={mapping: vocabulary, min_count: 2}")  # fmt: skip
    shutil.rmtree(folder / "train")
    return folder / "run"


def small_blocks() -> None:
    predict_module.BLOCK_ROWS = BLOCK_ROWS


def small_blocks_and_an_end() -> None:
    """End the process with the second block half written."""
    small_blocks()
    whole = predict_module.scored

    def ended(*arguments: Any) -> Any:
        progress = arguments[-1].__self__
        for table in whole(*arguments):
            yield table
            if progress.done == 1:
                raise KeyboardInterrupt

    predict_module.scored = ended


def on_a_disk_of_its_own() -> None:
    """Let a relative OUT of rank 1 be another folder, as on a machine that does not share rank 0's."""
    alike._SEEN_WITHIN_S = 0.5
    if os.environ["RANK"] == "1":
        os.mkdir("elsewhere")
        os.chdir("elsewhere")


def small_blocks_and_counts() -> None:
    """Print after each block how many objects of this package live, with nothing that collects cycles."""
    small_blocks()
    gc.disable()

    def count() -> None:
        kinds = [type(each).__qualname__ for each in gc.get_objects() if type(each).__module__.startswith("recsys.")]
        print("alive", json.dumps(Counter(kinds)))

    parts_module.give_unused_back = count


def predicted(*arguments: Any, nproc: int = 1) -> pa.Table:
    run_recsys(*arguments, nproc=nproc, before=small_blocks)
    return pq.read_table(arguments[3])


def folder_of(rows: pa.Table) -> str:
    return rows.schema.metadata[b"folder"].decode()


@pytest.fixture(scope="module")
def alone(run: Path, rows: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Predictions of one rank."""
    return predicted("predict", run, folder_of(rows), tmp_path_factory.mktemp("alone") / "out")


def test_scores_are_those_of_the_rows(run: Path, rows: pa.Table, alone: pa.Table, tmp_path: Path) -> None:
    kept = predicted("predict", run, folder_of(rows), tmp_path / "one", "--keep", "user_id,label,price")
    assert kept.column_names == ["user_id", "label", "price", "score"] and kept["score"].equals(alone["score"])
    assert kept.drop_columns("score").equals(rows.select(["user_id", "label", "price"]))
    pq.write_table(rows.append_column("a,b", rows["price"]), tmp_path / "commas.parquet")
    kept = predicted("predict", run, tmp_path / "commas.parquet", tmp_path / "two", "--keep", '"a,b",label')
    assert kept.column_names == ["a,b", "label", "score"] and kept["a,b"].equals(rows["price"])
    scores = alone["score"].to_numpy()
    metrics = evaluate(run, f"data.test={folder_of(rows)}")["test"]
    labels, weights = rows["label"].to_numpy(), rows["weight"].to_numpy()
    assert auc(labels, scores, weights) == pytest.approx(metrics["auc"], abs=1e-6)
    assert ((scores > 0) & (scores < 1)).all()


@pytest.mark.parametrize("nproc", [3, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 4, 7))])
def test_any_number_of_ranks(nproc: int, run: Path, rows: pa.Table, alone: pa.Table, tmp_path: Path) -> None:
    on_some = predicted("predict", run, folder_of(rows), tmp_path / "out", nproc=nproc)
    assert len(rows) == 449  # which no batch divides
    assert on_some.drop_columns("score").equals(alone.drop_columns("score"))
    np.testing.assert_allclose(on_some["score"].to_numpy(), alone["score"].to_numpy(), rtol=0, atol=1e-6)
    assert len(list((tmp_path / "out").glob("part-*"))) > nproc


def test_rows_are_not_left_on_the_disk_of_a_rank(run: Path, rows: pa.Table, tmp_path: Path) -> None:
    arguments = ("predict", str(run), folder_of(rows), "out")
    done = fork_train(*arguments, nproc=2, cwd=tmp_path, before=on_a_disk_of_its_own, program="recsys")
    assert done.returncode == 1 and "error: OUT: rank 1 on " in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "elsewhere" / "out").exists()


def test_a_block_leaves_nothing_in_memory(run: Path, rows: pa.Table, tmp_path: Path) -> None:
    printed = run_recsys("predict", run, folder_of(rows), tmp_path / "out", before=small_blocks_and_counts)
    alive = [json.loads(line.partition(" ")[2]) for line in printed.splitlines() if line.startswith("alive")]
    assert len(alive) > 4 and alive[0]["OpenRun"] == 1
    assert all(counts == alive[0] for counts in alive)


@pytest.mark.slow
def test_an_interrupted_prediction_goes_on(run: Path, rows: pa.Table, tmp_path: Path) -> None:
    whole = predicted("predict", run, folder_of(rows), tmp_path / "whole", nproc=2)
    arguments = ("predict", run, folder_of(rows), tmp_path / "parts")
    run_recsys(*arguments, nproc=2, before=small_blocks_and_an_end, status=130)
    state = json.loads((tmp_path / "parts/_state.json").read_text())
    assert state["done"] == 1 and len(state["rows"]) > 2
    first = tmp_path / "parts/part-00000-00000.parquet"
    before = first.stat().st_mtime_ns
    assert predicted(*arguments, nproc=2).equals(whole)
    assert first.stat().st_mtime_ns == before and not list((tmp_path / "parts").glob("*.tmp"))

    for said, changed in (
        ("was written from something else (other data, columns)", ["--keep", "label"]),
        ("was written from something else (other data)", ["data.filter=hour < 12"]),
    ):
        assert said in run_recsys(*arguments, *changed, before=small_blocks, status=1)


@pytest.mark.parametrize(("name", "said"), [("nothing", "--keep: file"), ("score", "would be written twice")])
def test_columns_that_cannot_be_kept(name: str, said: str, run: Path, rows: pa.Table, tmp_path: Path) -> None:
    pq.write_table(rows.append_column("score", rows["price"]), tmp_path / "rows.parquet")
    assert said in run_recsys("predict", run, tmp_path / "rows.parquet", tmp_path / "out", "--keep", name, status=1)
