"""What an evaluation keeps of each row of a label."""

import tracemalloc

import numpy as np
import pytest
import torch
from test_metrics import LABELS, batch_of, over_ranks

from recsys.models.label_metrics import LabelEvaluator, auc


def test_a_row_takes_16_bytes_at_most() -> None:
    """8 are kept, joined in an array of 8; sorting and counting pairs take a piece at a time."""
    num_rows, rng, evaluator = 1 << 22, np.random.default_rng(0), LabelEvaluator(LABELS)
    labels, logits, weights = rng.integers(0, 2, 1 << 13), rng.normal(size=1 << 13).astype(np.float32), np.ones(1 << 13)
    batch, outputs = batch_of(labels, weights), torch.tensor(logits)
    tracemalloc.start()
    for _ in range(num_rows >> 13):
        evaluator.update(outputs, batch)
    kept, _ = tracemalloc.get_traced_memory()
    found = over_ranks([evaluator])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found["rows"] == num_rows and found["auc"] == pytest.approx(auc(labels, logits, weights), rel=1e-12)
    assert kept < 8.5 * num_rows and peak < 16.5 * num_rows
