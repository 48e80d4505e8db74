"""Metrics against scikit-learn's and ranx's, where these are installed, on random rows and users with ties."""

from typing import Any

import numpy as np
import pytest
import torch
from batches import batch_of
from test_metrics import User, item_vectors, over_ranks, ranking_evaluators, retrieval, some_users

from recsys.config import LabelConfig
from recsys.config.choices import LabelLoss, RetrievalMetric
from recsys.models.label_metrics import LabelEvaluator, grouped_auc

TOP_K = [1, 5, 10, 60]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_labels_as_scikit_learn(seed: int, num_ranks: int) -> None:
    sklearn: Any = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, 5000).astype(np.float64)
    logits = np.round(generator.normal(labels, 3, 5000) * 4) / 4  # exact in FP32, some eighty values
    weights = generator.choice([0.25, 0.5, 1.0, 3.0], 5000)
    found = over_ranks(ranking_evaluators(num_ranks, (labels, logits, weights)))
    rates = 1 / (1 + np.exp(-logits))
    assert found["auc"] == pytest.approx(sklearn.roc_auc_score(labels, logits, sample_weight=weights), abs=1e-9)
    expected = sklearn.log_loss(labels, rates, sample_weight=weights)
    assert found["log_loss"] == pytest.approx(expected, abs=1e-9)
    base = np.full(5000, np.average(labels, weights=weights))
    entropy = sklearn.log_loss(labels, base, sample_weight=weights)
    assert found["normalized_entropy"] == pytest.approx(expected / entropy, abs=1e-9)

    groups = generator.integers(0, 7, 5000)
    of_groups = [
        sklearn.roc_auc_score(labels[mine], logits[mine], sample_weight=weights[mine])
        for mine in (groups == group for group in range(7))
    ]
    sums = [weights[groups == group].sum() for group in range(7)]
    found_gauc = grouped_auc(groups, labels, logits, weights)
    assert found_gauc == pytest.approx(np.average(of_groups, weights=sums), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_as_scikit_learn(seed: int) -> None:
    sklearn: Any = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(seed)
    numbers, outputs = generator.integers(-40, 40, (2, 3000)) / 8
    weights = generator.choice([0.25, 1.0, 3.0], 3000)
    evaluator = LabelEvaluator({"label": LabelConfig(loss=LabelLoss.squared)})
    evaluator.update(torch.tensor(outputs, dtype=torch.float32), batch_of(weights, numbers))
    found = over_ranks([evaluator])
    squared = sklearn.mean_squared_error(numbers, outputs, sample_weight=weights)
    assert found["rmse"] == pytest.approx(np.sqrt(squared), abs=1e-9)
    absolute = sklearn.mean_absolute_error(numbers, outputs, sample_weight=weights)
    assert found["mae"] == pytest.approx(absolute, abs=1e-9)


def ranked(user: User, items: np.ndarray) -> list[int]:
    """Return the items that are not seen, best first, of equal ones in the order in which they are shown."""
    batch = batch_of([1.0], [1.0], {"seen": [user.seen]})
    scores, positions = item_vectors(items).best(torch.from_numpy(user.vector)[None], len(items), batch)
    shown = [i for score, i in zip(scores[0].tolist(), positions[0].tolist(), strict=True) if score > -np.inf]
    values = items[shown] @ user.vector
    assert set(shown) == set(range(len(items))) - set(user.seen)
    assert (values[1:] <= values[:-1]).all() and (len(values) < 20 or len(set(values.tolist())) < len(values))
    return shown


@pytest.mark.slow  # ranx compiles its functions
@pytest.mark.parametrize("seed", range(5))
def test_retrieval_as_ranx(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranx: Any = pytest.importorskip("ranx")
    # What comes first of equal items must not follow the chance of how they lie.
    monkeypatch.setattr(torch, "randperm", torch.arange)
    users, generator = some_users(300, 40, seed), np.random.default_rng(seed)
    items = generator.integers(-1, 2, (40, 8)).astype(np.float32)
    for user in users:
        user.vector = generator.integers(-1, 2, 8).astype(np.float32)
    found = retrieval([users], items, TOP_K)
    counted = [user for user in users if user.targets and user.weight]
    assert found["users"] == len(counted) > 150
    targets, lists = {}, {}
    for number, user in enumerate(counted):
        names = [f"item {item}" if item >= 0 else f"unknown {i}" for i, item in enumerate(user.targets)]
        targets[f"user {number}"] = dict.fromkeys(names, 1)
        order = [f"item {i}" for i in ranked(user, items)] or ["nothing"]
        lists[f"user {number}"] = {name: -float(place) for place, name in enumerate(order)}
    metrics = [metric.value for metric in RetrievalMetric if metric is not RetrievalMetric.coverage]
    names = [f"{metric}@{k}" for metric in metrics for k in TOP_K]
    expected = ranx.evaluate(ranx.Qrels(targets), ranx.Run(lists), names)
    assert {name: found[name] for name in names} == pytest.approx(expected, abs=1e-9)
