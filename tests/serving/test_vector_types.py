"""Vectors of whatever Arrow type: the API and an export score them alike, and tell what is none."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from launch import run_recsys

from recsys.errors import UserError
from recsys.serving.api import Run, open_run
from recsys.serving.score import ExportError, Scorer

pytest.importorskip("onnxruntime")
ROWS = 60
Opened = tuple[Run, Scorer, pa.Table]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A run of a vector beside a number, its export, and rows to be scored; a null stands for a vector or in one."""
    folder, dice = tmp_path_factory.mktemp("vectors"), np.random.default_rng(6)
    vectors: list[Any] = dice.normal(size=(ROWS, 3)).astype(np.float32).tolist()
    vectors[3], vectors[7][1], vectors[8] = None, None, []
    columns = {"user": dice.integers(0, 9, ROWS), "price": dice.random(ROWS), "label": dice.integers(0, 2, ROWS)}
    rows = pa.table({**columns, "text": pa.array(vectors, pa.list_(pa.float32()))})
    pq.write_table(rows, folder / "rows.parquet")
    floats = {"text": {"type": "float", "dim": 3, "nulls": "mean", "standardise": True}, "price": {"type": "float"}}
    config = {
        "data": {"train": f"{folder}/rows.parquet", "label_column": "label"},
        "features": {"user": {"table": "user"}, **floats},
        "tables": {"user": {"num_embeddings": 20, "embedding_dim": 4}},
        "model": {"name": "dlrm", "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"global_batch_size": 20},
    }
    (folder / "config.yaml").write_text(yaml.dump(config, sort_keys=False))
    run_recsys("train", folder / "config.yaml", f"run.dir={folder}/run")
    run_recsys("export", folder / "run", folder / "out")
    return open_run(folder / "run"), Scorer(folder / "out"), rows


def with_text(rows: pa.Table, text: Any) -> pa.Table:
    return rows.set_column(rows.column_names.index("text"), "text", text)


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.float64()), pa.list_(pa.float32(), 3), pa.large_list(pa.float32()), pa.list_view(pa.float32())],
    ids=str,
)
def test_types(opened: Opened, kind: pa.DataType) -> None:
    run, scorer, rows = opened
    expected = run.predict(rows, keep=[])["score"].to_numpy()
    assert np.ptp(expected) > 1e-3
    given = with_text(rows, pa.array([text or None for text in rows["text"].to_pylist()], kind))
    for some in (slice(0, ROWS), slice(5, 9)):
        part = given.slice(some.start, some.stop - some.start)
        for found in (run.predict(part, keep=[]), scorer.score(part)):
            np.testing.assert_allclose(found["score"].to_numpy(), expected[some], rtol=1e-5, atol=1e-6)


def test_nothing_but_nulls(opened: Opened) -> None:
    run, scorer, rows = opened
    for nulls in (pa.nulls(ROWS), pa.nulls(ROWS, pa.list_(pa.float32()))):
        found = [
            scored["score"].to_numpy()
            for scored in (run.predict(with_text(rows, nulls)), scorer.score(with_text(rows, nulls)))
        ]
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    assert not len(scorer.score(rows.slice(0, 0)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([[1.0]] * ROWS, ("holds a list of 1 numbers", "must hold lists of 3 numbers, found one of 1")),
        ([1.0] * ROWS, ("must hold lists of 3 numbers, found double",) * 2),
        ([["a", "b", "c"]] * ROWS, ("must hold lists of 3 numbers, found list<",) * 2),
    ],
    ids=["shorter", "numbers", "texts"],
)
def test_what_is_none_is_told(opened: Opened, text: list[Any], said: tuple[str, str]) -> None:
    run, scorer, rows = opened
    given = with_text(rows, pa.array(text))
    with pytest.raises(UserError) as of_run:
        run.predict(given)
    with pytest.raises(ExportError) as of_export:
        scorer.score(given)
    for error, words in ((of_run, said[0]), (of_export, said[1])):
        assert f"column 'text' (text) {words}" in str(error.value)
