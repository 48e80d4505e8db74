"""What keeps small FP16 gradients from becoming 0: the scale of the loss, and factors while they are exchanged."""

import math
from dataclasses import dataclass

import torch

from recsys.step.exchange import SumOverRanks, filled

_ROWS_IN_FP16 = 32  # gradients of a mean over so many rows lie in the middle of FP16's range
_GREATEST_SCALE = 2.0**24


@dataclass
class LossScale:
    """Keeps the small gradients of FP16 from becoming 0 (Micikevicius et al. 2018, arXiv:1710.03740).

    Gradients of vectors are divided by it as they leave the dense part, so tables do not depend on it.

    Attributes:
        value: what the mean loss is multiplied by.
        growth_steps: finite steps after which it is doubled; None: never.
        good_steps: finite steps since it was last changed.
    """

    value: float = 1.0
    growth_steps: int | None = None
    good_steps: int = 0

    def overflow(self) -> bool:
        """Halve the scale after a gradient that is not finite; return False if it is 1 already."""
        if self.value <= 1:
            return False
        self.value, self.good_steps = max(1.0, self.value / 2), 0
        return True

    def good(self) -> None:
        """Count a finite step, and double the scale after `growth_steps` of them."""
        self.good_steps += 1
        if self.growth_steps is not None and self.good_steps >= self.growth_steps:
            self.value, self.good_steps = min(self.value * 2, _GREATEST_SCALE), 0


@torch.no_grad()
def weight_lift(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the power of two that brings the mean weight of a row to between 0.7 and 1.4; collective.

    Gradients are divided by the sum of weights only after their exchange. In FP16, those of rows with small weights
    would be 0 until then.

    Args:
        weight: the sum over this rank's rows, a scalar. num_rows: how many these are.
    """
    sums = torch.stack([weight, *filled([num_rows], weight[None])])
    SumOverRanks(sums).wait()
    return torch.where(sums[0] > 0, (sums[1] / sums[0]).log2().round().exp2(), 1.0)


def vector_lift(num_rows: int) -> float:
    """Return the power of two that makes gradients of a mean over a rank's rows as large as those of a mean over
    `_ROWS_IN_FP16` rows: with 65,536 rows they are about 1e-7, and FP16 has no number between 0 and 6e-8."""
    return 2.0 ** max(0, round(math.log2(max(1, num_rows) / _ROWS_IN_FP16)))
