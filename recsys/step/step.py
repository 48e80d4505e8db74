"""The two halves of a training step: the lookup, and the dense part on detached embeddings.

The dense part runs forward and backward by itself. At its end, two exchanges are under way together: the gradients of
the dense part with a few sums over all ranks behind them, and the gradients by embeddings on their way to the ranks
that hold the rows. When the sums say that the step is sound everywhere, gradients are set right by the sum of weights,
and the tables are updated. So nothing reaches a table before every rank has seen that.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.config import Autocast, PrecisionConfig
from recsys.config.choices import LabelNulls
from recsys.data.batch import Batch
from recsys.models.base import Model, Vectors
from recsys.models.blocks import set_dropout_keys
from recsys.step.exchange import LastInBackward, Replica, Totals
from recsys.step.gate import UpdateGate
from recsys.step.lookup import Lookup, Part, joined
from recsys.step.loss_scale import LossScale
from recsys.step.output import StepOutput

_DTYPES = {Autocast.bf16: torch.bfloat16, Autocast.fp16: torch.float16}


class Replicated(Protocol):
    """What `DenseHalf.replicated` is."""

    def update(self, ids: KeyedJaggedTensor, gradients: dict[str, torch.Tensor]) -> None:
        """Train on this rank's table rows and the gradients of the mean loss by feature; collective."""


class DenseHalf(nn.Module):
    """Runs a model on detached embeddings, and hands the gradient on to the tables.

    Args:
        model: the dense part, with its loss.
        seed: of the run, for dropout.
        clip_norm: most that the norm over all gradients of the dense part may be; None: any.
        precision: types that the model computes in.
        averaged: features whose pooled embeddings, which are sums, are divided by the lengths of their lists.
        unpooled: features that the model reads a vector of for each id.
        l2: by feature, the factor of the penalty on its vectors; see `TableConfig`.

    Attributes:
        stop_requested: set by a signal handler; it rides on the step's all-reduce to all ranks.
        enter_phase: told "forward" and "backward" as a training step comes to them.
        gate: stands between the tables and the exchange of what is looked up.
        sums: a parameter whose gradient is what a step sums over the ranks. So it goes with the others, and costs no
            message of its own.
        replicated: trains the tables that every rank holds whole, on their ids and gradients by feature.
        loss_scale: 1 unless the model computes in FP16.
    """

    def __init__(
        self,
        model: Model,
        seed: int,
        clip_norm: float | None,
        precision: PrecisionConfig,
        averaged: Sequence[str] = (),
        unpooled: Sequence[str] = (),
        l2: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.seed = seed
        self.clip_norm = clip_norm
        self.averaged, self.unpooled = averaged, unpooled
        self._l2 = {name: factor for name, factor in (l2 or {}).items() if factor}
        self.stop_requested = False
        self.enter_phase: Callable[[str], None] = ignore_phase
        self.gate = UpdateGate()
        self.replicated: Replicated | None = None
        self.loss_scale = LossScale()
        if precision.autocast is Autocast.fp16:
            self.loss_scale = LossScale(precision.loss_scale, precision.loss_scale_growth_steps)
        self._dtype = _DTYPES.get(precision.autocast)
        self._lookup: Lookup | None = None
        self._gradients: list[torch.Tensor | None] = []
        # Weights of the tasks' losses; empty for one task on all rows, whose sum is the loss.
        labels = model.labels.values()
        is_plain = len(labels) < 2 and all(x.nulls is LabelNulls.refuse and x.weight == 1 for x in labels)
        self._tasks = {} if is_plain else {name: label.weight for name, label in model.labels.items()}
        # What a task's sum of losses is multiplied by, so that over the sum of weights it is the task's mean times its
        # weight: [tasks], of the step that is under way.
        self._factors: torch.Tensor | None = None
        self.sums = nn.Parameter(torch.zeros(Totals.SIZE + len(self._tasks)))
        self._replica: DistributedDataParallel | None = None  # with several ranks
        self._loss = self._finite = torch.zeros(())  # of this rank, of the step that is under way
        self._task_losses = torch.zeros(0)  # likewise, [tasks]
        self._output: StepOutput | None = None

    def replicate(self, device: torch.device) -> None:
        """Let gradients of the dense part be averaged over all ranks; every rank holds its weights."""
        replica = DistributedDataParallel(
            Replica(self.model, self.sums),
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,  # training changes none
            gradient_as_bucket_view=True,
        )
        object.__setattr__(self, "_replica", replica)  # not as a submodule, which `model` is already

    def forward(
        self, pooled: KeyedTensor | None, by_id: dict[str, JaggedTensor] | None, batch: Batch
    ) -> tuple[torch.Tensor, StepOutput]:
        """Return the loss of this rank's rows and the output; in training, gradients are then on their way.

        Args:
            pooled, by_id: what the tables gave: a vector for each row, and one for each id, by feature.
        """
        lookup = Lookup(batch.ids, pooled, {} if by_id is None else dict(by_id.items()))
        if not self.training:
            (part,) = lookup.parts((0, len(batch.weights)), ())
            outputs = self._outputs(self._vectors(lookup, part, lookup.rows(part)), batch)
            return batch.weights.new_zeros(()), StepOutput(batch, outputs)
        self._lookup = lookup
        self._output = StepOutput(batch, ())
        self._factors = self._task_factors(batch) if self._tasks else None
        self._task_losses = batch.weights.new_zeros(len(self._tasks))
        return self._forward_backward(lookup, batch), self._output

    def _forward_backward(self, lookup: Lookup, batch: Batch) -> torch.Tensor:
        """Return the loss, its gradients being on their way; one micro-batch's activations live at a time.

        A loss that is no sum over rows is computed on the outputs of all, which are then computed again, micro-batch by
        micro-batch, for the gradient (GradCache: Gao et al. 2021, arXiv:2101.06983).
        """
        parts = list(lookup.parts(batch.micro_batches, batch.id_bounds))
        whole: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        if len(parts) > 1 and not self.model.loss_by_rows:
            whole = self._loss_of_all(lookup, batch, parts)
        self._loss = batch.weights.new_zeros(()) if whole is None else whole[0]
        gradients: list[list[torch.Tensor | None]] = []
        self.sums.grad = None
        for part in parts:
            # Gradients of the dense part add up, and are exchanged with the last micro-batch.
            last = part is parts[-1]
            with self._exchanging(last):
                leaves = [each.detach().requires_grad_() for each in lookup.rows(part)]
                rows = batch.dense_rows(*part.rows)
                sums = []
                if last:
                    finish = partial(self._start_exchanges, lookup, batch, gradients, leaves)
                    sums = [LastInBackward.apply(self.sums, finish)]
                self.enter_phase("forward")
                outputs = self._part(lookup, part, leaves, rows)
                self.enter_phase("backward")
                if whole is None:
                    loss = self._loss_of(outputs, rows)
                    self._loss = self._loss + loss.detach()
                    torch.autograd.backward([loss * self._loss_factor(batch), *sums])
                else:
                    roots = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
                    seeds = [each[slice(*part.rows)] for each in whole[1]]
                    torch.autograd.backward([*roots, *sums], [*seeds, *(None for _ in sums)])
            if not last:
                gradients.append([leaf.grad for leaf in leaves])
        return self._loss

    @torch.no_grad()
    def _start_exchanges(
        self,
        lookup: Lookup,
        batch: Batch,
        gradients: list[list[torch.Tensor | None]],
        leaves: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return what this rank adds to the sums, when all else of the last backward pass is through.

        After them DistributedDataParallel sends its last gradients; those by embeddings follow before it waits.

        Args:
            gradients: of the micro-batches before the last, whose `leaves` have theirs; not kept.
        """
        gradients.append([leaf.grad for leaf in leaves])
        self._gradients = [joined(pieces) for pieces in zip(*gradients, strict=True)]
        gradients.clear()  # the pieces are as large as what is joined, and all that follows comes on top
        for leaf in leaves:
            leaf.grad = None
        own = [gradient for gradient in self._gradients if gradient is not None]
        self._finite = torch.isfinite(torch.stack([self._loss, batch.weights.sum()])).all() & _all_finite(own)
        if self.loss_scale.value != 1:
            torch._foreach_div_(own, self.loss_scale.value)  # a wire of FP16 takes no more than 65,504
        if self._l2:
            factors = {name: factor / len(batch.weights) for name, factor in self._l2.items()}
            lookup.add_l2(self._gradients, factors, batch.weights)
        Variable._execution_engine.queue_callback(partial(lookup.backward, self._gradients))
        return Totals.pack(self._loss, batch, self._finite, self.stop_requested, self._task_losses)

    def _loss_of(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], rows: Batch) -> torch.Tensor:
        """Return the sum over rows and tasks of what is to be made small."""
        losses = list(self.model.losses(outputs, rows).values())
        if self._factors is None:
            (loss,) = losses
            return loss
        stacked = torch.stack(losses) * self._factors
        self._task_losses = self._task_losses + stacked.detach()
        return stacked.sum()

    @torch.no_grad()
    def _task_factors(self, batch: Batch) -> torch.Tensor:
        """Return `_factors` of a step; collective, before the loss, since each task has a denominator of its own."""
        own = [batch.weights.sum(), *(batch.label_weights(i).sum() for i in range(len(self._tasks)))]
        sums = torch.stack(own)
        dist.all_reduce(sums)
        weights = sums.new_tensor(list(self._tasks.values()))
        return torch.where(sums[1:] > 0, weights * sums[0] / sums[1:], 0.0)

    def _loss_of_all(self, lookup: Lookup, batch: Batch, parts: list[Part]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the loss of the whole batch, and its gradients by the model's outputs."""
        pieces = []
        with torch.no_grad():
            for part in parts:
                outputs = self._part(lookup, part, lookup.rows(part), batch.dense_rows(*part.rows))
                pieces.append((outputs,) if isinstance(outputs, torch.Tensor) else outputs)
        leaves = [torch.cat(each).requires_grad_() for each in zip(*pieces, strict=True)]
        loss = self._loss_of(tuple(leaves) if len(leaves) > 1 else leaves[0], batch)
        gradients = torch.autograd.grad(loss * self._loss_factor(batch), leaves)
        return loss.detach(), list(gradients)

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self._replica is None else self._replica.no_sync()

    def _part(
        self, lookup: Lookup, part: Part, tensors: list[torch.Tensor], rows: Batch
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the outputs for the rows of a micro-batch."""
        set_dropout_keys(self.model, self.seed, rows.position.num_rows, rows.first_row + part.rows[0])
        return self._outputs(self._vectors(lookup, part, tensors), rows)

    def _vectors(self, lookup: Lookup, part: Part, tensors: list[torch.Tensor]) -> Vectors:
        return lookup.vectors(part, tensors, self.averaged, self.unpooled)

    def _outputs(self, vectors: Vectors, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        model: nn.Module = self.model if self._replica is None else self._replica
        if self._dtype is None:
            return model(vectors, batch.floats)
        with torch.autocast(batch.floats.device.type, self._dtype):
            outputs = model(vectors, batch.floats)
        return outputs.float() if isinstance(outputs, torch.Tensor) else tuple(each.float() for each in outputs)

    def _loss_factor(self, batch: Batch) -> float:
        # The loss is a sum over rows, and the gradients exchanged are of the mean, but for weights and rows left out.
        return self.loss_scale.value / len(batch.weights)

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
        lookup, gradients, num_local = self._lookup, self._gradients, len(self._output.batch.weights)
        self.enter_phase("backward")
        loss_scale = self.loss_scale.value
        totals, dense_bad = self._agree()
        self._output.take(totals, self._tasks)
        self._lookup, self._gradients = None, []
        if totals.num_bad or dense_bad:
            self.gate.close()
            self._output.skipped, self._output.finite_here = True, bool(self._finite)
            self._output.overflowed = math.isfinite(self._output.loss) and self.loss_scale.overflow()
            return
        self.loss_scale.good()
        # DistributedDataParallel and torchrec's backward divide by the number of ranks; the loss is the mean over
        # the weights of the global batch, which is often 1 for each of its rows.
        scale = dist.get_world_size() * num_local / totals.weight if totals.weight else 0.0
        if scale != loss_scale:
            torch._foreach_mul_(self._dense_gradients(), scale / loss_scale)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._dense_parameters, self.clip_norm)
        if self.replicated is not None and lookup.pooled is not None and gradients[0] is not None:
            by_feature = lookup.pooled_by_feature(gradients[0] * (scale / dist.get_world_size()))
            self.replicated.update(lookup.ids, by_feature)
        del lookup, gradients  # the update takes as much
        with record_function("## tables: update ##"):
            self.gate.open(scale)

    @cached_property
    def _dense_parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())  # looking for them takes a tenth of a millisecond

    def _dense_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._dense_parameters if p.grad is not None]

    def _agree(self) -> tuple[Totals, bool]:
        """Return the sums over all ranks, and whether a gradient of the dense part is not finite."""
        assert self.sums.grad is not None
        sums = self.sums.grad * dist.get_world_size()  # DistributedDataParallel gives means
        # Gradients of the dense part are those of all ranks, on each of them. One tensor, for one copy from the GPU:
        dense_bad = ~_all_finite(self._dense_gradients())
        *numbers, is_bad = torch.cat([sums, dense_bad.float()[None]]).tolist()
        return Totals.unpack(numbers), bool(is_bad)


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


def _all_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return whether all values are finite, as a bool tensor of no dimensions."""
    # A sum of absolute values is finite exactly if all values are (and it does not overflow).
    return torch.isfinite(torch.stack(torch._foreach_norm(tensors, 1))).all()


def ignore_phase(phase: str, step: int | None = None) -> None:
    """No-op phase callback."""
