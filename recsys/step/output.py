"""What a step leaves for the training loop and for evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from recsys.data.batch import Batch
from recsys.step.exchange import LEAST_WEIGHT, Totals


@dataclass
class StepOutput:
    """What a step leaves: `outputs` of the model for the rank's rows, and in training the sums over all ranks.

    Attributes:
        unread: gives the sums, for which it may wait; None: they have been read.
        loss: mean over the global batch, weighted; of several tasks the sum of theirs.
        stop, publish: some rank asked to stop, and to publish.
        weight: of the global batch, what the sum of losses is divided by.
        losses: of several tasks, by name, the mean over the rows that count for it; without the task's weight.
        num_rows, num_bad_rows: of the global batch, as in `Batch`.
        skipped: on some rank the loss or a gradient is not finite, or the step `is_weightless`, and no rank has changed
            a table or a weight.
        overflowed: it was skipped because the gradient, though not the loss, is too large for FP16; the loss scale has
            been halved.
        is_weightless: it was skipped because the weights of its rows add up to too little to divide by.
        finite_here: it is not this rank's rows that are to blame.
    """

    batch: Batch
    outputs: torch.Tensor | tuple[torch.Tensor, ...]
    loss: float = 0.0
    weight: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    stop: bool = False
    publish: bool = False
    num_rows: int = 0
    num_bad_rows: int = 0
    skipped: bool = False
    overflowed: bool = False
    is_weightless: bool = False
    finite_here: bool = True
    unread: Callable[[], None] | None = None

    def read(self) -> None:
        """Have the sums over all ranks in the attributes."""
        if self.unread is not None:
            self.unread()
            self.unread = None

    def take(self, totals: Totals, tasks: Mapping[str, float]) -> None:
        """Take the sums over all ranks; `tasks` gives the weight of each task's loss."""
        self.weight = weight = totals.weight
        self.loss = totals.loss / weight if weight else 0.0
        self.stop, self.publish = totals.num_stops > 0, totals.num_publishes > 0
        self.num_rows, self.num_bad_rows = totals.num_rows, totals.num_bad_rows
        self.is_weightless = 0 < weight < LEAST_WEIGHT
        self.skipped = totals.num_bad > 0 or self.is_weightless
        shares = zip(tasks.items(), totals.task_losses, strict=True)
        self.losses = {name: loss / weight / factor for (name, factor), loss in shares if weight and factor}
