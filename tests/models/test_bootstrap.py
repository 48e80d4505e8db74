"""Grouped AUC against a loop over pairs; intervals by bootstrap, which neither order nor ranks change."""

import math
from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks

from recsys.models.bootstrap import Bootstrap
from recsys.models.label_metrics import auc, grouped_auc

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def loop(groups: np.ndarray, labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """The groups' shares of weighted pairs in the right order, ties half, weighted by their rows."""
    total = sum_of_weights = 0.0
    for group in set(groups.tolist()):
        right = pairs = 0.0
        mine = np.flatnonzero(groups == group)
        for i in mine[labels[mine] == 1]:
            for j in mine[labels[mine] == 0]:
                pairs += weights[i] * weights[j]
                right += weights[i] * weights[j] * (1.0 if scores[i] > scores[j] else 0.5 * (scores[i] == scores[j]))
        if pairs:
            total += weights[mine].sum() * right / pairs
            sum_of_weights += weights[mine].sum()
    return total / sum_of_weights


@pytest.mark.parametrize("seed", range(5))
def test_grouped_auc_is_that_of_a_loop(seed: int) -> None:
    generator = np.random.default_rng(seed)
    groups = generator.choice(np.array([0, 7, 2**63 + 5, 2**64 - 1, 12], np.uint64), 120)
    labels = np.where(groups == 7, 1.0, generator.integers(0, 2, 120))  # one group has positive rows alone
    scores, weights = np.round(generator.normal(labels, 2)), generator.choice([0.0, 0.5, 1.0, 3.0], 120)
    assert grouped_auc(groups, labels, scores, weights) == pytest.approx(
        loop(groups, labels, scores, weights), abs=1e-12
    )


def test_grouped_auc_by_hand() -> None:
    groups = np.array(["a", "a", "b", "b", "b", "c"])
    labels, scores = np.array([1, 0, 0, 1, 0, 1.0]), np.array([9, 8, 5, 4, 3, -7.0])
    assert grouped_auc(groups, labels, scores, np.ones(6)) == pytest.approx((2 * 1 + 3 * 0.5) / 5)
    assert auc(labels, scores, np.ones(6)) == pytest.approx(4 / 9)
    assert math.isnan(grouped_auc(groups, np.ones(6), scores, np.ones(6)))


def test_intervals_of_a_mean_are_those_of_its_standard_error() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(3, 2, 1000)
    units = generator.permutation(1000).astype(np.uint64) * np.uint64(2**53 + 1)
    shuffled = generator.permutation(1000)

    def of(values: np.ndarray, units: np.ndarray, world_size: int) -> list[float]:
        bootstrap = Bootstrap(500, seed=1)

        def compute(world: Any) -> dict[str, list[float]]:
            return bootstrap.intervals(world, units, ["mean"], lambda drawn: [np.average(values, weights=drawn)])

        return on_ranks(world_size, compute)[-1]["mean"]

    low, high = of(values, units, 1)
    error = values.std() / 1000**0.5
    assert (low - values.mean()) / error == pytest.approx(-1.96, abs=0.25)
    assert (high - values.mean()) / error == pytest.approx(1.96, abs=0.25)
    assert of(values[shuffled], units[shuffled], 3) == pytest.approx([low, high], abs=1e-12)
    # Ten rows to each unit, all alike, tell no more than the units do.
    low, high = of(np.repeat(values[:100], 10), np.repeat(units[:100], 10), 2)
    assert (high - low) / (2 * 1.96 * values[:100].std() / 10) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("names", [[], ["mean"]])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_without_draws_and_metrics_without_intervals(world_size: int, names: list[str]) -> None:
    """Coverage alone has no intervals, and of one draw two ranks have none."""
    bootstrap, units = Bootstrap(1, seed=1), np.arange(9, dtype=np.uint64)
    *_, found = on_ranks(
        world_size, lambda world: bootstrap.intervals(world, units, names, lambda drawn: [drawn.sum()] * len(names))
    )
    assert list(found) == names and all(low == high > 0 for low, high in found.values())
