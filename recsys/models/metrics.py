"""Metrics over all ranks, exact to the value of a single process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from recsys.config import LabelConfig
from recsys.config.choices import LabelLoss, RetrievalMetric
from recsys.config.model import LABEL_METRICS
from recsys.data.batch import Batch
from recsys.models.bootstrap import Bootstrap
from recsys.models.items import ItemVectors, pairs_of
from recsys.runtime.world import World


class Evaluator(Protocol):
    """Collects what a model gives for the batches of an evaluation."""

    def update(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> None:
        """Take the outputs for one batch of this rank."""

    def compute(self, world: World) -> dict[str, float]:
        """Return the metrics over the rows of all ranks, on every rank."""


def is_higher_better(metric: str) -> bool:
    """Tell which way a metric improves."""
    return metric.rpartition(".")[2] not in ("log_loss", "normalized_entropy", "rmse", "mae")


def auc(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """Return the area under the ROC curve, ties counted half; NaN when one class is missing.

    Args:
        labels: 0 or 1; scores: any order-preserving score; weights: 0 or more. All [rows].
    """
    return grouped_auc(np.zeros(len(labels), np.int8), labels, scores, weights)


def grouped_auc(groups: np.ndarray, labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean of the groups' AUCs by their sums of weights (Zhu et al. 2017, doi:10.1145/3097983.3098134).

    Groups in which one class is missing do not count; NaN if all are so.

    Args:
        groups: of any type, [rows]. The others: as of `auc`.
    """
    if not len(labels):
        return float("nan")
    order = np.argsort(scores, kind="stable")
    order = order[np.argsort(groups[order], kind="stable")]
    groups, scores, labels, weights = groups[order], scores[order], labels[order], weights[order].astype(np.float64)
    begins = np.r_[True, groups[1:] != groups[:-1]]
    ties = np.flatnonzero(begins | np.r_[True, scores[1:] != scores[:-1]])  # the first of each set of equal scores
    positive, negative = np.add.reduceat(weights * labels, ties), np.add.reduceat(weights * (1 - labels), ties)
    first = np.flatnonzero(begins[ties])  # of each group
    below = np.cumsum(negative) - negative
    below -= np.repeat(below[first], np.diff(np.r_[first, len(ties)]))
    right = np.add.reduceat(positive * (below + negative / 2), first)
    positive, negative = np.add.reduceat(positive, first), np.add.reduceat(negative, first)
    counted = (positive > 0) & (negative > 0)
    if not counted.any():
        return float("nan")
    of_group = right[counted] / (positive * negative)[counted]
    return float(np.average(of_group, weights=(positive + negative)[counted]))


def log_loss(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean binary cross-entropy in nats, from logits."""
    losses = np.logaddexp(0, logits) - labels * logits
    return float((weights * losses).sum() / weights.sum()) if weights.sum() else float("nan")


def normalized_entropy(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray) -> float:
    """Return log loss over the entropy of the mean label (He et al. 2014, doi:10.1145/2648584.2648589)."""
    if not weights.sum():
        return float("nan")
    rate = float((weights * labels).sum() / weights.sum())
    if rate in (0.0, 1.0):
        return float("nan")
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return log_loss(labels, logits, weights) / float(entropy)


def calibration(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean prediction over the mean label, 1 at best; NaN without a positive row."""
    positive = (weights * labels).sum()
    # 1 / (1 + exp(-x)) without an overflow
    return float((weights * np.exp(-np.logaddexp(0, -logits))).sum() / positive) if positive else float("nan")


def root_mean_squared_error(labels: np.ndarray, values: np.ndarray, weights: np.ndarray) -> float:
    """Return the root of the weighted mean of squared errors."""
    return float(np.sqrt(np.average((values - labels) ** 2, weights=weights))) if weights.sum() else float("nan")


def mean_absolute_error(labels: np.ndarray, values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean of absolute errors."""
    return float(np.average(np.abs(values - labels), weights=weights)) if weights.sum() else float("nan")


_OfRows = Callable[[np.ndarray, np.ndarray, np.ndarray], float]
_METRICS: dict[str, _OfRows] = {
    "auc": auc,
    "log_loss": log_loss,
    "normalized_entropy": normalized_entropy,
    "rmse": root_mean_squared_error,
    "mae": mean_absolute_error,
}


def _all_of(
    functions: Sequence[_OfRows], labels: np.ndarray, outputs: np.ndarray, weights: np.ndarray, drawn: np.ndarray
) -> list[float]:
    return [function(labels, outputs, weights * drawn) for function in functions]


class LabelEvaluator:
    """The metrics of each label: of a binary one AUC, log loss, normalized entropy, calibration, else RMSE and MAE.

    Their names begin with that of the label where there are several: `click.auc`. Rows whose label is not known do not
    count for it.
    """

    def __init__(self, labels: Mapping[str, LabelConfig]) -> None:
        self._labels = labels
        self._rows: list[list[np.ndarray]] = [[] for _ in labels]
        self._units: list[list[np.ndarray]] = [[] for _ in labels]

    def update(
        self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch, units: np.ndarray | None = None
    ) -> None:
        """Take the outputs for one batch; `units`, uint64 [rows], say what each row belongs to."""
        assert isinstance(outputs, torch.Tensor)
        columns = outputs.float().view(len(outputs), len(self._labels)).unbind(1)
        for i, column in enumerate(columns):
            values = torch.stack([batch.labels[:, i], column, batch.label_weights(i)]).cpu().numpy()
            self._rows[i].append(values[:, values[2] > 0])
            if units is not None:
                self._units[i].append(units[values[2] > 0])

    def compute(self, world: World) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for prefix, functions, values, _ in self._of_labels(world):
            metrics |= {f"{prefix}{key}": function(*values) for key, function in functions.items()}
            metrics[f"{prefix}rows"] = float(values.shape[1])
        return metrics

    def grouped(self, world: World) -> dict[str, float]:
        """Return the grouped AUC of binary labels, by the units as groups; collective."""
        return {
            f"{prefix}gauc": grouped_auc(units, *values)
            for prefix, functions, values, units in self._of_labels(world)
            if "auc" in functions
        }

    def intervals(self, world: World, bootstrap: Bootstrap, grouped: bool) -> dict[str, list[float]]:
        """Return the intervals of all metrics by draws of units, with `grouped` those of `grouped` too; collective."""
        found: dict[str, list[float]] = {}
        for prefix, functions, values, units in self._of_labels(world):
            order = np.argsort(values[1], kind="stable")  # sorting them again then takes one pass
            (labels, outputs, weights), units = values[:, order], units[order]
            if grouped and "auc" in functions:
                functions["gauc"] = partial(grouped_auc, units)
            measure = partial(_all_of, list(functions.values()), labels, outputs, weights)
            found |= bootstrap.intervals(world, units, [prefix + key for key in functions], measure)
        return found

    def _of_labels(self, world: World) -> Iterator[tuple[str, dict[str, _OfRows], np.ndarray, np.ndarray]]:
        """Yield of each label the prefix of its metrics, their functions, and of the rows of all ranks what these take,
        float64 [3, rows], and the units, uint64 [rows]."""
        none = np.zeros((3, 0), np.float32), np.zeros(0, np.uint64)
        for (name, label), rows, units in zip(self._labels.items(), self._rows, self._units, strict=True):
            mine = np.concatenate([none[0], *rows], axis=1), np.concatenate([none[1], *units])
            values, of_rows = (np.concatenate(each, axis=-1) for each in zip(*world.gather(mine), strict=True))
            functions = {key: _METRICS[key] for key in LABEL_METRICS[label.loss]}
            if label.loss is LabelLoss.binary:
                functions["calibration"] = calibration
            yield f"{name}." if len(self._labels) > 1 else "", functions, values.astype(np.float64), of_rows


def _recall(hits: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    return hits.sum(1) / num_targets


def _ndcg(hits: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    discount = 1 / torch.log2(_places(hits) + 1)
    ideal = discount.cumsum(0)[num_targets.clamp(max=hits.shape[1]).long() - 1]
    return (hits * discount).sum(1) / ideal


def _hit_rate(hits: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    return hits.amax(1)


def _mean_reciprocal_rank(hits: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    return (hits / _places(hits)).amax(1)


def _average_precision(hits: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    return (hits * hits.cumsum(1) / _places(hits)).sum(1) / num_targets


def _places(hits: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, hits.shape[1] + 1, device=hits.device).double()


# Of hits among the best K, best first, [users, K] of 0 and 1 in FP64, and numbers of targets, [users]: a value a user.
_BY_USER: dict[RetrievalMetric, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    RetrievalMetric.recall: _recall,
    RetrievalMetric.ndcg: _ndcg,
    RetrievalMetric.hit_rate: _hit_rate,
    RetrievalMetric.mrr: _mean_reciprocal_rank,
    RetrievalMetric.map: _average_precision,
}


class RetrievalEvaluator:
    """Metrics of the best K items of users among all, items in `seen` left out.

    They are defined as in ranx (Bassani 2022, doi:10.1007/978-3-030-99739-7_30), and recall@K and map@K divide by the
    number of a user's targets, be they more than K or not. Users without targets do not count.

    Args:
        items: vectors of the whole corpus.
        top_k: the K's. metrics: what is told of each.
    """

    def __init__(self, items: ItemVectors, top_k: Sequence[int], metrics: Sequence[RetrievalMetric]) -> None:
        self._items = items
        self._pairs = [(metric, k) for k in top_k for metric in metrics]
        self._most = max(top_k)
        self._sums = torch.zeros(len(self._pairs) + 1, dtype=torch.float64)
        covering = top_k if RetrievalMetric.coverage in metrics else []
        self._of_users: list[tuple[np.ndarray, np.ndarray]] = []
        self._shown = {k: torch.zeros(len(items), dtype=torch.bool) for k in covering}

    def update(
        self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch, units: np.ndarray | None = None
    ) -> None:
        """Take the outputs for one batch; `units`, uint64 [rows], say what each row belongs to."""
        assert batch.lists is not None
        for rows, scores, best in self._items.best(outputs[0], self._most, batch):
            relevant = torch.zeros(len(best), len(self._items), dtype=torch.bool, device=best.device)
            relevant[pairs_of(batch, "targets", rows)] = True
            num_targets = batch.lists["targets"].lengths()[rows]
            counted = (num_targets > 0) & (batch.weights[rows] > 0)
            # Where K exceeds the number of items not seen, the best K hold some that are: no hits.
            is_shown = counted[:, None] & (scores > -torch.inf)
            of_users = self._add((relevant.gather(1, best) & is_shown)[counted].double(), num_targets[counted].double())
            if units is not None:
                self._of_users.append((of_users, units[rows][counted.cpu().numpy()]))
            for k, shown in self._shown.items():
                shown[best[:, :k][is_shown[:, :k]].cpu()] = True

    def compute(self, world: World) -> dict[str, float]:
        covered = [shown.double() for shown in self._shown.values()]
        sums, *counts = world.sum(torch.cat([self._sums, *covered])).split([len(self._sums), *map(len, covered)])
        shares = {k: float((count > 0).double().mean()) for k, count in zip(self._shown, counts, strict=True)}
        users = float(sums[-1])
        means = (sums[:-1] / users).tolist() if users else [float("nan")] * len(self._pairs)
        values = {
            f"{metric.value}@{k}": shares[k] if metric is RetrievalMetric.coverage else mean
            for (metric, k), mean in zip(self._pairs, means, strict=True)
        }
        return {**values, "users": users}

    def intervals(self, world: World, bootstrap: Bootstrap, grouped: bool = False) -> dict[str, list[float]]:
        """Return the intervals of all metrics but coverage by draws of units; collective."""
        none = np.zeros((0, len(self._pairs))), np.zeros(0, np.uint64)
        of_ranks = [part for each in world.gather(self._of_users) for part in each]
        values, units = (np.concatenate(each) for each in zip(none, *of_ranks, strict=True))
        kept = [i for i, (metric, _) in enumerate(self._pairs) if metric is not RetrievalMetric.coverage]
        names = [f"{metric.value}@{k}" for metric, k in (self._pairs[i] for i in kept)]
        return bootstrap.intervals(world, units, names, lambda drawn: (drawn @ values[:, kept] / drawn.sum()).tolist())

    def _add(self, hits: torch.Tensor, num_targets: torch.Tensor) -> np.ndarray:
        """Add users to the sums; return their values, [users, pairs]."""
        zero = hits.new_zeros(len(hits))
        of_pairs = [_BY_USER.get(metric, lambda *_: zero)(hits[:, :k], num_targets) for metric, k in self._pairs]
        self._sums += torch.stack([*(each.sum() for each in of_pairs), hits.new_tensor(len(hits))]).cpu()
        return torch.stack(of_pairs, dim=1).cpu().numpy()
