"""Protocol of evaluators, and metrics of the best items of users, over all ranks."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from recsys.config.choices import RetrievalMetric
from recsys.data.batch import Batch
from recsys.models.bootstrap import Bootstrap
from recsys.models.items import ItemVectors, pairs_of, rows_at_once
from recsys.runtime.world import World


class Evaluator(Protocol):
    """Collects the outputs of a model for the batches of an evaluation, and computes metrics of them."""

    def update(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> None:
        """Add the outputs for one batch of this rank."""

    def compute(self, world: World) -> dict[str, float]:
        """Return the metrics over the rows of all ranks, on every rank."""


def is_higher_better(metric: str) -> bool:
    """Return whether a metric improves as it grows."""
    return metric.rpartition(".")[2] not in ("log_loss", "normalized_entropy", "rmse", "mae")


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


# Values of users, [users], from hits among their best K, best first, [users, K] of 0 and 1 in FP64, and from their
# numbers of targets, [users].
_BY_USER: dict[RetrievalMetric, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    RetrievalMetric.recall: _recall,
    RetrievalMetric.ndcg: _ndcg,
    RetrievalMetric.hit_rate: _hit_rate,
    RetrievalMetric.mrr: _mean_reciprocal_rank,
    RetrievalMetric.map: _average_precision,
}


class RetrievalEvaluator:
    """Metrics of the best K items of users, among all items except those in `seen`.

    They are defined as in ranx (Bassani 2022, doi:10.1007/978-3-030-99739-7_30). recall@K and map@K divide by the
    number of a user's targets, even if there are more than K. The ideal ranking of ndcg@K has targets in its first
    places, as many as there are, at most K, even if there are fewer items. Users without targets do not count.

    Args:
        items: vectors of the whole corpus.
        top_k: the values of K. metrics: those computed at each K.
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
        """Add the outputs for one batch; `units`, uint64 [rows], are the groups of rows for intervals."""
        assert batch.lists is not None
        all_scores, all_best = self._items.best(outputs[0], self._most, batch)
        step = rows_at_once(len(self._items), all_best.device.type)
        for start in range(0, len(all_best), step):
            rows = slice(start, start + step)
            scores, best = all_scores[rows], all_best[rows]
            relevant = torch.zeros(len(best), len(self._items), dtype=torch.bool, device=best.device)
            known = pairs_of(batch, "targets", rows)
            relevant[known] = True
            # Each item counts once: take known ones, which a list may hold twice, off its length, and add them again.
            num_targets = batch.lists["targets"].lengths()[rows] - torch.bincount(known[0], minlength=len(best))
            num_targets = num_targets + relevant.sum(1)
            counted = (num_targets > 0) & (batch.weights[rows] > 0)
            # If K exceeds the number of items not seen, the best K hold some that are seen, with a score of -inf.
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
        """Return the confidence intervals of all metrics except coverage, by draws of units; collective."""
        none = np.zeros((0, len(self._pairs))), np.zeros(0, np.uint64)
        of_ranks = [batch for of_rank in world.gather(self._of_users) for batch in of_rank]
        values, units = (np.concatenate(arrays) for arrays in zip(none, *of_ranks, strict=True))
        averaged = [i for i, (metric, _) in enumerate(self._pairs) if metric is not RetrievalMetric.coverage]
        names = [f"{metric.value}@{k}" for metric, k in (self._pairs[i] for i in averaged)]
        return bootstrap.intervals(
            world, units, names, lambda drawn: (drawn @ values[:, averaged] / drawn.sum()).tolist()
        )

    def influences(self, world: World) -> dict[str, np.ndarray]:
        """Return, by metric except coverage, its change if a user counts once more, float64 [users]; collective.

        Users are those of all ranks that were added with units. The sum of squares is the metric's variance.
        """
        of_ranks = [values for of_rank in world.gather(self._of_users) for values, _ in of_rank]
        values = np.concatenate([np.zeros((0, len(self._pairs))), *of_ranks])
        changes = (values - values.mean(0)) / len(values) if len(values) else values
        return {
            f"{metric.value}@{k}": changes[:, i]
            for i, (metric, k) in enumerate(self._pairs)
            if metric is not RetrievalMetric.coverage
        }

    def _add(self, hits: torch.Tensor, num_targets: torch.Tensor) -> np.ndarray:
        """Add users to the sums; return their values by pair of metric and K, [users, pairs]."""
        # Places after the last item are misses; if there are more targets than items, the ideal ranking has them too.
        places = min(self._most, int(num_targets.max())) if len(num_targets) else 0
        hits = F.pad(hits, (0, max(0, places - hits.shape[1])))
        zero = hits.new_zeros(len(hits))
        of_pairs = [_BY_USER.get(metric, lambda *_: zero)(hits[:, :k], num_targets) for metric, k in self._pairs]
        self._sums += torch.stack([*(values.sum() for values in of_pairs), hits.new_tensor(len(hits))]).cpu()
        return torch.stack(of_pairs, dim=1).cpu().numpy()
