"""A small retrieval data set, the config of two towers for it, and runs of retrieval models."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from launch import evaluate, train_losses

NUM_USERS, NUM_ITEMS = 40, 60
CONFIG = """
data: {train: DIR/train.parquet, valid: DIR/valid.parquet, test: DIR/valid.parquet, items: DIR/items.parquet}
features:
  user: {table: user}
  history: {table: item, max_length: 5}
  item: {table: item}
  year: {type: float}
tables:
  user: {num_embeddings: 200, embedding_dim: 8}
  item: {num_embeddings: 500, embedding_dim: 8, pooling: mean}
model:
  name: two_tower
  user_features: [user, history]
  item_features: [item, year]
  item_id: item
  user_mlp: []
  item_mlp: []
  output_dim: 8
  dropout: 0.1
  top_k: [5, 10]
train: {global_batch_size: 64, epochs: 12, log_every_steps: 1}
"""


def write_retrieval(folder: Path) -> Path:
    """Write users of two kinds, who each like items of one half, and return a config; ids of items are strings."""
    generator = np.random.default_rng(0)
    items = [f"item-{i}" for i in range(NUM_ITEMS)]
    rows, users = [], []
    for user in range(NUM_USERS):
        liked = generator.permutation(np.arange(user % 2, NUM_ITEMS, 2))[:20]
        for n, item in enumerate(liked[:15]):
            history = [items[i] for i in liked[max(0, n - 5) : n]]
            rows.append({"user": user, "item": items[item], "history": history, "year": float(item % 7)})
        held_out = [items[i] for i in liked[15:]]
        seen = [items[i] for i in liked[:15]]
        users.append({"user": user, "history": seen[-5:], "targets": held_out, "seen": seen})
    corpus = [{"item": name, "year": float(i % 7)} for i, name in enumerate(items)]
    for name, content in (("train", rows), ("valid", users), ("items", corpus)):
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet", row_group_size=37)
    (folder / "config.yaml").write_text(CONFIG.replace("DIR", str(folder)))
    return folder / "config.yaml"


def train(config: Path, run_dir: Path, *overrides: str, nproc: int = 1) -> tuple[dict[str, float], list[float]]:
    """Train; return the metrics on data.test, and the loss of every step."""
    losses = train_losses(config, run_dir, *overrides, nproc=nproc)
    return json.loads((run_dir / "result.json").read_text())["metrics"]["test"], losses


class Trained(NamedTuple):
    """A run directory, the metrics on data.test, and the loss of every step."""

    run: Path
    metrics: dict[str, float]
    losses: list[float]


def assert_learns_alike(config: Path, run_dir: Path, alone: Trained, *overrides: str, nproc: int) -> None:
    """Train another run, and compare its losses, its metrics and those of an evaluation with the run `alone`."""
    metrics, losses = train(config, run_dir, *overrides, nproc=nproc)
    torch.testing.assert_close(losses, alone.losses, rtol=0, atol=1e-5)
    torch.testing.assert_close(metrics, alone.metrics, rtol=0, atol=1e-6)
    torch.testing.assert_close(evaluate(run_dir)["test"], alone.metrics, rtol=0, atol=1e-6)


def train_towers(folder: Path, *overrides: str) -> Path:
    """Write the data set to a folder, and train two towers on it; return the run directory."""
    train(write_retrieval(folder), folder / "run", *overrides)
    return folder / "run"
