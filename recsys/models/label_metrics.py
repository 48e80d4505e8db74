"""Metrics of labels over all ranks, each of which keeps its own rows: exact AUC, and metrics of sums over rows."""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch

from recsys.config import LabelConfig
from recsys.config.choices import LabelLoss
from recsys.data.batch import Batch
from recsys.models.bootstrap import Bootstrap
from recsys.models.columns import by_label
from recsys.models.packed_rows import PackedRows, pack, unpack
from recsys.runtime.world import World

_ROWS_AT_ONCE = 1 << 16  # for computations that take several FP64 numbers for each row
_SAMPLED_SCORES = 1 << 10  # of a rank, to find ranges of scores with about equally many rows


def auc(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """Return the area under the ROC curve, ties counted half; NaN when one class is missing or a score is NaN.

    Args:
        labels: 0 or 1; scores: any order-preserving score; weights: 0 or more. All [rows].
    """
    return grouped_auc(np.zeros(len(labels), np.int8), labels, scores, weights)


def grouped_auc(groups: np.ndarray, labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """Return the groups' mean AUC, weighted by their sums of weights (Zhu et al. 2017, doi:10.1145/3097983.3098134).

    Groups in which one class is missing do not count; NaN if there are no others, or a score is NaN.

    Args:
        groups: of any type, [rows]. labels, scores, weights: see `auc`.
    """
    if not len(labels) or np.isnan(scores).any():
        return float("nan")
    order = np.argsort(scores, kind="stable")
    order = order[np.argsort(groups[order], kind="stable")]
    groups, scores, labels, weights = groups[order], scores[order], labels[order], weights[order].astype(np.float64)
    begins = np.r_[True, groups[1:] != groups[:-1]]
    right, positive, negative = _ordered_pairs(begins, labels, scores, weights)
    counted = (positive > 0) & (negative > 0)
    if not counted.any():
        return float("nan")
    of_group = right[counted] / (positive * negative)[counted]
    return float(np.average(of_group, weights=(positive + negative)[counted]))


def _ordered_pairs(
    begins: np.ndarray, labels: np.ndarray, scores: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, by group, the weights of correctly ordered pairs of a positive and a negative row, of positive and of
    negative rows; ties count half.

    Args:
        begins: whether a row is the first of its group. Within a group, scores ascend. All [rows], one at least.
    """
    ties = np.flatnonzero(begins | np.r_[True, scores[1:] != scores[:-1]])  # the first of each set of equal scores
    positive, negative = np.add.reduceat(weights * labels, ties), np.add.reduceat(weights * (1 - labels), ties)
    first = np.flatnonzero(begins[ties])  # of each group
    below = np.cumsum(negative) - negative
    below -= np.repeat(below[first], np.diff(np.r_[first, len(ties)]))
    right = np.add.reduceat(positive * (below + negative / 2), first)
    return right, np.add.reduceat(positive, first), np.add.reduceat(negative, first)


def label_metrics(loss: LabelLoss, labels: np.ndarray, outputs: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Return the metrics of a label over rows; NaN where they are not defined.

    A binary label has AUC, log loss in nats, normalized entropy (log loss over the entropy of the mean label; He et al.
    2014, doi:10.1145/2648584.2648589) and calibration (the mean prediction over the mean label). A number has the root
    mean squared error and the mean absolute error.

    Args:
        labels: 0 or 1, or a number; outputs: logits, or numbers; weights: 0 or more. All [rows].
    """
    order = {"auc": auc(labels, outputs, weights)} if loss.is_binary else {}
    return order | _from_sums(loss, _sums(loss, labels, outputs, weights))


def influences(loss: LabelLoss, labels: np.ndarray, outputs: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return, by metric, its change to first order when a row counts once more, float64 [rows].

    The sum of their squares is the variance of the metric. Likewise, the squared differences of two models' influences
    sum to the variance of the metric's difference (infinitesimal jackknife, Jaeckel 1972; for AUC that of DeLong et al.
    1988, doi:10.2307/2531595).

    Args:
        labels, outputs, weights: see `label_metrics`; without rows of weight 0.
    """
    of_rows = np.array(_of_rows(loss, labels, outputs, weights))
    sums = of_rows.sum(1)
    of_auc = {"auc": _auc_influences(labels, outputs, weights)} if loss.is_binary else {}
    slopes: dict[str, np.ndarray] = {name: np.zeros(len(sums)) for name in _from_sums(loss, sums)}
    for i, step in enumerate(np.diag(1e-5 * sums)):
        above, below = _from_sums(loss, sums + step), _from_sums(loss, sums - step)
        for name, slope in slopes.items():
            slope[i] = (above[name] - below[name]) / (2 * step[i]) if step[i] else 0.0
    return of_auc | {name: slope @ of_rows for name, slope in slopes.items()}


def _auc_influences(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return, for a positive row, the share of negative rows below it, and for a negative row the share of positive
    rows above it, each minus AUC and times the row's share of its class; ties count half."""
    _, place = np.unique(scores, return_inverse=True)
    positive, negative = np.bincount(place, weights * labels), np.bincount(place, weights * (1 - labels))
    num_positive, num_negative = positive.sum(), negative.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        below = (np.cumsum(negative) - negative / 2) / num_negative
        above = (num_positive - np.cumsum(positive) + positive / 2) / num_positive
        area = below @ positive / num_positive
        of_positive, of_negative = (below[place] - area) / num_positive, (above[place] - area) / num_negative
    return weights * np.where(labels > 0, of_positive, of_negative)


def _sums(loss: LabelLoss, labels: np.ndarray, outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the sums over rows that `_from_sums` reads: of weights, and of weighted values."""
    return np.array([terms.sum() for terms in _of_rows(loss, labels, outputs, weights)], np.float64)


def _of_rows(loss: LabelLoss, labels: np.ndarray, outputs: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
    """Return the terms of rows in each of `_sums`, [rows] each."""
    if loss.is_binary:
        with np.errstate(invalid="ignore"):  # for scores that are NaN
            losses = np.logaddexp(0, outputs) - labels * outputs
            rates = np.exp(-np.logaddexp(0, -outputs))  # 1 / (1 + exp(-x)) without an overflow
        return [weights, weights * labels, weights * losses, weights * rates]
    errors = outputs - labels
    return [weights, weights * errors**2, weights * np.abs(errors)]


def _from_sums(loss: LabelLoss, sums: np.ndarray) -> dict[str, float]:
    with np.errstate(divide="ignore", invalid="ignore"):
        means = sums[1:] / sums[0]
        if not loss.is_binary:
            return {"rmse": float(np.sqrt(means[0])), "mae": float(means[1])}
        rate, log_loss, predicted = means
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))  # NaN where one class is missing
        ratios = log_loss, log_loss / entropy, predicted / rate if rate > 0 else np.nan
    return dict(zip(("log_loss", "normalized_entropy", "calibration"), map(float, ratios), strict=True))


class LabelEvaluator:
    """Evaluator of labels, with the metrics of `label_metrics`.

    Their names begin with that of the label if there are several: `click.auc`. Rows whose label is unknown do not count
    for it. For AUC a rank keeps 8 bytes of each of its rows, and with other ranks needs as many again to compute it.
    Other metrics need only sums, unless rows have units.
    """

    def __init__(self, labels: Mapping[str, LabelConfig]) -> None:
        self._labels = labels
        self._packed = [PackedRows() for _ in labels]  # of binary labels
        self._numbers: list[list[np.ndarray]] = [[] for _ in labels]  # of others whose rows have units, FP32 [3, rows]
        self._units: list[list[np.ndarray]] = [[] for _ in labels]
        self._sums = [np.r_[0, _sums(label.loss, *np.zeros((3, 0)))] for label in labels.values()]

    def update(
        self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch, units: np.ndarray | None = None
    ) -> None:
        """Add the outputs for one batch; `units`, uint64 [rows], say what each row belongs to."""
        columns = by_label(outputs, self._labels, len(batch.weights))
        for (_, loss, i), column in zip(self._prefixed(), columns, strict=True):
            values = torch.stack([batch.labels[:, i], column.float(), batch.label_weights(i)]).cpu().numpy()
            counted = values[2] > 0
            values = values[:, counted]
            for start in range(0, values.shape[1], _ROWS_AT_ONCE):
                block = values[:, start : start + _ROWS_AT_ONCE].astype(np.float64)
                self._sums[i] += np.r_[block.shape[1], _sums(loss, *block)]
            if loss.is_binary:
                self._packed[i].add(pack(*values))
            elif units is not None:
                self._numbers[i].append(values)
            if units is not None:
                self._units[i].append(units[counted])

    def compute(self, world: World) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for prefix, loss, i in self._prefixed():
            values = {}
            num_rows, *sums = world.sum(torch.from_numpy(self._sums[i])).numpy()
            if loss.is_binary and np.isnan(sums[-1]):  # sum of predictions: a NaN score has no place in order
                values["auc"] = float("nan")
            elif loss.is_binary:
                rows = self._packed[i].joined()
                values["auc"] = _auc_of_ranks(world, rows.copy() if self._units[i] else rows)
            values |= _from_sums(loss, np.array(sums)) | {"rows": float(num_rows)}
            metrics |= {f"{prefix}{name}": value for name, value in values.items()}
        return metrics

    def grouped(self, world: World) -> dict[str, float]:
        """Return the grouped AUC of binary labels, with units as groups; collective, each rank holds all rows."""
        return {
            f"{prefix}gauc": grouped_auc(units, *values)
            for prefix, loss, values, units in self._of_all(world)
            if loss.is_binary
        }

    def intervals(self, world: World, bootstrap: Bootstrap, grouped: bool) -> dict[str, list[float]]:
        """Return the intervals of all metrics by draws of units, and of grouped AUC if `grouped`; collective, each rank
        holds all rows."""
        intervals: dict[str, list[float]] = {}
        for prefix, loss, values, units in self._of_all(world):
            order = np.argsort(values[1], kind="stable")  # so that sorting again, for each draw, takes one pass
            rows, units = values[:, order], units[order]
            with_groups = grouped and loss.is_binary
            names = [*label_metrics(loss, *np.zeros((3, 0))), *(["gauc"] if with_groups else [])]
            measure = partial(_drawn, loss, rows, units if with_groups else None)
            intervals |= bootstrap.intervals(world, units, [prefix + name for name in names], measure)
        return intervals

    def influences(self, world: World) -> dict[str, np.ndarray]:
        """Return, by metric, the `influences` of the rows of all ranks; collective.

        Rows must have been added with units: others are sorted by their scores once metrics are computed.
        """
        return {
            f"{prefix}{name}": of_rows
            for prefix, loss, values, _ in self._of_all(world)
            for name, of_rows in influences(loss, *values).items()
        }

    def _prefixed(self) -> Iterator[tuple[str, LabelLoss, int]]:
        """Yield, for each label, the prefix of its metrics, its loss and its number."""
        for i, (name, label) in enumerate(self._labels.items()):
            yield f"{name}." if len(self._labels) > 1 else "", label.loss, i

    def _of_all(self, world: World) -> Iterator[tuple[str, LabelLoss, np.ndarray, np.ndarray]]:
        """Yield, for each label, the prefix of its metrics, its loss, the rows of all ranks, float64 [3, rows], and
        their units, uint64 [rows]."""
        for prefix, loss, i in self._prefixed():
            if loss.is_binary:
                rows = unpack(self._packed[i].joined())
            else:
                rows = np.concatenate([np.zeros((3, 0), np.float32), *self._numbers[i]], axis=1)
            mine = rows, np.concatenate([np.zeros(0, np.uint64), *self._units[i]])
            values, units = (np.concatenate(arrays, axis=-1) for arrays in zip(*world.gather(mine), strict=True))
            yield prefix, loss, values.astype(np.float64), units


def _drawn(loss: LabelLoss, rows: np.ndarray, groups: np.ndarray | None, drawn: np.ndarray) -> list[float]:
    labels, outputs, weights = rows[0], rows[1], rows[2] * drawn
    metrics = [*label_metrics(loss, labels, outputs, weights).values()]
    return metrics if groups is None else [*metrics, grouped_auc(groups, labels, outputs, weights)]


def _auc_of_ranks(world: World, rows: np.ndarray) -> float:
    """Return the AUC of the rows of all ranks, on every rank; collective.

    Each rank takes the rows of a range of scores; the negative rows below its range are added afterwards.

    Args:
        rows: of this rank, packed; they are sorted in place.
    """
    rows.sort()
    if world.world_size > 1:
        rows = _of_ranges(world, rows)
        rows.sort()
    right = positive = negative = 0.0
    for of_rank in world.gather(_pairs(rows)):
        right += of_rank[0] + of_rank[1] * negative
        positive += of_rank[1]
        negative += of_rank[2]
    return right / (positive * negative) if positive > 0 and negative > 0 else float("nan")


def _of_ranges(world: World, rows: np.ndarray) -> np.ndarray:
    """Return the rows of this rank's range of scores, out of those of all ranks, which are sorted; collective."""
    step = max(1, len(rows) // _SAMPLED_SCORES)
    sample = np.sort(np.concatenate(world.gather(rows[::step] >> 32)))
    places = [len(sample) * rank // world.world_size for rank in range(1, world.world_size)] if len(sample) else []
    bounds = np.searchsorted(rows, sample[places] << 32) if len(sample) else [0] * (world.world_size - 1)
    sizes = np.diff(np.r_[0, bounds, len(rows)]).tolist()
    return world.exchange(torch.from_numpy(rows.view(np.int64)), sizes).numpy().view(np.uint64)


def _pairs(rows: np.ndarray) -> tuple[float, float, float]:
    """Return `_ordered_pairs` of a single group, chunk by chunk; rows are packed and sorted, and may be none."""
    right = positive = negative = 0.0
    start = 0
    while start < len(rows):
        stop = start + _ROWS_AT_ONCE
        if stop < len(rows):  # equal scores stay together
            stop = np.searchsorted(rows, (rows[stop] >> 32) << 32)
            stop = stop if stop > start else np.searchsorted(rows, ((rows[start] >> 32) + 1) << 32)
        labels, scores, weights = unpack(rows[start:stop])
        is_first = np.arange(len(labels)) == 0
        sums = _ordered_pairs(is_first, labels, scores, weights.astype(np.float64))
        of_chunk = [float(of_groups[0]) for of_groups in sums]
        right += of_chunk[0] + of_chunk[1] * negative
        positive, negative, start = positive + of_chunk[1], negative + of_chunk[2], stop
    return right, positive, negative
