"""Crosses of columns: ids of combinations, on any rank count, through every mapping and with nulls."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import fork_train, must_train

from recsys.config import load_config
from recsys.data.made import Made, with_made
from recsys.errors import UserError

CONFIG = """
features:
  user: {{table: user}}
  pair: {{cross: [user, color], table: pair}}
  same: {{column: combined, table: same}}
tables:
  user: {{num_embeddings: 100, embedding_dim: 8}}
  pair: {{num_embeddings: 400, embedding_dim: 8, mapping: vocabulary}}
  same: {{num_embeddings: 400, embedding_dim: 8}}
model: {{name: dlrm}}
data: {{train: {folder}/rows, test: {folder}/rows, label_column: label, num_streams: 6, filter: "user < 45"}}
train: {{global_batch_size: 120, max_steps: 6, log_every_steps: 1}}
"""


def ids(**columns: list) -> list:
    return crossed(pa.table(columns))


def crossed(table: pa.Table) -> list:
    return with_made(table, {"x": Made(tuple(table.column_names))}, "a.parquet", 0).column("x").to_pylist()


def test_a_combination_has_one_id_and_null_where_one_is_null() -> None:
    found = ids(a=[1, 1, 2, 1, None], b=["x", "y", "x", "x", "x"])
    assert found[0] == found[3] and len({*found[:3]}) == 3 and found[4] is None
    assert ids(a=[1], b=[2]) != ids(b=[2], a=[1]), "their order counts"
    coded = pa.table({"a": pa.array(["x", None, "y"]).dictionary_encode(), "b": [1, 2, 3]})
    assert crossed(coded) == ids(a=["x", None, "y"], b=[1, 2, 3])
    with pytest.raises(UserError, match=r"^column 'b' of a cross: ids must be whole numbers"):
        ids(a=[1, 2], b=[1.0, 0.5])
    chunks = pa.chunked_array([["x"], [None, "y"]])
    assert crossed(pa.table({"a": chunks, "b": [1, 2, 3]})) == ids(a=["x", None, "y"], b=[1, 2, 3])


def write(folder: Path) -> Path:
    rng, rows = np.random.default_rng(0), 1200
    user, color = rng.integers(0, 50, rows), rng.integers(0, 5, rows)
    names = np.array(["red", "green", "blue", "white", "black"])[color]
    (folder / "rows").mkdir()
    columns = {"user": user, "color": names, "combined": user * 5 + color, "label": (user + color) % 2}
    pq.write_table(pa.table(columns), folder / "rows" / "a.parquet", row_group_size=400)
    (folder / "c.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "c.yaml"


@pytest.mark.slow
def test_a_cross_trains_as_a_column_of_its_ids_would_on_any_ranks(tmp_path: Path) -> None:
    config, results = write(tmp_path), []
    for nproc in (1, 3):
        run = tmp_path / f"run{nproc}"
        must_train(str(config), f"run.dir={run}", nproc=nproc)
        results.append(json.loads((run / "result.json").read_text()))
        vocabulary = pq.read_table(run / "vocabulary" / "pair.parquet")
        assert vocabulary.num_rows == 45 * 5, "one id for each combination that the filter leaves"
    assert results[0]["metrics"]["test"] == pytest.approx(results[1]["metrics"]["test"], rel=1e-4)
    counts = results[0]["data"]["ids"]
    assert counts["pair"]["distinct_ids"] == counts["same"]["distinct_ids"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("features.pair.cross=[user]", "two columns or more"),
        ("features.pair.cross=[user,user]", "two columns or more"),
        ("features.pair.column=user", "cannot be combined with features.pair.cross"),
        ("features.pair={type: float, table: null}", "'features.pair.cross' is for features of type id"),
    ],
)
def test_mistakes(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path), [override])
    assert said in str(caught.value)


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    done = fork_train(str(write(tmp_path)), f"run.dir={tmp_path}/run", "features.pair.cross=[user,colour]")
    assert done.returncode == 1 and "did you mean 'color'?" in done.stderr and "features.pair" in done.stderr
