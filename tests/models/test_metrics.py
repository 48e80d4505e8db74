"""Metrics against plain loops over rows, pairs and users, on one rank and on several."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import batch_of
from thread_ranks import on_ranks

from recsys.config import Device, LabelConfig
from recsys.config.choices import LabelLoss, RetrievalMetric
from recsys.models import items as items_module
from recsys.models import label_metrics as label_module
from recsys.models.items import ItemVectors
from recsys.models.label_metrics import LabelEvaluator, auc, label_metrics
from recsys.models.metrics import RetrievalEvaluator, is_higher_better
from recsys.runtime.world import open_world

# A division by nothing must not be made, rather than come out as NaN with a warning.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def of_binary(name: str) -> Any:
    """Return a metric of labels, logits and weights."""
    return lambda *rows: label_metrics(LabelLoss.binary, *rows)[name]


log_loss, normalized_entropy, calibration = map(of_binary, ("log_loss", "normalized_entropy", "calibration"))
LABELS = {"label": LabelConfig()}


def over_ranks(evaluators: list[Any]) -> dict[str, float]:
    """Compute on every rank; all must agree."""
    results = on_ranks(len(evaluators), lambda world: evaluators[world.rank].compute(world))
    for result in results:
        assert result == pytest.approx(results[0], nan_ok=True)
    return results[0]


# Ranking


def naive_auc(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """The share of weighted pairs of a positive and a negative row in the right order, a tie for half a pair."""
    right = pairs = 0.0
    for i in np.flatnonzero(labels == 1):
        for j in np.flatnonzero(labels == 0):
            weight = weights[i] * weights[j]
            pairs += weight
            right += weight * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
    return right / pairs


def some_rows(count: int, seed: int, ties: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count).astype(np.float64)
    logits = generator.normal(labels, 2)
    weights = generator.choice([0.0, 0.5, 1.0, 3.0], count)
    return labels, np.round(logits) if ties else logits, weights


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_pairs(ties, seed):
    rows = some_rows(60, seed, ties)
    assert auc(*rows) == pytest.approx(naive_auc(*rows), rel=1e-12)


def test_auc_by_hand():
    ones = np.ones(4)
    labels = np.array([0, 0, 1, 1])
    assert auc(labels, np.array([1, 2, 3, 4]), ones) == 1
    assert auc(labels, np.array([4, 3, 2, 1]), ones) == 0
    assert auc(labels, np.array([5, 5, 5, 5]), ones) == 0.5
    assert auc(labels, np.array([1, 3, 2, 4]), ones) == 0.75
    assert auc(labels, np.array([1, 3, 2, 4]), np.array([1, 2, 1, 1])) == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("labels", "weights"), [([1, 1], [1, 1]), ([0, 0], [1, 1]), ([0, 1], [1, 0]), ([0, 1], [0, 1]), ([], [])]
)
def test_auc_of_one_class_is_nan(labels, weights):
    assert math.isnan(auc(np.array(labels, float), np.zeros(len(labels)), np.array(weights, float)))


def naive_log_loss(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray) -> float:
    total = 0.0
    for label, logit, weight in zip(labels, logits, weights, strict=True):
        probability = 1 / (1 + math.exp(-logit))
        total -= weight * (label * math.log(probability) + (1 - label) * math.log(1 - probability))
    return total / sum(weights)


def test_log_loss_and_normalized_entropy():
    for seed in range(3):
        rows = some_rows(50, seed)
        labels, _, weights = rows
        assert log_loss(*rows) == pytest.approx(naive_log_loss(*rows))
        rate = sum(labels * weights) / sum(weights)
        entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        assert normalized_entropy(*rows) == pytest.approx(naive_log_loss(*rows) / entropy)


def test_base_rate_has_a_normalized_entropy_of_one():
    labels, weights = np.array([0, 0, 0, 1.0]), np.array([1, 1, 2, 2.0])
    logits = np.full(4, math.log((1 / 3) / (2 / 3)))
    assert normalized_entropy(labels, logits, weights) == pytest.approx(1)


def test_log_loss_of_sure_predictions_is_finite():
    labels, ones = np.array([1.0, 0.0]), np.ones(2)
    assert log_loss(labels, np.array([1000.0, -1000.0]), ones) == 0
    assert log_loss(labels, np.array([-1000.0, 1000.0]), ones) == 1000


def test_nothing_to_measure_is_nan():
    none, zero = np.zeros(0), np.zeros(1)
    for function in (auc, log_loss, normalized_entropy):
        assert math.isnan(function(none, none, none))
        assert math.isnan(function(np.ones(1), zero, zero))
    assert math.isnan(normalized_entropy(np.ones(2), np.zeros(2), np.ones(2)))
    assert math.isnan(normalized_entropy(np.zeros(2), np.zeros(2), np.ones(2)))


def ranking_evaluators(num_ranks: int, rows: tuple[np.ndarray, ...]) -> list[LabelEvaluator]:
    evaluators = [LabelEvaluator(LABELS) for _ in range(num_ranks)]
    for i, part in enumerate(np.array_split(np.arange(len(rows[0])), num_ranks * 3)):
        labels, logits, weights = (each[part] for each in rows)
        evaluators[i % num_ranks].update(torch.tensor(logits, dtype=torch.float32), batch_of(weights, labels))
    return evaluators


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ranking_over_ranks_and_batches(num_ranks):
    rows = some_rows(90, 0)
    found = over_ranks(ranking_evaluators(num_ranks, rows))
    assert found == pytest.approx(
        {
            "auc": naive_auc(*rows),
            "log_loss": naive_log_loss(*rows),
            "normalized_entropy": normalized_entropy(*rows),
            "calibration": float(rows[2] @ (1 / (1 + np.exp(-rows[1]))) / (rows[2] @ rows[0])),
            "rows": float((rows[2] > 0).sum()),
        }
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("num_rows", [0, 3, 90, 2000])
def test_auc_over_ranks_with_many_ties(num_rows, num_ranks, monkeypatch):
    monkeypatch.setattr(label_module, "_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(label_module, "_SAMPLED_SCORES", 8)
    rng = np.random.default_rng(num_rows)
    logits = np.where(rng.random(num_rows) < 0.5, rng.integers(-3, 4, num_rows), rng.normal(size=num_rows))
    logits *= rng.choice([1.0, -1.0], num_rows)  # -0.0 equals 0.0
    rows = rng.integers(0, 2, num_rows).astype(float), logits.astype(np.float32), rng.random(num_rows)
    expected = auc(rows[0], rows[1].astype(float), rows[2].astype(np.float32).astype(float))
    found = over_ranks(ranking_evaluators(num_ranks, rows))["auc"]
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_calibration_by_hand():
    labels, ones = np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4)
    assert calibration(labels, np.full(4, -math.log(3)), ones) == pytest.approx(1)
    assert calibration(labels, np.zeros(4), ones) == pytest.approx(2)
    assert calibration(labels, np.array([1e4, -1e4, -1e4, -1e4]), ones) == pytest.approx(1)
    assert math.isnan(calibration(np.zeros(4), np.zeros(4), ones))


def test_ranking_fill_does_not_count():
    evaluator = LabelEvaluator(LABELS)
    evaluator.update(torch.tensor([2.0, -1.0, float("nan")]), batch_of([1, 1, 0], [1, 0, 0]))
    found = over_ranks([evaluator, LabelEvaluator(LABELS)])
    assert (found["auc"], found["rows"]) == (1, 2)
    assert math.isfinite(found["log_loss"])


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])  # which would be the highest score, and the lowest
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_score_that_is_nan_has_no_place(num_ranks, nan):
    evaluators = ranking_evaluators(num_ranks, some_rows(90, 0))
    evaluators[-1].update(torch.tensor([nan]), batch_of([1], [1]))
    found = over_ranks(evaluators)
    assert math.isnan(found["auc"]) and math.isnan(found["log_loss"])
    assert math.isnan(auc(np.array([1.0, 0]), np.array([nan, 0]), np.ones(2)))


def test_ranking_of_low_precision_outputs():
    evaluator = LabelEvaluator(LABELS)
    evaluator.update(torch.tensor([2.0, -1.0], dtype=torch.bfloat16), batch_of([1, 1], [1, 0]))
    assert over_ranks([evaluator])["auc"] == 1


# Retrieval


@dataclass
class User:
    vector: np.ndarray
    targets: list[int]
    seen: list[int]
    weight: float


def some_users(count: int, num_items: int) -> list[User]:
    """Among them users without targets, of weight 0, with unknown items (-1), and who have seen nearly all."""
    generator = np.random.default_rng(0)

    def items(most: int) -> list[int]:
        some = generator.permutation(num_items)[: generator.integers(0, most + 1)].tolist()
        return some + [-1] * int(generator.integers(0, 3))

    users = []
    for i in range(count):
        targets = [] if i % 5 == 0 else items(4)
        seen = items(num_items if i % 3 == 0 else 3)
        users.append(User(generator.normal(size=8).astype(np.float32), targets, seen, float(i % 7 > 0)))
    return users


def naive_retrieval(users: list[User], items: np.ndarray, top_k: list[int], mask: bool) -> dict[str, float]:
    sums = {f"{metric.value}@{k}": 0.0 for k in top_k for metric in RetrievalMetric}
    counted, shown = 0, {k: set[int]() for k in top_k}
    for user in users:
        if not user.targets or not user.weight:
            continue
        counted += 1
        allowed = [i for i in range(len(items)) if not (mask and i in user.seen)]
        ranked = sorted(allowed, key=lambda i: -float(items[i] @ user.vector))
        for k in top_k:
            hits = [place for place, item in enumerate(ranked[:k]) if item in user.targets]
            ideal = sum(1 / math.log2(place + 2) for place in range(min(k, len(user.targets))))
            sums[f"recall@{k}"] += len(hits) / len(user.targets)
            sums[f"ndcg@{k}"] += sum(1 / math.log2(place + 2) for place in hits) / ideal
            sums[f"hit_rate@{k}"] += len(hits) > 0
            sums[f"mrr@{k}"] += 1 / (1 + hits[0]) if hits else 0
            sums[f"map@{k}"] += sum((i + 1) / (place + 1) for i, place in enumerate(hits)) / len(user.targets)
            shown[k] |= set(ranked[:k])
    means = {name: total / counted for name, total in sums.items()}
    return means | {f"coverage@{k}": len(shown[k]) / len(items) for k in top_k} | {"users": counted}


def update(evaluator: RetrievalEvaluator, users: list[User], mask: bool = True) -> None:
    lists = {"seen": [user.seen for user in users]} if mask else {}
    lists["targets"] = [user.targets + [i for i in user.targets[:1] if i >= 0] for user in users]  # one is there twice
    vectors = torch.from_numpy(np.stack([user.vector for user in users]))
    weights = [user.weight for user in users]
    evaluator.update((vectors, torch.zeros(0)), batch_of(weights, weights, lists))


def retrieval(parts: list[list[User]], items: np.ndarray, top_k: list[int], mask: bool = True) -> dict[str, float]:
    """Evaluate each part on a rank of its own, in two batches."""
    evaluators = []
    for users in parts:
        evaluators.append(RetrievalEvaluator(item_vectors(items), top_k, list(RetrievalMetric)))
        for batch in (users[:5], users[5:]):
            if batch:
                update(evaluators[-1], batch, mask)
    return over_ranks(evaluators)


def item_vectors(items: np.ndarray) -> ItemVectors:
    """Return items that one rank holds, in another order than theirs."""
    world: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    order = torch.randperm(len(items))
    return ItemVectors(torch.from_numpy(items)[order], order, len(items), world)


def some_items(count: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=(count, 8)).astype(np.float32)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(("num_items", "top_k"), [(40, [1, 5, 10]), (7, [3, 20]), (1, [5])])
def test_retrieval_is_that_of_a_loop_over_users(mask, num_ranks, num_items, top_k):
    users, items = some_users(60, num_items), some_items(num_items)
    found = retrieval([users[rank::num_ranks] for rank in range(num_ranks)], items, top_k, mask)
    assert found == pytest.approx(naive_retrieval(users, items, top_k, mask))


def test_retrieval_in_blocks_of_users(monkeypatch):
    users, items = some_users(60, 40), some_items(40)
    for at_once in (1, 40 * 7, 1 << 25):
        monkeypatch.setattr(items_module, "_SCORES_AT_ONCE", {"cpu": at_once})
        assert retrieval([users], items, [5]) == pytest.approx(naive_retrieval(users, items, [5], True))


ITEMS = np.eye(4, dtype=np.float32)
LIKES = np.array([4, 3, 2, 1], np.float32)  # ranks the items 0, 1, 2, 3


@pytest.mark.parametrize(
    ("targets", "seen", "recall", "ndcg"),
    [
        ([0], [], 1, 1),
        ([1], [], 1, 1 / math.log2(3)),
        ([2], [], 0, 0),
        ([2], [0], 1, 1 / math.log2(3)),
        ([1, 0], [], 1, 1),
        ([0, 2, 3], [], 1 / 3, 1 / (1 + 1 / math.log2(3))),
        ([0, -1], [], 1 / 2, 1 / (1 + 1 / math.log2(3))),  # one target is not in the corpus
        ([-1], [-1], 0, 0),
        ([0], [0, 1, 2], 0, 0),  # a target among the items left out, and more places than items
    ],
)
def test_retrieval_by_hand(targets, seen, recall, ndcg):
    found = retrieval([[User(LIKES, targets, seen, 1.0)]], ITEMS, [2])
    assert (found["recall@2"], found["ndcg@2"], found["users"]) == pytest.approx((recall, ndcg, 1))


def test_retrieval_without_users_is_nan():
    found = retrieval([[User(LIKES, [], [], 1.0), User(LIKES, [0], [], 0.0)], []], ITEMS, [2])
    assert found["users"] == 0
    assert math.isnan(found["recall@2"]) and math.isnan(found["ndcg@2"])


# Both


def in_a_world(*evaluators: Any) -> list[dict[str, float]]:
    with open_world(Device.cpu, num_threads=torch.get_num_threads()) as world:
        return [evaluator.compute(world) for evaluator in evaluators]


def test_in_a_world_of_one_process():
    rows, users = some_rows(50, 1), some_users(30, 20)
    ranking = ranking_evaluators(1, rows)[0]
    retriever = RetrievalEvaluator(item_vectors(some_items(20)), [5], list(RetrievalMetric))
    update(retriever, users)
    found = in_a_world(ranking, retriever, ranking, retriever)
    assert found[0] == found[2] and found[1] == found[3]
    assert found[0]["auc"] == pytest.approx(naive_auc(*rows))
    assert found[1] == pytest.approx(naive_retrieval(users, some_items(20), [5], True))


def test_which_way_a_metric_improves():
    function: Callable[[str], bool] = is_higher_better
    assert [function(name) for name in ("auc", "recall@20", "ndcg@10")] == [True] * 3
    assert [function(name) for name in ("log_loss", "normalized_entropy")] == [False] * 2
