"""The step itself: look up, compute, agree, update.

The forward and backward passes of the model run on detached vectors. Then two exchanges run together: gradients of the
dense part are averaged, followed by a few totals over all ranks, and gradients of vectors go to the ranks that hold the
rows. If the totals say that the step is finite everywhere, gradients are divided by the sum of weights and the tables
are updated. So nothing changes a table before every rank knows that.

Without `train.check_every_step` no host waits for the totals: if a step is not finite, tables get gradients of 0, which
leave their rows as they are, and the optimizer of the dense part skips the step on the device.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recsys.config import Autocast, Config
from recsys.config.choices import FloatType
from recsys.config.features import averaged_features, id_features, quantized_features, table_of_feature
from recsys.data.batch import Batch
from recsys.models.base import Model
from recsys.models.dropout import RowDropout, dropouts, set_dropout_keys
from recsys.step.dense_shards import DenseShards
from recsys.step.exchange import Agreement, JoinedGradients, Replica, Totals, agree, set_to_rank_zero
from recsys.step.int8 import Int8Linear
from recsys.step.loss_scale import LossScale
from recsys.step.micro_batches import Lookup, MicroBatches, Outputs, Part, StepLoss, task_weights
from recsys.step.offload import Offload
from recsys.step.output import StepOutput
from recsys.tables.lookup import LocalLookup, LocalLookupById, UpdateGate, scaled
from recsys.tables.replicated import ReplicatedTables

AUTOCAST_TYPES = {Autocast.bf16: torch.bfloat16, Autocast.fp16: torch.float16}


class DenseHalf(nn.Module):
    """Runs the model on looked-up vectors, and passes gradients back to the tables.

    Args:
        model: the dense part, with its loss.

    Attributes:
        stop_requested: set by a signal handler; a step's totals carry it to all ranks.
        publish_requested: whether to publish the model after the step; sent to all ranks likewise.
        enter_phase: called with "forward" and "backward" when a training step begins them.
        gate: holds gradients of vectors back from the tables of this rank.
        sums: a parameter whose gradient is this rank's `Totals.pack`, so that it is summed over the ranks with the
            other gradients, without a message of its own.
        replicated: trains the replicated tables, on their ids and gradients by feature.
        autocast: the type that the model computes in; None: that of its weights. loss_scale: 1 unless that is FP16.
        travels_in_fp16: whether gradients of vectors are, or may be, FP16.
        l2: by feature, the factor of the penalty on its vectors; see `TableConfig`.
        unpooled: features of which the model reads a vector for each id of a list.
        codes: by feature, the code that its vectors are quantised to.
        in_int8: whether linear layers run in INT8 outside training.
        late_exchange: whether gradients of vectors are sent after the totals: a GPU queues both exchanges, and its host
            waits for the totals alone. On CPUs they are sent before the host waits for the totals.
        skipped: with `checks`, whether the last step changed nothing, because it was not finite or weightless.
        checks: whether the host waits for each step's totals. is_bad: without that, `Agreement.is_bad` of the step.
        offload: a context for the model's forward pass in training that moves saved tensors to host memory.
        shards: slices of the dense part, if its optimizer is sharded over the ranks; otherwise None.
    """

    def __init__(self, model: Model, config: Config) -> None:
        super().__init__()
        self.model, self._seed = model, config.seed
        self._clip_norm = config.optimizer.dense.clip_norm
        self._averaged, self.unpooled = averaged_features(config), config.unpooled_features()
        tables = {name: table_of_feature(config, name) for name in id_features(config)}
        self.l2 = {name: table.l2 for name, table in tables.items() if table.l2}
        self.codes, self.in_int8 = quantized_features(config), config.precision.dense_int8
        self.autocast = AUTOCAST_TYPES.get(config.precision.autocast)
        self.loss_scale = LossScale()
        if config.precision.autocast is Autocast.fp16:
            self.loss_scale = LossScale(config.precision.loss_scale, config.precision.loss_scale_growth_steps)
        self.travels_in_fp16 = FloatType.FP16 in (config.precision.output_dtype, config.precision.backward_wire)
        self._tasks = task_weights(model.labels)
        self.sums = nn.Parameter(torch.zeros(Totals.SIZE + len(self._tasks)))
        self.gate = UpdateGate()
        self.replicated = ReplicatedTables([])
        self.enter_phase: Callable[[str], None] = ignore_phase
        self.stop_requested = self.publish_requested = self.skipped = self.late_exchange = False
        self.checks = config.train.check_every_step
        self.is_bad: torch.Tensor | None = None
        self.offload: Callable[[Iterable[torch.Tensor]], AbstractContextManager[Any]]
        self.offload = Offload if config.train.activation_offload else nullcontext
        self.shards: DenseShards | None = None
        self._replica: DistributedDataParallel | None = None  # with several ranks of GPUs
        self._joined: JoinedGradients | None = None  # with several ranks of CPUs
        self._reached: set[nn.Parameter] = set()  # with a replica: in this micro-batch's backward pass
        self._running: Iterator[torch.Tensor] = iter(())
        self._norm: torch.Tensor | None = None  # if gradients are clipped

    def replicate(self, device: torch.device) -> None:
        """Give all ranks the weights and buffers of rank 0, and set up the averaging of gradients; collective."""
        # A user's own class may draw them from a generator that the seed does not set. Before torch 2.13,
        # DistributedDataParallel sets buffers at the start only if it exchanges them in each step too.
        for tensor in (*self._dense_parameters, *self.model.buffers()):
            set_to_rank_zero(tensor)
        if not self.late_exchange:
            parameters = [parameter for parameter in self._dense_parameters if parameter.requires_grad]
            self._joined = JoinedGradients([*parameters, self.sums])
            return
        # Training changes no buffer. torch 2.13 warns about the old name, on each rank.
        exchanges_buffers = "broadcast_buffers" if torch.__version__ < "2.13" else "forward_sync_buffers"
        settings: dict[str, Any] = {exchanges_buffers: False, "gradient_as_bucket_view": True}
        device_ids = [device.index] if device.type == "cuda" else None
        replica = DistributedDataParallel(Replica(self.model, self.sums), device_ids=device_ids, **settings)
        object.__setattr__(self, "_replica", replica)  # not as a submodule, since `model` is one already
        for parameter in self._dense_parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reached.add)

    def sort_buckets(self) -> None:
        """Have DistributedDataParallel sort its buckets, as it does once, in the second step; collective.

        By itself it would do so in its next forward pass with gradients. But a loss over the whole batch has exchanges
        of its own, before that pass on ranks with several micro-batches, and after it on ranks with one.
        """
        if self._replica is not None:
            self._replica.reducer._rebuild_buckets()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the dense part."""
        if self._joined is not None:
            self._joined.clear()
            return
        for parameter in (*self._dense_parameters, self.sums):
            parameter.grad = None

    def forward(
        self, pooled: KeyedTensor | None, by_id: Sequence[Mapping[str, JaggedTensor]], batch: Batch
    ) -> tuple[torch.Tensor, StepOutput]:
        """Return the loss of this rank's rows, and the output; in training it runs the step up to its `yield`.

        Args:
            pooled: a vector for each row, by feature. by_id: for each collection, a vector for each id, by feature.
        """
        vectors_by_id = {name: jagged for vectors in by_id for name, jagged in vectors.items()}
        lookup = Lookup(batch.ids, pooled, vectors_by_id, self.codes)
        output = StepOutput(batch, ())
        if self.training:
            self._running = self.step(lookup, output)
            return next(self._running), output
        (part,) = lookup.parts((0, len(batch.weights)), ())
        with Int8Linear() if self.in_int8 else nullcontext():
            output.outputs = self._outputs(lookup, part, lookup.rows(part), batch)
        return batch.weights.new_zeros(()), output

    def backward(self) -> None:
        """Finish the step that `forward` began."""
        next(self._running, None)

    def step(self, lookup: Lookup, output: StepOutput) -> Iterator[torch.Tensor]:
        """Train on a batch, from top to bottom. At the `yield`, the pipeline copies the next batch, and sends its ids.

        If the loss or a gradient is not finite on some rank, no rank changes its tables, and the output is `skipped`;
        the optimizer of the dense part must not be called then.
        """
        batch, scaled_by = output.batch, self.loss_scale.value
        passes = MicroBatches(self, lookup, batch, StepLoss(self.model, self._tasks, batch))
        passes.run()
        sent = [] if self._joined is None else self._joined.send()
        if not self.late_exchange:
            lookup.backward(passes.gradients)
        for exchange in sent:
            exchange.wait()
        agreement = agree(self.sums, self._dense_gradients())
        if self.late_exchange:
            lookup.backward(passes.gradients)
        yield passes.loss.total
        self.enter_phase("backward")
        output.unread = partial(self._read, output, agreement, passes.is_finite)
        # So far, gradients are divided by the number of ranks and by this rank's rows. The loss is the sum over the
        # global batch divided by the sum of its weights, which are often 1 for each row.
        ranks = dist.get_world_size()
        summands = ranks * len(batch.weights)
        scale: float | torch.Tensor
        if self.checks:
            output.read()
            self.skipped = output.skipped
            if self.skipped:
                self._skip(output)
                return
            self.loss_scale.good()
            scale = summands / output.weight if output.weight else 0.0
        else:
            self.is_bad, scale = agreement.is_bad(), agreement.over_weight(summands)
        self._scale_dense_gradients(scale / (passes.lift * scaled_by))
        scale = scale / (passes.lift * passes.vector_lift)
        if self.replicated.tables and lookup.pooled is not None:
            by_row = scaled(passes.gradients[:1], scale / ranks, self.is_bad)[0]
            self.replicated.update(batch.ids, lookup.pooled_by_feature(by_row))
            del by_row
        del lookup, passes  # to make room for the update, which takes as much
        with record_function("## tables: update ##"):
            self.gate.open(scale, self.is_bad)

    def _skip(self, output: StepOutput) -> None:
        """Drop the gradients of the tables; halve the loss scale if only a gradient overflowed."""
        self.gate.close()
        only_gradient = math.isfinite(output.loss) and not output.is_weightless
        output.overflowed = only_gradient and self.loss_scale.overflow()

    def _read(self, output: StepOutput, agreement: Agreement, is_finite: torch.Tensor) -> None:
        output.set_totals(agreement.wait(), self._tasks)
        output.finite_here = not output.skipped or (bool(is_finite) and not output.is_weightless)

    def _scale_dense_gradients(self, factor: float | torch.Tensor) -> None:
        gradients = self._dense_gradients()
        if gradients and (isinstance(factor, torch.Tensor) or factor != 1):
            torch._foreach_mul_(gradients, factor)
        if self._clip_norm is not None:
            self._norm = torch.nn.utils.clip_grad_norm_(self._dense_parameters, self._clip_norm)

    def gradient_norm(self) -> float:
        """Return the norm of the dense part's gradient in the last step, before clipping; NaN if it was skipped."""
        if self.skipped or (self.is_bad is not None and bool(self.is_bad)):
            return math.nan
        return float(torch.nn.utils.get_total_norm(self._dense_gradients()) if self._norm is None else self._norm)

    @cached_property
    def _dense_parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())  # cached, since collecting them takes a tenth of a millisecond

    @cached_property
    def _dropouts(self) -> dict[str, RowDropout]:
        return dropouts(self.model)

    def _dense_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._dense_parameters if p.grad is not None]

    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's passes: gradients are summed here, and exchanged in the last."""
        self._reached.clear()
        return nullcontext() if last or self._replica is None else self._replica.no_sync()

    def complete(self) -> None:
        """Give gradients of 0 to parameters that no row has used, on any number of ranks.

        Optimizers skip a parameter without a gradient, with its decay and momentum. DistributedDataParallel waits until
        the last micro-batch has given gradients to all, including those that got some from earlier ones.
        """
        trained = [parameter for parameter in self._dense_parameters if parameter.requires_grad]
        if self._replica is None:
            unused = [parameter for parameter in trained if parameter.grad is None]
        else:
            unused = [parameter for parameter in trained if parameter not in self._reached]
        if unused:
            torch.autograd.backward(unused, [torch.zeros_like(parameter) for parameter in unused])

    def outputs(self, lookup: Lookup, part: Part, tensors: list[torch.Tensor], rows: Batch) -> Outputs:
        """Return the model's outputs for the rows of a micro-batch.

        Args:
            tensors: the part's slices of `lookup.tensors`.
        """
        if self._dropouts:
            set_dropout_keys(self._dropouts, self._seed, rows.position.num_rows, rows.row_numbers(*part.rows))
        with self.offload(self._dense_parameters):
            return self._outputs(lookup, part, tensors, rows)

    def _outputs(self, lookup: Lookup, part: Part, tensors: list[torch.Tensor], rows: Batch) -> Outputs:
        vectors = lookup.vectors(part, tensors, self._averaged, self.unpooled)
        model: nn.Module = self.model if self._replica is None else self._replica
        if self.autocast is None:
            return model(vectors, rows.floats)
        with torch.autocast(rows.floats.device.type, self.autocast):
            outputs = model(vectors, rows.floats)
        return _in_fp32(outputs) if isinstance(outputs, torch.Tensor) else tuple(map(_in_fp32, outputs))


class TrainStep(nn.Module):
    """Lookup, then the dense half; what torchrec shards and its pipeline traces.

    Args:
        embeddings: pooled tables, which sum the rows of each list; None if there is none.
        embeddings_by_id: tables that return a vector for each id of a list, in a collection for each dimension.

    Attributes:
        local, local_by_id: look ids up in the sharded `embeddings` and `embeddings_by_id` if `is_local` holds;
            otherwise None and empty, and torchrec looks ids up.
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection | None,
        embeddings_by_id: Iterable[EmbeddingCollection],
        dense: DenseHalf,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.embeddings_by_id = nn.ModuleList(embeddings_by_id)
        self.dense = dense
        self.local: LocalLookup | None = None
        self.local_by_id: list[LocalLookupById] = []

    def forward(self, batch: Batch) -> tuple[torch.Tensor, StepOutput]:
        """Return (loss of this rank, StepOutput). The pipeline then calls `dense.backward()`."""
        pooled = None if self.embeddings is None else (self.local or self.embeddings)(batch.ids)
        by_id = [lookup(batch.ids) for lookup in self.local_by_id or self.embeddings_by_id]
        return self.dense(pooled, by_id, batch)

    @property
    def exchanges(self) -> bool:
        """Whether torchrec looks up some table."""
        pooled = self.embeddings is not None and self.local is None
        return pooled or len(self.local_by_id) < len(self.embeddings_by_id)


def _in_fp32(output: torch.Tensor) -> torch.Tensor:
    return output.float() if output.is_floating_point() else output  # whole numbers may be more than FP32 can hold


def ignore_phase(phase: str, step: int | None = None) -> None:
    """No-op phase callback."""
