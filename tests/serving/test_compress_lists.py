"""`recsys compress` of models whose rows are users' lists: their items stand in data.items, and not beside a row."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import run_recsys

CONFIG = """
data: {train: DIR/train.parquet, valid: DIR/valid.parquet, items: DIR/items.parquet}
features:
  history: {table: item, max_length: 9}
  item: {table: item}
tables:
  item: {num_embeddings: 32, embedding_dim: 8, mapping: vocabulary, init_range: 0.1}
model: {history: history, item_id: item, dim: 8, sampled_negatives: 7, top_k: [5]}
train: {global_batch_size: 16, epochs: 1, log_every_steps: 1}
"""
OF_USERS = ("features.user.table=user", "tables.user={num_embeddings: 64, embedding_dim: 8}", "model.user_id=user")


def write_lists(folder: Path) -> Path:
    """Write users with some of 30 items each, and return a config that lacks the model's name."""
    generator = np.random.default_rng(0)
    rows = []
    for user in range(40):
        items = [f"item {i}" for i in generator.permutation(30)[: generator.integers(1, 10)]]
        rows.append({"user": user, "history": items[:-1], "targets": items[-1:], "seen": items[:-1]})
    corpus = [{"item": f"item {i}"} for i in range(30)]
    for name, content in (("train", rows), ("valid", rows), ("items", corpus)):
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet", row_group_size=17)
    (folder / "config.yaml").write_text(CONFIG.replace("DIR", str(folder)))
    return folder / "config.yaml"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("model.name=sasrec", "model.max_length=8"), marks=pytest.mark.slow),
        pytest.param(("model.name=simplex", "model.dropout=0.2", *OF_USERS), marks=pytest.mark.slow),
        pytest.param(("model.name=ultragcn", *OF_USERS), marks=pytest.mark.slow),
    ],
    ids=["sasrec", "simplex", "ultragcn"],
)
def test_rows_are_pruned_by_gradient(settings: tuple[str, ...], tmp_path: Path) -> None:
    config = write_lists(tmp_path)
    words = ("--steps", "quantize,prune", "--prune-by", "gradient", "--max-loss", "100%", "--metric", "recall@5")
    for command in (
        ("train", f"{config}", f"run.dir={tmp_path}/run", *settings),
        ("compress", f"{tmp_path}/run", f"{tmp_path}/small", *words),
        ("evaluate", f"{tmp_path}/small"),
    ):
        printed = run_recsys(*command)
    stages = json.loads((tmp_path / "small" / "compression.json").read_text())["stages"]
    evaluated = json.loads(printed.splitlines()[-1])["metrics"]["valid"]
    assert evaluated == pytest.approx(stages[-1]["metrics"], abs=1e-6)
    assert stages[0]["seen_bytes"] > stages[-1]["seen_bytes"] > 0
