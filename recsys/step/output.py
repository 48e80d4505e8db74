"""The results of a step, for the training loop and for evaluation."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from recsys.data.batch import Batch
from recsys.step.exchange import LEAST_WEIGHT, Totals


@dataclass
class StepOutput:
    """The results of a step: outputs of the model for this rank's rows, and in training totals over all ranks.

    Attributes:
        unread: reads the totals, for which it may wait; None: they have been read.
        loss: weighted mean over the global batch; with several tasks, the sum of their weighted means.
        stop, publish: some rank asked to stop, or to publish.
        weight: `Model.denominator` of the global batch, which divides the sum of losses.
        losses: with several tasks, the mean of each over the rows that have its label, without the task's weight; a
            task whose label no row of the step has is left out.
        has_loss: some row of the step counts for a loss; otherwise `loss` is 0.
        num_rows, num_bad_rows: of the global batch, as in `Batch`.
        skipped: no rank has changed a table or a weight, since the loss or a gradient of some rank is not finite, or
            the step `is_weightless`.
        overflowed: it was skipped since a gradient, but not the loss, is too large for FP16; the loss scale was halved.
        is_weightless: it was skipped since the weights of its rows add up to less than `LEAST_WEIGHT`.
        finite_here: this rank's loss and gradients are finite.
    """

    batch: Batch
    outputs: torch.Tensor | tuple[torch.Tensor, ...]
    loss: float = 0.0
    weight: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    stop: bool = False
    publish: bool = False
    has_loss: bool = True
    num_rows: int = 0
    num_bad_rows: int = 0
    skipped: bool = False
    overflowed: bool = False
    is_weightless: bool = False
    finite_here: bool = True
    unread: Callable[[], None] | None = None

    def read(self) -> None:
        """Set the attributes from the totals over all ranks, once; may wait for them."""
        if self.unread is not None:
            self.unread()
            self.unread = None

    def set_totals(self, totals: Totals, tasks: Mapping[str, float]) -> None:
        """Set the attributes; `tasks` has the weight of each task's loss, if there are several."""
        self.weight = weight = totals.weight
        self.loss = totals.loss / weight if weight else 0.0
        self.stop, self.publish = totals.num_stops > 0, totals.num_publishes > 0
        self.num_rows, self.num_bad_rows = totals.num_rows, totals.num_bad_rows
        self.is_weightless = 0 < weight < LEAST_WEIGHT
        self.skipped = totals.num_bad > 0 or self.is_weightless
        shares = [each for each in zip(tasks.items(), totals.task_losses, strict=True) if not math.isnan(each[1])]
        self.losses = {name: loss / weight / factor for (name, factor), loss in shares if weight and factor}
        self.has_loss = weight > 0 and bool(shares or not tasks)
