"""What an evaluation keeps of each row of a label, and what predictions know of it."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from batches import batch_of
from test_metrics import LABELS, over_ranks

from recsys.config import load_config
from recsys.memory import DataFacts, Decoding, DenseFacts, predict
from recsys.models.label_metrics import LabelEvaluator, auc
from recsys.runtime.machine import topology_of


def test_a_row_takes_16_bytes_at_most() -> None:
    """8 are kept, joined in an array of 8; sorting and counting pairs take a piece at a time."""
    num_rows, rng, evaluator = 1 << 22, np.random.default_rng(0), LabelEvaluator(LABELS)
    labels, logits, weights = rng.integers(0, 2, 1 << 13), rng.normal(size=1 << 13).astype(np.float32), np.ones(1 << 13)
    batch, outputs = batch_of(weights, labels), torch.tensor(logits)
    tracemalloc.start()
    for _ in range(num_rows >> 13):
        evaluator.update(outputs, batch)
    kept, _ = tracemalloc.get_traced_memory()
    found = over_ranks([evaluator])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found["rows"] == num_rows and found["auc"] == pytest.approx(auc(labels, logits, weights), rel=1e-12)
    assert kept < 8.5 * num_rows and peak < 16.5 * num_rows


@pytest.mark.parametrize(("binary", "squared"), [(1, 0), pytest.param(12, 0, marks=pytest.mark.slow), (2, 3), (0, 2)])
def test_what_an_evaluation_keeps_goes_by_its_labels(binary: int, squared: int, tmp_path: Path) -> None:
    labels = {f"b{i}": {} for i in range(binary)} | {f"n{i}": {"loss": "squared"} for i in range(squared)}
    content = {
        "data": {"train": "data/sample/train", "labels": labels},
        "features": {"user_id": {"table": "user"}},
        "tables": {"user": {"num_embeddings": 1000, "embedding_dim": 8}},
        "model": {"name": "mmoe"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    config, num_rows, at_once = load_config(tmp_path / "config.yaml"), 1 << 20, 1 << 13
    data = DataFacts({"user_id": 1}, 4, 0, (Decoding(),), {"valid": num_rows}, "", eval_ids=({"user_id": 1.0},))
    (rank,) = predict(config, data, DenseFacts(0, 0, 0, (0,), 1, 0, (0,), 0), topology_of(config), [])
    evaluator, rng = LabelEvaluator(config.labels()), np.random.default_rng(0)
    columns = rng.integers(0, 2, (at_once, binary + squared))
    batch = batch_of(np.ones(at_once), columns)
    outputs = torch.tensor(rng.normal(size=columns.shape)).float()
    tracemalloc.start()
    for _ in range(num_rows // at_once):
        evaluator.update(outputs, batch)
    over_ranks([evaluator])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rank.phases["evaluation"]["host"].get("results", 0) == pytest.approx(peak, rel=0.1, abs=4 << 20)
