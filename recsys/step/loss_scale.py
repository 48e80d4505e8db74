"""The scale of the loss that keeps small FP16 gradients from becoming 0."""

from dataclasses import dataclass

_GREATEST_SCALE = 2.0**24


@dataclass
class LossScale:
    """Keeps the small gradients of FP16 from becoming 0 (Micikevicius et al. 2018, arXiv:1710.03740).

    Gradients by vectors are divided by it as they leave the dense part, so tables do not depend on it.

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
