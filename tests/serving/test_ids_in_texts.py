"""Runs on ids in texts with a separator between them: what is learned, recommended and exported is as of lists."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from launch import ROOT, run_recsys, train_losses
from retrieval import write_retrieval

from recsys.errors import UserError
from recsys.serving.api import open_run
from recsys.serving.score import ExportError, Scorer

# The texts of histories have a space before each id, and an empty part at the end.
SEPARATED = ["features.history.separator='|'"]
WHOLE = ["tables.item.mapping=vocabulary", "data.seen_column=history"]


def in_texts(table: pa.Table) -> pa.Table:
    if "history" not in table.column_names:
        return table
    lists = table["history"].combine_chunks()
    texts = pc.binary_join(lists.cast(pa.list_(pa.string())), "| ")
    texts = pc.if_else(pc.equal(pc.list_value_length(lists), 0), "", pc.binary_join_element_wise(texts, "|", ""))
    return table.set_column(table.column_names.index("history"), "history", texts)


def with_integers(table: pa.Table) -> pa.Table:
    """Return a table of retrieval data with integers in place of ids such as item-7."""
    for name in {"item", "history", "targets", "seen"} & {*table.column_names}:
        column = table[name].combine_chunks()
        is_list = pa.types.is_list(column.type)
        numbers = pc.replace_substring(column.values if is_list else column, "item-", "").cast(pa.int64())
        column = pa.ListArray.from_arrays(column.offsets, numbers) if is_list else numbers
        table = table.set_column(table.column_names.index(name), name, column)
    return table


@pytest.fixture(scope="module", params=["of texts", "of integers"])
def towers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """By kind, lists and texts: the folder of data with a run in `run`, and the losses of its steps."""
    found: dict[str, Any] = {}
    integers = request.param == "of integers"
    for kind in ("lists", "texts"):
        folder = tmp_path_factory.mktemp(kind)
        config = write_retrieval(folder)
        for path in folder.glob("*.parquet"):
            table = with_integers(pq.read_table(path)) if integers else pq.read_table(path)
            pq.write_table(in_texts(table) if kind == "texts" else table, path, row_group_size=37)
        more = [*SEPARATED, f"features.history.integers={integers}"] if kind == "texts" else []
        found[kind] = folder, train_losses(config, folder / "run", *WHOLE, *more, "train.epochs=3")
    return found


@pytest.mark.slow
def test_towers_learn_and_recommend_what_they_do_of_lists(towers: dict[str, Any], tmp_path: Path) -> None:
    (lists, of_lists), (texts, of_texts) = towers.values()
    assert of_lists == of_texts and len(of_lists) > 10
    results = [json.loads((folder / "run/result.json").read_text()) for folder in (lists, texts)]
    assert results[0]["metrics"] == results[1]["metrics"] and results[0]["data"]["ids"] == results[1]["data"]["ids"]
    ours, theirs = (
        open_run(folder / "run").recommend(str(folder / "valid.parquet"), k=60) for folder in (texts, lists)
    )
    assert ours.equals(theirs) and ours.column_names == ["user", "items", "scores"]
    seen = pq.read_table(lists / "valid.parquet")["history"].to_pylist()
    assert not any({*row} & {*mine} for row, mine in zip(ours["items"].to_pylist(), seen, strict=True))
    users = pq.read_table(texts / "valid.parquet")
    run = open_run(texts / "run")
    assert run.recommend(users, k=60).equals(ours) and run.recommend(users.to_pydict(), k=60).equals(ours)
    assert run.recommend(users, k=3, keep=["history"])["history"].equals(users["history"])
    with pytest.raises(UserError, match=r"column 'history' is list<.*>, but only texts have a separator in them"):
        run.recommend(pq.read_table(lists / "valid.parquet"))
    run_recsys("recommend", texts / "run", texts / "valid.parquet", tmp_path / "best", "--k", "60", nproc=2)
    assert pq.read_table(tmp_path / "best")["items"].to_pylist() == ours["items"].to_pylist()
    vectors = open_run(lists / "run").embeddings("user", str(lists / "valid.parquet"))
    assert run.embeddings("user", users).equals(vectors)


@pytest.mark.slow
def test_towers_are_exported(towers: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    texts = towers["texts"][0]
    run_recsys("export", texts / "run", tmp_path / "export")
    users, scorer = pq.read_table(texts / "valid.parquet"), Scorer(tmp_path / "export")
    expected = open_run(texts / "run").recommend(users, k=60)
    assert scorer.recommend(users, 60)["items"].to_pylist() == expected["items"].to_pylist()


CONFIG = """
base: {root}/configs/dlrm_sample.yaml
data: {{train: {folder}/train, valid: null, test: {folder}/test}}
features: {{history: {{max_length: 4, keep: first}}}}
train: {{max_steps: 15}}
"""


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample with texts of histories, whose ids are texts like the other items; a run, and its export."""
    folder = tmp_path_factory.mktemp("ranker")
    for role in ("train", "test"):
        (folder / role).mkdir()
        rows = pq.read_table(ROOT / "data/sample" / role)
        rows = in_texts(rows).set_column(rows.column_names.index("item_id"), "item_id", rows["item_id"].cast("string"))
        pq.write_table(rows, folder / role / "a.parquet", row_group_size=500)
    (folder / "c.yaml").write_text(CONFIG.format(root=ROOT, folder=folder))
    run_recsys("train", folder / "c.yaml", *SEPARATED, f"run.dir={folder}/run")
    run_recsys("export", folder / "run", folder / "export")
    return folder


def test_rankers_are_exported(ranker: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    rows, run, scorer = pq.read_table(ranker / "test"), open_run(ranker / "run"), Scorer(ranker / "export")
    expected = run.predict(rows)
    assert expected.column_names == ["user_id", "item_id", "category", "device", "hour", "score"]
    scores = scorer.score(rows)
    np.testing.assert_allclose(scores["score"], expected["score"], rtol=0, atol=1e-5)
    of_dictionary = rows.set_column(rows.column_names.index("history"), "history", rows["history"].dictionary_encode())
    assert scorer.score(of_dictionary).equals(scores) and run.predict(of_dictionary).equals(expected)
    body = json.dumps({name: rows[name].to_pylist() for name in rows.column_names if name != "day"})
    assert scorer.score(json.loads(body)).equals(scores)
    others = pa.array([None, "", " | |", "no such id"])
    few = rows.slice(0, 4).set_column(rows.column_names.index("history"), "history", others)
    np.testing.assert_allclose(scorer.score(few)["score"], run.predict(few)["score"], rtol=0, atol=1e-5)
    for wrong in ([["a"]] * 4, [1] * 4):
        bad = rows.slice(0, 4).set_column(rows.column_names.index("history"), "history", pa.array(wrong))
        with pytest.raises(ExportError, match=r"column 'history' \(feature 'history'\): only texts have a separator"):
            scorer.score(bad)
        with pytest.raises(UserError, match=r"column 'history' is .*, but only texts have a separator in them"):
            run.predict(bad)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_separator(ranker: Path) -> None:
    words = ("train", ranker / "c.yaml", f"run.dir={ranker}/run", "run.resume=true", "train.max_steps=20")
    done = run_recsys(*words, "features.history.separator=','", status=1)
    assert '\'features.history.separator\' is ",", and was "|", where checkpoint' in done
    assert "set features.history.separator='\"|\"', or" in done
