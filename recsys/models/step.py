"""The two halves of a training step: the lookup, and the dense part on detached embeddings.

The dense part runs forward and backward by itself; with its gradients one small all-reduce says the sums of loss and
weights over all ranks, gradients are divided by the sum of weights, and one backward goes into the tables. So nothing
reaches a table before every rank has seen that the step is sound.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.profiler import record_function
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.config import Autocast, PrecisionConfig
from recsys.data.batch import Batch
from recsys.models.lookup import Lookup, Part
from recsys.models.task import Task, Vectors, set_dropout_keys

_DTYPES = {Autocast.bf16: torch.bfloat16, Autocast.fp16: torch.float16}
_GREATEST_SCALE = 2.0**24
_NUM_BAD = 2  # position among the sums over ranks


@dataclass
class StepOutput:
    """What a step leaves: `outputs` of the model for the rank's rows, and in training the sums over all ranks.

    Attributes:
        loss: mean over the global batch, weighted; stop: some rank asked to stop.
        num_rows, num_bad_rows: of the global batch, as in `Batch`.
        skipped: on some rank the loss or a gradient is not finite, and no rank has changed a table or a weight.
        overflowed: it was skipped because the gradient, though not the loss, is too large for FP16; the loss scale has
            been halved.
        finite_here: it is not this rank's rows that are to blame.
    """

    batch: Batch
    outputs: torch.Tensor | tuple[torch.Tensor, ...]
    loss: float = 0.0
    stop: bool = False
    num_rows: int = 0
    num_bad_rows: int = 0
    skipped: bool = False
    overflowed: bool = False
    finite_here: bool = True


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


class Replicated(Protocol):
    """What `DenseHalf.replicated` is."""

    def update(self, ids: KeyedJaggedTensor, gradients: dict[str, torch.Tensor]) -> None:
        """Train on this rank's table rows and the gradients of the mean loss by feature; collective."""


class DenseHalf(nn.Module):
    """Runs a task on detached embeddings, and hands the gradient on to the tables.

    Args:
        task: its model may be wrapped in DistributedDataParallel, which averages gradients over ranks.
        seed: of the run, for dropout.
        clip_norm: most that the norm over all gradients of the dense part may be; None: any.
        precision: types that the task's model computes in.
        averaged: features whose pooled embeddings, which are sums, are divided by the lengths of their lists.
        unpooled: features that the model reads a vector of for each id.

    Attributes:
        stop_requested: set by a signal handler; it rides on the step's all-reduce to all ranks.
        enter_phase: told "forward" and "backward" as a training step comes to them.
        replicated: trains the tables that every rank holds whole, on their ids and gradients by feature.
        loss_scale: 1 unless the model computes in FP16.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        clip_norm: float | None,
        precision: PrecisionConfig,
        averaged: Sequence[str] = (),
        unpooled: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.task = task
        self.seed = seed
        self.clip_norm = clip_norm
        self.averaged, self.unpooled = averaged, unpooled
        self.stop_requested = False
        self.enter_phase: Callable[[str], None] = ignore_phase
        self.replicated: Replicated | None = None
        self.loss_scale = LossScale()
        if precision.autocast is Autocast.fp16:
            self.loss_scale = LossScale(precision.loss_scale, precision.loss_scale_growth_steps)
        self._dtype = _DTYPES.get(precision.autocast)
        self._lookup: Lookup | None = None
        self._gradients: list[torch.Tensor | None] = []
        self._sums: torch.Tensor | None = None  # over all ranks, once `_summing` is done
        self._summing: dist.Work | None = None
        self._finite: torch.Tensor | None = None
        self._output: StepOutput | None = None

    def forward(
        self, pooled: KeyedTensor | None, by_id: dict[str, JaggedTensor] | None, batch: Batch
    ) -> tuple[torch.Tensor, StepOutput]:
        lookup = Lookup(batch.ids, pooled, {} if by_id is None else dict(by_id.items()))
        if not self.training:
            (part,) = lookup.parts((0, len(batch.weights)), ())
            outputs = self._outputs(self._vectors(lookup, part, _sliced(lookup, part)), batch)
            return batch.weights.new_zeros(()), StepOutput(batch, outputs)
        loss, self._gradients = self._forward_backward(lookup, batch)
        self._lookup = lookup
        self._output = StepOutput(batch, ())
        return loss, self._output

    def _forward_backward(self, lookup: Lookup, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return the loss and its gradients by the looked-up tensors; one micro-batch's activations live at a time.

        A loss that is no sum over rows is computed on the outputs of all, which are then computed again, micro-batch by
        micro-batch, for the gradient (GradCache: Gao et al. 2021, arXiv:2101.06983).
        """
        parts = list(lookup.parts(batch.micro_batches, batch.id_bounds))
        whole: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        if len(parts) > 1 and not self.task.loss_by_rows:
            whole = self._loss_of_all(lookup, batch, parts)
        total = batch.weights.new_zeros(()) if whole is None else whole[0]
        gradients: list[list[torch.Tensor | None]] = []
        for part in parts:
            # Gradients of the dense part add up, and are exchanged with the last micro-batch.
            with self._exchanging(part is parts[-1]):
                leaves = [each.detach().requires_grad_() for each in _sliced(lookup, part)]
                rows = batch.dense_rows(*part.rows)
                self.enter_phase("forward")
                outputs = self._part(lookup, part, leaves, rows)
                self.enter_phase("backward")
                seeds: list[torch.Tensor] | None = None
                if whole is None:
                    loss = self.task.loss(outputs, rows)
                    total, outputs = total + loss.detach(), loss * self._loss_factor(batch)
                else:
                    seeds = [each[slice(*part.rows)] for each in whole[1]]
                roots = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
                if part is parts[-1]:
                    at_end = partial(self._start_summing, batch, total, gradients, leaves)
                    roots[0].register_hook(partial(_call_at_end, at_end))
                torch.autograd.backward(roots, seeds)
            gradients.append([leaf.grad for leaf in leaves])
        return total, [_joined(pieces) for pieces in zip(*gradients, strict=True)]

    @torch.no_grad()
    def _start_summing(
        self, batch: Batch, loss: torch.Tensor, gradients: list[list[torch.Tensor | None]], leaves: list[torch.Tensor]
    ) -> None:
        """Begin to sum over all ranks what a step must agree on; called when the last backward pass is through.

        That is before DistributedDataParallel waits for the gradients, so that ranks wait for each other only once.

        Args:
            gradients: of the micro-batches before the last, whose `leaves` have theirs.
        """
        every = [*gradients, [leaf.grad for leaf in leaves]]
        own = [gradient for each in every for gradient in each if gradient is not None]
        sums = torch.stack([loss.double(), batch.weights.sum().double()])
        self._finite = torch.isfinite(sums).all() & _all_finite(own)
        counts = [float(self.stop_requested), batch.num_rows, batch.num_bad_rows]
        self._sums = torch.cat([sums, (~self._finite).double()[None], sums.new_tensor(counts)])
        self._summing = dist.all_reduce(self._sums, async_op=True) if dist.get_world_size() > 1 else None

    def _loss_of_all(self, lookup: Lookup, batch: Batch, parts: list[Part]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the loss of the whole batch, and its gradients by the model's outputs."""
        pieces = []
        with torch.no_grad():
            for part in parts:
                outputs = self._part(lookup, part, _sliced(lookup, part), batch.dense_rows(*part.rows))
                pieces.append((outputs,) if isinstance(outputs, torch.Tensor) else outputs)
        leaves = [torch.cat(each).requires_grad_() for each in zip(*pieces, strict=True)]
        loss = self.task.loss(tuple(leaves) if len(leaves) > 1 else leaves[0], batch)
        gradients = torch.autograd.grad(loss * self._loss_factor(batch), leaves)
        return loss.detach(), list(gradients)

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        model = cast(Any, self.task.model)
        return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()

    def _part(
        self, lookup: Lookup, part: Part, tensors: list[torch.Tensor], rows: Batch
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the outputs for the rows of a micro-batch."""
        global_row = dist.get_rank() * lookup.ids.stride() + part.rows[0]
        set_dropout_keys(self.task.model, self.seed, rows.position.num_rows, global_row)
        return self._outputs(self._vectors(lookup, part, tensors), rows)

    def _vectors(self, lookup: Lookup, part: Part, tensors: list[torch.Tensor]) -> Vectors:
        return lookup.vectors(part, tensors, self.averaged, self.unpooled)

    def _outputs(self, vectors: Vectors, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self._dtype is None:
            return self.task.model(vectors, batch.floats)
        with torch.autocast(batch.floats.device.type, self._dtype):
            outputs = self.task.model(vectors, batch.floats)
        return outputs.float() if isinstance(outputs, torch.Tensor) else tuple(each.float() for each in outputs)

    def _loss_factor(self, batch: Batch) -> float:
        # The loss is a sum over rows. Its scale is one for the mean, because gradients of rows are in the order of 1.
        return 1.0 if self.loss_scale.value == 1 else self.loss_scale.value / len(batch.weights)

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, because it was not finite."""
        return self._output is not None and self._output.skipped

    def backward(self) -> None:
        """Finish the step that `forward` began: agree over the ranks, scale the gradients, update the tables.

        Where the loss or a gradient is not finite on some rank, every rank leaves the tables alone and marks the output
        as `skipped`; the optimizer of the dense part is not to be called then.
        """
        assert self._lookup is not None and self._output is not None
        lookup, gradients = self._lookup, self._gradients
        self.enter_phase("backward")
        factor = self._loss_factor(self._output.batch)
        loss, weight, num_bad, num_stops, num_rows, num_bad_rows = self._agree()
        self._output.loss = loss / weight if weight else 0.0
        self._output.stop = num_stops > 0
        self._output.num_rows, self._output.num_bad_rows = round(num_rows), round(num_bad_rows)
        self._lookup, self._gradients, self._sums = None, [], None
        if num_bad:
            self._output.skipped, self._output.finite_here = True, bool(self._finite)
            self._output.overflowed = math.isfinite(self._output.loss) and self.loss_scale.overflow()
            return
        self.loss_scale.good()
        # DistributedDataParallel and torchrec's backward divide by the number of ranks; the loss is the mean over
        # the weights of the global batch.
        scale = dist.get_world_size() / weight / factor if weight else 0.0
        torch._foreach_mul_(self._dense_gradients(), scale)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._dense_parameters, self.clip_norm)
        self._train_tables(lookup, [None if each is None else each * scale for each in gradients])

    @cached_property
    def _dense_parameters(self) -> list[nn.Parameter]:
        return list(self.task.model.parameters())  # looking for them takes a tenth of a millisecond

    def _dense_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._dense_parameters if p.grad is not None]

    def _train_tables(self, lookup: Lookup, gradients: list[torch.Tensor | None]) -> None:
        """Hand on the gradients by the looked-up tensors, times the number of ranks."""
        if self.replicated is not None and lookup.pooled is not None and gradients[0] is not None:
            by_feature = lookup.pooled_by_feature(gradients[0] / dist.get_world_size())
            self.replicated.update(lookup.ids, by_feature)
        wanted = [
            (each, gradient.to(each.dtype))
            for each, gradient in zip(lookup.tensors, gradients, strict=True)
            if each.requires_grad and gradient is not None
        ]
        with record_function("## tables: update ##"):
            if wanted:
                torch.autograd.backward([each for each, _ in wanted], [gradient for _, gradient in wanted])

    def _agree(self) -> list[float]:
        """Return the sums over all ranks of what `_start_summing` has begun to sum."""
        assert self._sums is not None
        # Gradients of the dense part are those of all ranks, on each of them.
        finite = _all_finite(self._dense_gradients())
        if self._summing is not None:
            self._summing.wait()
        self._sums[_NUM_BAD] += ~finite
        return self._sums.tolist()


class TrainStep(nn.Module):
    """Lookup, then the dense half; what torchrec shards and its pipeline traces.

    Args:
        embeddings: tables that give the sum of each list's rows; None if there is no such table.
        embeddings_by_id: tables that give a vector for each id of a list, likewise.
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection | None,
        embeddings_by_id: EmbeddingCollection | None,
        dense: DenseHalf,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.embeddings_by_id = embeddings_by_id
        self.dense = dense

    def forward(self, batch: Batch) -> tuple[torch.Tensor, StepOutput]:
        """Return (loss of this rank, StepOutput). The pipeline then calls `dense.backward()`."""
        pooled = None if self.embeddings is None else self.embeddings(batch.ids)
        by_id = None if self.embeddings_by_id is None else self.embeddings_by_id(batch.ids)
        return self.dense(pooled, by_id, batch)


def _call_at_end(callback: Callable[[], None], _: torch.Tensor) -> None:
    """Let autograd call back at the end of the backward pass in which this is called, as the hook of a tensor."""
    Variable._execution_engine.queue_callback(callback)


def _all_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return whether all values are finite, as a bool tensor of no dimensions."""
    # A sum of absolute values is finite exactly if all values are (and it does not overflow).
    return torch.isfinite(torch.stack(torch._foreach_norm(tensors, 1))).all()


def ignore_phase(phase: str, step: int | None = None) -> None:
    """Stand in for one who wants to know."""


def _sliced(lookup: Lookup, part: Part) -> list[torch.Tensor]:
    """Return the rows of a part in FP32, whatever type the tables give: gradients keep it up to the seam."""
    return [each[at].float() for each, at in zip(lookup.tensors, part.slices, strict=True)]


def _joined(pieces: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the gradient by a tensor of those by its slices; None where the model does not read it."""
    found = [piece for piece in pieces if piece is not None]
    if len(found) < len(pieces):
        return None
    return found[0] if len(found) == 1 else torch.cat(found)
