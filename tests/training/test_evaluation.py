"""Metrics that an evaluator of the user's own gives: numbers, by the names that its model has told."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recsys.errors import UserError
from recsys.training.evaluation import metrics_of


def metrics(values: dict[str, Any], needed: str | None = None) -> dict[str, float]:
    evaluator: Any = SimpleNamespace(compute=lambda world: values)
    return metrics_of(evaluator, world=None, needed=needed)  # type: ignore[arg-type]


def test_numbers_of_any_library_become_floats() -> None:
    """JSON takes those of neither NumPy nor torch, and results are written when a run has been trained."""
    found = metrics({"a": np.float32(0.5), "b": torch.tensor(2), "c": 3}, needed="b")
    assert found == {"a": 0.5, "b": 2.0, "c": 3.0} and {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize("value", [None, "high", torch.ones(2), [1.0]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"'model\.name': the evaluator's compute gave accuracy=.*; give a number"):
        metrics({"accuracy": value})


def test_a_metric_that_only_the_config_names() -> None:
    """Early stopping by it would never stop, and say nothing."""
    with pytest.raises(UserError, match=r"metric_names .* names accuracy, but its evaluator's compute gave auc, rows;"):
        metrics({"auc": 0.5, "rows": 1.0}, needed="accuracy")
