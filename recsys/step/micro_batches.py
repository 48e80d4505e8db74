"""Forward and backward passes of the dense part, one micro-batch's activations at a time, and their loss."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from recsys.config import LabelConfig
from recsys.config.choices import LabelNulls
from recsys.data.batch import Batch
from recsys.models.base import Model
from recsys.step.exchange import Totals, all_finite
from recsys.step.lookup import Lookup, Part, joined

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


def task_weights(labels: Mapping[str, LabelConfig]) -> dict[str, float]:
    """Return the weight of each task's loss; none for one task on all rows, whose sum is the loss."""
    is_plain = len(labels) < 2 and all(x.nulls is LabelNulls.refuse and x.weight == 1 for x in labels.values())
    return {} if is_plain else {name: label.weight for name, label in labels.items()}


class StepLoss:
    """The loss of this rank's rows in one step; collective where there are several tasks.

    Args:
        weights: of tasks, as `task_weights` gives them.

    Attributes:
        total: the sum over the rows so far. by_task: the tasks' shares of it, [tasks].
    """

    def __init__(self, model: Model, weights: Mapping[str, float], batch: Batch) -> None:
        self._model = model
        self._factors = _task_factors(weights, batch) if weights else None
        self.total = batch.weights.new_zeros(())
        self.by_task = batch.weights.new_zeros(len(weights))

    def add(self, outputs: Outputs, rows: Batch) -> torch.Tensor:
        """Return the sum over some rows, and over tasks, of what is to be made small."""
        losses = list(self._model.losses(outputs, rows).values())
        if self._factors is None:
            (loss,) = losses
        else:
            shares = torch.stack(losses) * self._factors
            self.by_task = self.by_task + shares.detach()
            loss = shares.sum()
        self.total = self.total + loss.detach()
        return loss


@torch.no_grad()
def _task_factors(weights: Mapping[str, float], batch: Batch) -> torch.Tensor:
    """Return the factors of the tasks' sums of losses, [tasks]: over the sum of weights, their weighted means come out.

    Collective, before the loss, since each task has a denominator of its own.
    """
    sums = torch.stack([batch.weights.sum(), *(batch.label_weights(task).sum() for task in range(len(weights)))])
    dist.all_reduce(sums)
    return torch.where(sums[1:] > 0, sums.new_tensor(list(weights.values())) * sums[0] / sums[1:], 0.0)


class LastInBackward(torch.autograd.Function):
    """A zero whose backward runs last and calls `gradient`; starts the exchange when all other gradients are ready.

    Autograd goes backward in the order of the forward pass, as far as dependencies leave it a choice.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return 0; `gradient` is called in the backward pass, and gives a tensor in the shape of `parameter`."""
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return what the call gives."""
        return ctx.gradient(), None


class MicroBatches:
    """The passes of one step, and what they leave.

    Args:
        dense: the `DenseHalf`, which runs the model.

    Attributes:
        loss: of this rank's rows.
        gradients: by `Lookup.tensors`, FP32, of this rank's rows; None where the model does not read a tensor.
        is_finite: whether the loss and `gradients` are, a bool tensor of no dimensions.
    """

    def __init__(self, dense: Any, lookup: Lookup, batch: Batch, loss: StepLoss) -> None:
        self._dense, self._lookup, self._batch, self.loss = dense, lookup, batch, loss
        self._parts = list(lookup.parts(batch.micro_batches, batch.id_bounds))
        # The loss is a sum over rows, and the gradients exchanged are of the mean, but for weights and rows left out.
        self._factor = dense.loss_scale.value / len(batch.weights)
        self._by_part: list[list[torch.Tensor | None]] = []
        self.gradients: list[torch.Tensor | None] = []
        self.is_finite = torch.zeros(())

    def run(self) -> None:
        """Run all passes; in the last one's backward, all that is exchanged sets out.

        A loss that is no sum over rows is computed on the outputs of all, which are then computed again, micro-batch by
        micro-batch, for the gradient (GradCache: Gao et al. 2021, arXiv:2101.06983).
        """
        cached = self._gradients_by_outputs() if len(self._parts) > 1 and not self._dense.model.loss_by_rows else None
        self._dense.sums.grad = None
        for part in self._parts:
            last = part is self._parts[-1]
            with self._dense.exchanging(last):
                self._pass(part, last, cached)

    def _pass(self, part: Part, last: bool, cached: list[torch.Tensor] | None) -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in self._lookup.rows(part)]
        rows = self._batch.dense_rows(*part.rows)
        sums = [LastInBackward.apply(self._dense.sums, partial(self._set_out, leaves))] if last else []
        self._dense.enter_phase("forward")
        outputs = self._dense.outputs(self._lookup, part, leaves, rows)
        self._dense.enter_phase("backward")
        if cached is None:
            torch.autograd.backward([self.loss.add(outputs, rows) * self._factor, *sums])
        else:
            seeds = [gradient[slice(*part.rows)] for gradient in cached]
            torch.autograd.backward([*_as_tuple(outputs), *sums], [*seeds, *(None for _ in sums)])
        if not last:
            self._by_part.append([leaf.grad for leaf in leaves])

    @torch.no_grad()
    def _set_out(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        """Return what this rank adds to the sums, when all else of the last backward pass is through.

        After them DistributedDataParallel sends its last gradients; those by embeddings follow before it waits.

        Args:
            leaves: of the last micro-batch, which have their gradients; these are not kept.
        """
        by_part = [*self._by_part, [leaf.grad for leaf in leaves]]
        self._by_part = []
        self.gradients = [joined(gradients) for gradients in zip(*by_part, strict=True)]
        by_part.clear()  # the parts are as large as what is joined, and all that follows comes on top
        for leaf in leaves:
            leaf.grad = None
        dense, weights = self._dense, self._batch.weights
        own = [gradient for gradient in self.gradients if gradient is not None]
        self.is_finite = torch.isfinite(torch.stack([self.loss.total, weights.sum()])).all() & all_finite(own)
        if dense.loss_scale.value != 1:
            torch._foreach_div_(own, dense.loss_scale.value)  # a wire of FP16 takes no more than 65,504
        if dense.l2:
            factors = {name: factor / len(weights) for name, factor in dense.l2.items()}
            self._lookup.add_l2(self.gradients, factors, weights)
        Variable._execution_engine.queue_callback(partial(self._lookup.backward, self.gradients))
        return Totals.pack(self.loss.total, self._batch, self.is_finite, dense.stop_requested, self.loss.by_task)

    def _gradients_by_outputs(self) -> list[torch.Tensor]:
        """Return the gradients of the loss of the whole batch by each of the model's outputs."""
        with torch.no_grad():
            by_part = [
                _as_tuple(
                    self._dense.outputs(self._lookup, part, self._lookup.rows(part), self._batch.dense_rows(*part.rows))
                )
                for part in self._parts
            ]
        leaves = [torch.cat(outputs).requires_grad_() for outputs in zip(*by_part, strict=True)]
        loss = self.loss.add(tuple(leaves) if len(leaves) > 1 else leaves[0], self._batch)
        return list(torch.autograd.grad(loss * self._factor, leaves))


def _as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs
