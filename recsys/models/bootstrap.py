"""Confidence intervals of metrics by bootstrap over rows, or groups of rows such as users."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, factorial

import numpy as np

from recsys.runtime.counter_random import make_key, uniform_numbers
from recsys.runtime.world import World

_POISSON = np.cumsum([exp(-1) / factorial(k) for k in range(12)])  # distribution function at k, for mean 1


@dataclass(frozen=True)
class Bootstrap:
    """Poisson bootstrap of units: each is drawn a Poisson number of times, of mean 1 (Chamandy et al. 2012).

    The number is a function of seed, repeat and unit, so that neither order nor ranks change it.
    """

    repeats: int
    seed: int

    def intervals(
        self, world: World, units: np.ndarray, names: Sequence[str], measure: Callable[[np.ndarray], Sequence[float]]
    ) -> dict[str, list[float]]:
        """Return, by metric, the bounds that hold 95 % of draws; collective, each rank computes its share of them.

        Args:
            units: the unit of each row, uint64 [rows], the same on every rank.
            measure: computes the metrics from the number of times that each row is drawn, float64 [rows].
        """
        distinct, place = np.unique(units, return_inverse=True)
        key, measured = make_key(self.seed, "bootstrap"), []
        for repeat in range(world.rank, self.repeats, world.world_size):
            drawn = uniform_numbers(key, distinct.view(np.int64), np.array([repeat]))[:, 0]
            times = np.searchsorted(_POISSON, drawn, side="right")[place].astype(np.float64)
            if times.any():
                measured.append(measure(times))
        samples = np.concatenate(world.gather(np.array(measured).reshape(len(measured), len(names))))
        finite = [column[~np.isnan(column)] for column in samples.T]
        bounds = [
            np.percentile(values, [2.5, 97.5]).tolist() if len(values) else [float("nan")] * 2 for values in finite
        ]
        return dict(zip(names, bounds, strict=True))
