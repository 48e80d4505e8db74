"""The two halves of a training step: the lookup, and the dense part on detached pooled embeddings.

The dense part runs forward and backward by itself; then one small all-reduce says the sums of loss and weights
over all ranks, gradients are divided by the sum of weights, and one backward goes into the tables. So nothing
reaches a table before every rank has seen that the step is sound.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys.data.batch import Batch
from recsys.models.task import Task, set_dropout_keys


@dataclass
class StepOutput:
    """What a step leaves: `outputs` of the model for the rank's rows, and in training the sums over all ranks.

    Attributes:
        loss: mean over the global batch, weighted; stop: some rank asked to stop.
        num_rows, num_bad_rows: of the global batch, as in `Batch`.
        skipped: on some rank the loss or a gradient is not finite, and no rank has changed a table or a weight.
        finite_here: it is not this rank's rows that are to blame.
    """

    batch: Batch
    outputs: torch.Tensor | tuple[torch.Tensor, ...]
    loss: float = 0.0
    stop: bool = False
    num_rows: int = 0
    num_bad_rows: int = 0
    skipped: bool = False
    finite_here: bool = True


class Replicated(Protocol):
    """What `DenseHalf.replicated` is."""

    def update(self, ids: KeyedJaggedTensor, gradients: dict[str, torch.Tensor]) -> None:
        """Train on this rank's table rows and the gradients of the mean loss by feature; collective."""


class DenseHalf(nn.Module):
    """Runs a task on detached pooled embeddings, and hands the gradient on to the tables.

    Args:
        task: its model may be wrapped in DistributedDataParallel, which averages gradients over ranks.
        seed: of the run, for dropout.
        clip_norm: most that the norm over all gradients of the dense part may be; None: any.

    Attributes:
        stop_requested: set by a signal handler; it rides on the step's all-reduce to all ranks.
        replicated: trains the tables that every rank holds whole, on their ids and gradients by feature.
    """

    def __init__(self, task: Task, seed: int, clip_norm: float | None = None) -> None:
        super().__init__()
        self.task = task
        self.seed = seed
        self.clip_norm = clip_norm
        self.stop_requested = False
        self.replicated: Replicated | None = None
        self._pooled: KeyedTensor | None = None
        self._gradient: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._finite: torch.Tensor | None = None
        self._output: StepOutput | None = None

    def forward(self, pooled: KeyedTensor, batch: Batch) -> tuple[torch.Tensor, StepOutput]:
        values = pooled.values()
        if not self.training:
            outputs = self.task.model(_by_key(pooled, values), batch.floats)
            return values.new_zeros(()), StepOutput(batch, outputs)
        loss, gradient = self._forward_backward(pooled, batch)
        self._pooled, self._gradient = pooled, gradient
        self._sums = torch.stack([loss.double(), batch.weights.sum().double()])
        self._output = StepOutput(batch, ())
        return loss, self._output

    def _forward_backward(self, pooled: KeyedTensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss and its gradient by the pooled embeddings; one micro-batch's activations live at a time."""
        values, model = pooled.values(), cast(Any, self.task.model)
        bounds = list(pairwise(batch.micro_batches))
        losses, gradients = [], []
        for start, stop in bounds:
            # Gradients of the dense part add up, and are exchanged with the last micro-batch.
            last = stop == bounds[-1][1]
            with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                first_row = dist.get_rank() * len(batch.weights) + start
                set_dropout_keys(model, self.seed, batch.position.num_rows, first_row)
                leaf = values[start:stop].detach().requires_grad_()
                part = batch.dense_rows(start, stop)
                loss = self.task.loss(model(_by_key(pooled, leaf), part.floats), part)
                loss.backward()
            losses.append(loss.detach())
            gradients.append(leaf.grad)
        if any(gradient is None for gradient in gradients):
            return torch.stack(losses).sum(), None
        return torch.stack(losses).sum(), gradients[0] if len(gradients) == 1 else torch.cat(gradients)

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, because it was not finite."""
        return self._output is not None and self._output.skipped

    def backward(self) -> None:
        """Finish the step that `forward` began: agree over the ranks, scale the gradients, update the tables.

        Where the loss or a gradient is not finite on some rank, every rank leaves the tables alone and marks the output
        as `skipped`; the optimizer of the dense part is not to be called then.
        """
        assert self._pooled is not None and self._output is not None
        pooled, gradient = self._pooled, self._gradient
        loss, weight, num_bad, num_stops, num_rows, num_bad_rows = self._agree(gradient)
        self._output.loss = loss / weight if weight else 0.0
        self._output.stop = num_stops > 0
        self._output.num_rows, self._output.num_bad_rows = round(num_rows), round(num_bad_rows)
        self._pooled = self._gradient = self._sums = None
        if num_bad:
            self._output.skipped, self._output.finite_here = True, bool(self._finite)
            return
        # DistributedDataParallel and torchrec's backward divide by the number of ranks; the loss is the mean over
        # the weights of the global batch.
        scale = dist.get_world_size() / weight if weight else 0.0
        gradients = [p.grad for p in self.task.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, scale)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), self.clip_norm)
        if gradient is not None:
            self._train_tables(pooled, gradient * scale)

    def _train_tables(self, pooled: KeyedTensor, gradient: torch.Tensor) -> None:
        """Hand on the gradient by the pooled embeddings, times the number of ranks."""
        assert self._output is not None
        if self.replicated is not None:
            by_feature = _by_key(pooled, gradient / dist.get_world_size())
            self.replicated.update(self._output.batch.ids, by_feature)
        if pooled.values().requires_grad:
            pooled.values().backward(gradient)

    def _agree(self, gradient: torch.Tensor | None) -> list[float]:
        assert self._sums is not None and self._output is not None
        # A sum of absolute values is finite exactly if all values are (and it does not overflow).
        dense = [p.grad for p in self.task.model.parameters() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(dense if gradient is None else [gradient, *dense], 1))
        # Gradients of the dense part are those of all ranks.
        self._finite = torch.isfinite(self._sums).all() & (gradient is None or torch.isfinite(norms[0]))
        finite = self._finite & torch.isfinite(norms).all()
        batch = self._output.batch
        counts = [float(self.stop_requested), batch.num_rows, batch.num_bad_rows]
        sums = torch.cat([self._sums.nan_to_num(), (~finite).double()[None], self._sums.new_tensor(counts)])
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        return sums.tolist()


class TrainStep(nn.Module):
    """Lookup, then the dense half; what torchrec shards and its pipeline traces."""

    def __init__(self, embeddings: EmbeddingBagCollection, dense: DenseHalf) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = dense

    def forward(self, batch: Batch) -> tuple[torch.Tensor, StepOutput]:
        """Return (loss of this rank, StepOutput). The pipeline then calls `dense.backward()`."""
        pooled = self.embeddings(batch.ids)
        return self.dense(pooled, batch)


def _by_key(pooled: KeyedTensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    # The order of the features in `values` follows the sharding plan; by key it cannot matter.
    return dict(zip(pooled.keys(), values.split(pooled.length_per_key(), dim=1), strict=True))
