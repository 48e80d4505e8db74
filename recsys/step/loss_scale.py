"""The scale of the loss that keeps small FP16 gradients from becoming 0."""

from dataclasses import dataclass

_GREATEST_SCALE = 2.0**24


@dataclass
class LossScale:
    """Keeps the small gradients of FP16 from becoming 0 (Micikevicius et al. 2018, arXiv:1710.03740).

    Tables never see it: gradients are divided by it where they leave the dense part.

    Attributes:
        value: what the mean loss is multiplied by.
        growth_steps: steps without overflow after which it is doubled; None: never.
        good_steps: since it was changed.
    """

    value: float = 1.0
    growth_steps: int | None = None
    good_steps: int = 0

    def overflow(self) -> bool:
        """Take note of a gradient that is not finite; return whether a smaller scale may mend that."""
        if self.value <= 1:
            return False
        self.value, self.good_steps = max(1.0, self.value / 2), 0
        return True

    def good(self) -> None:
        """Take note of a step that is finite."""
        self.good_steps += 1
        if self.growth_steps is not None and self.good_steps >= self.growth_steps:
            self.value, self.good_steps = min(self.value * 2, _GREATEST_SCALE), 0
