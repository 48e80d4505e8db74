"""Influences of rows on metrics: slopes by weights, whose squares add up to the variance over draws of rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recsys.config.choices import LabelLoss, RetrievalMetric
from recsys.models.label_metrics import influences, label_metrics
from recsys.models.metrics import RetrievalEvaluator

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def some_rows(loss: LabelLoss) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 2, 60).astype(float) if loss is LabelLoss.binary else generator.normal(size=60)
    outputs = np.round(generator.normal(labels, 2), 1)  # with ties
    return labels, outputs, generator.choice([0.5, 1.0, 3.0], 60)


@pytest.mark.parametrize("loss", LabelLoss)
def test_influences_are_slopes_by_the_weights_of_rows(loss: LabelLoss) -> None:
    labels, outputs, weights = some_rows(loss)
    found = influences(loss, labels, outputs, weights)
    assert found.keys() == label_metrics(loss, labels, outputs, weights).keys()
    for row in range(0, len(labels), 7):
        change = np.zeros(len(labels))
        change[row] = 1e-4 * weights[row]
        above, below = (label_metrics(loss, labels, outputs, weights + sign * change) for sign in (1, -1))
        for name, of_rows in found.items():
            assert of_rows[row] == pytest.approx((above[name] - below[name]) / 2e-4, rel=1e-4, abs=1e-9), name


def test_the_error_of_a_difference_is_that_of_paired_draws() -> None:
    generator = np.random.default_rng(0)
    labels = (generator.random(3000) < 0.3).astype(float)
    trained = generator.normal(labels, 1)
    small = trained + generator.normal(0, 0.3, 3000)
    pair = [influences(LabelLoss.binary, labels, outputs, np.ones(3000)) for outputs in (trained, small)]
    draws = []
    for _ in range(400):
        times = generator.poisson(1, 3000).astype(float)
        of_both = [label_metrics(LabelLoss.binary, labels, outputs, times) for outputs in (trained, small)]
        draws.append([of_both[0][name] - of_both[1][name] for name in pair[0]])
    for name, drawn in zip(pair[0], np.std(draws, axis=0), strict=True):
        assert np.linalg.norm(pair[0][name] - pair[1][name]) == pytest.approx(drawn, rel=0.15), name
    alone = np.linalg.norm(pair[0]["auc"])
    assert np.linalg.norm(pair[0]["auc"] - pair[1]["auc"]) < alone / 2, "rows are paired"


def test_influence_of_a_user_is_its_value_less_the_mean() -> None:
    values = np.array([[1.0, 0.5], [0.0, 0.25], [0.5, 0.0], [0.5, 1.0]])
    items: Any = range(4)
    evaluator = RetrievalEvaluator(items, [2], [RetrievalMetric.recall, RetrievalMetric.coverage])
    of_ranks = [[(values[:1], np.zeros(1, np.uint64))], [(values[1:], np.zeros(3, np.uint64))]]
    world: Any = SimpleNamespace(gather=lambda _: of_ranks)
    found = evaluator.influences(world)
    assert found.keys() == {"recall@2"}
    np.testing.assert_allclose(found["recall@2"], (values[:, 0] - 0.5) / 4)
    assert np.linalg.norm(found["recall@2"]) == pytest.approx(np.std(values[:, 0]) / 2)
