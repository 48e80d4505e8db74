"""The passes of the dense half of a step: looked-up vectors cut into micro-batches, forward, loss and backward."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.config import LabelConfig
from recsys.config.choices import LabelNulls, RowCode
from recsys.data.batch import Batch
from recsys.errors import UserError
from recsys.models.base import Model, Vectors, row_of_each_id, sum_by_row
from recsys.models.columns import Columns, in_order_of_tasks
from recsys.models.halves import sum_of_rows
from recsys.step.exchange import SumOverRanks, Totals, all_finite, filled
from recsys.step.loss_scale import vector_lift, weight_lift
from recsys.tables.row_codes import quantize_rows

_MOST_IN_FP16 = 32752  # half of FP16's largest number: later factors are at most 1.4


@dataclass(frozen=True)
class Part:
    """Rows of a batch, and the slices that hold them in each of `Lookup.tensors`."""

    rows: tuple[int, int]
    slices: list[slice]


@dataclass(frozen=True)
class Lookup:
    """Looked-up vectors of the rows of a batch.

    Attributes:
        ids: table rows of the batch.
        pooled: a vector for each row, by feature; None if no table is pooled.
        by_id: a vector for each id of the rows' lists, by feature.
        codes: by feature of `by_id`, the code that its vectors are quantised to.
        tensors: the vectors that get gradients: `pooled`, [rows, sum of widths], then each of `by_id`, [ids, width].
    """

    ids: KeyedJaggedTensor
    pooled: KeyedTensor | None
    by_id: dict[str, JaggedTensor]
    codes: Mapping[str, RowCode]
    tensors: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        # Read here: torchrec waits for the exchange at the first read of the values, and a first read under no_grad
        # would detach them from the tables.
        pooled = [] if self.pooled is None else [self.pooled.values()]
        object.__setattr__(self, "tensors", [*pooled, *(vectors.values() for vectors in self.by_id.values())])

    def parts(self, bounds: Sequence[int], id_bounds: Sequence[Sequence[int]]) -> Iterator[Part]:
        """Yield the parts between consecutive `bounds`; arguments are `Batch.micro_batches` and `Batch.id_bounds`."""
        ends: list[Sequence[int]] = [(0, vectors.values().shape[0]) for vectors in self.by_id.values()]
        if len(bounds) > 2:
            ends = [id_bounds[self.ids.keys().index(name)] for name in self.by_id]
        for number, rows in enumerate(pairwise(bounds)):
            of_pooled = [] if self.pooled is None else [slice(*rows)]
            yield Part(rows, [*of_pooled, *(slice(*of_feature[number : number + 2]) for of_feature in ends)])

    def rows(self, part: Part) -> list[torch.Tensor]:
        """Return a part's rows of each tensor as the model reads them: FP32, and quantised by `codes`.

        Their gradients are used as gradients of the tensors, as if nothing had been rounded (straight-through: Bengio
        et al. 2013, arXiv:1308.3432).
        """
        tensors = [tensor[rows].float() for tensor, rows in zip(self.tensors, part.slices, strict=True)]
        for place, name in enumerate(self.by_id, start=len(tensors) - len(self.by_id)):
            if name in self.codes:
                tensors[place] = quantize_rows(tensors[place], self.codes[name])
        return tensors

    def backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of `tensors`, FP32, to the ranks that hold the table rows."""
        pairs = [
            (vectors, gradient.to(vectors.dtype))
            for vectors, gradient in zip(self.tensors, gradients, strict=True)
            if vectors.requires_grad
        ]
        if pairs:
            torch.autograd.backward([vectors for vectors, _ in pairs], [gradient for _, gradient in pairs])

    def add_l2(
        self,
        gradients: Sequence[torch.Tensor],
        factors: Mapping[str, float],
        weights: torch.Tensor,
        unpooled: Collection[str],
    ) -> None:
        """Add the gradients of the penalty, factor / 2 × weight × square of each vector, to those of `tensors`.

        The vector of a pooled list is its sum, even if its ids are looked up one by one, as for experts or to be
        quantised.

        Args:
            factors: by feature. weights: of rows, [rows]. unpooled: see `vectors`.
        """
        rest = list(zip(self.tensors, gradients, strict=True))
        if self.pooled is not None:
            vectors, gradient = rest.pop(0)
            widths = zip(self.pooled.keys(), self.pooled.length_per_key(), strict=True)
            by_column = torch.cat([weights.new_full((width,), factors.get(name, 0.0)) for name, width in widths])
            gradient.addcmul_(vectors.detach() * by_column, weights[:, None])
        for (name, jagged), (vectors, gradient) in zip(self.by_id.items(), rest, strict=True):
            if name not in factors:
                continue
            rows, scaled = row_of_each_id(jagged), vectors.detach().float() * factors[name]  # as FP16 it may become 0
            if name not in unpooled:
                id_weights = self.ids[name].weights_or_none()
                scaled = sum_by_row(JaggedTensor(scaled, lengths=jagged.lengths(), weights=id_weights))[rows]
                scaled = scaled if id_weights is None else scaled * id_weights[:, None]
            gradient.addcmul_(scaled, weights[rows][:, None])

    def pooled_by_feature(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the columns of `values`, which are rows of `pooled` or their gradient, by feature."""
        assert self.pooled is not None
        return dict(zip(self.pooled.keys(), Columns.apply(values, self.pooled.length_per_key()), strict=True))

    def vectors(
        self, part: Part, tensors: Sequence[torch.Tensor], averaged: Mapping[str, list[str]], unpooled: Collection[str]
    ) -> Vectors:
        """Return the vectors of a part by feature, in the order of the config, as the model reads them.

        Args:
            tensors: the part's slices of `self.tensors`.
            averaged: by feature, the features whose lists' total length divides its sums; empty lists give 0.
            unpooled: features of which the model reads a vector for each id.
        """
        keys, rest = self.ids.keys(), list(zip(tensors, part.slices, strict=True))
        lengths = self.ids.lengths().view(len(keys), -1)[:, slice(*part.rows)]
        vectors: Vectors = {}
        if self.pooled is not None:
            vectors.update(self.pooled_by_feature(rest.pop(0)[0]))
        for name, (values, where) in zip(self.by_id, rest, strict=True):
            weights = self.ids[name].weights_or_none()
            jagged = JaggedTensor(
                values, lengths=lengths[keys.index(name)], weights=None if weights is None else weights[where]
            )
            vectors[name] = jagged if name in unpooled else sum_by_row(jagged)
        for name, counted in averaged.items():
            if name not in unpooled:
                number = reduce(torch.add, (lengths[keys.index(key)] for key in counted))
                vectors[name] = vectors[name] / number.clamp(min=1)[:, None]
        # Until here the order depends on the plan, which must not matter to a model that reads `vectors.values()`.
        return {name: vectors[name] for name in keys}


def _gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of leaves: 0 if the model has not read one, as other micro-batches or ranks may have."""
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


Outputs = torch.Tensor | tuple[torch.Tensor, ...]


def task_weights(labels: Mapping[str, LabelConfig]) -> dict[str, float]:
    """Return the weight of each task's loss; empty for a single task of weight 1 on all rows, which needs no factor."""
    is_plain = len(labels) < 2 and all(x.nulls is LabelNulls.refuse and x.weight == 1 for x in labels.values())
    return {} if is_plain else {name: label.weight for name, label in labels.items()}


class StepLoss:
    """The loss of this rank's rows in one step; collective if there are several tasks.

    Args:
        weights: result of `task_weights`.

    Attributes:
        total: the sum over the rows so far, FP32. by_task: the tasks' shares of it, [tasks]; NaN for a task whose label
            no row of the global batch has, so that its loss is not taken for 0.
        weight: this rank's `Model.denominator`; the sum over ranks divides the loss.
    """

    def __init__(self, model: Model, weights: Mapping[str, float], batch: Batch) -> None:
        self._model, self._tasks = model, list(weights)
        self.weight = model.denominator(batch)
        self._factors = _task_factors(weights, batch, self.weight, model.num_parts) if weights else None
        self.total = batch.weights.new_zeros(())
        self.by_task = batch.weights.new_zeros(len(weights))
        if self._factors is not None:
            self.by_task.masked_fill_(self._factors == 0, torch.nan)

    def add(self, outputs: Outputs, rows: Batch) -> torch.Tensor:
        """Return the loss of some rows, summed over rows and tasks, and add it to `total`.

        Raises:
            UserError: a user's own model gives a loss without a gradient, or not one sum for each task.
        """
        losses = in_order_of_tasks(self._model.losses(outputs, rows), self._tasks)
        if self._factors is None:
            (loss,) = losses
        else:
            shares = torch.stack(losses) * self._factors
            self.by_task = self.by_task + shares.detach()
            loss = shares.sum()
        self.total = self.total + loss.detach()
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError(
                "config key 'model.name': the loss has no gradient, as the model's forward gave numbers that depend on "
                "no weight and no vector; compute it from them, without detach(), no_grad() or integers"
            )
        return loss


@torch.no_grad()
def _task_factors(weights: Mapping[str, float], batch: Batch, weight: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return factors for the tasks' sums of losses, [tasks]; products divided by the sum of `weight` are means.

    Collective. It runs before the loss, since each task has a denominator of its own.
    """
    by_task = (sum_of_rows(batch.label_weights(task), num_parts) for task in range(len(weights)))
    sums = torch.stack([weight, *by_task])
    SumOverRanks(sums).wait()
    return torch.where(sums[1:] > 0, filled(list(weights.values()), sums) * sums[0] / sums[1:], 0.0)


class LastInBackward(torch.autograd.Function):
    """A zero whose backward runs last and calls `gradient`; starts the exchange when all other gradients are ready.

    It is made first: where dependencies leave a choice, autograd reverses the order of the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return 0; `gradient` is called in the backward pass, and returns a tensor in the shape of `parameter`."""
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the result of `gradient`."""
        return ctx.gradient(), None


class MicroBatches:
    """The passes of one step, and their gradients.

    Args:
        dense: the `DenseHalf`, which runs the model.

    Attributes:
        loss: that of this rank's rows.
        gradients: those of `Lookup.tensors` for this rank's rows, FP32.
        lift: factor of all gradients besides the loss scale. vector_lift: a further factor of `gradients`.
        is_finite: whether the loss and `gradients`, in the type they are sent in, are finite; a bool of no dimensions.
    """

    def __init__(self, dense: Any, lookup: Lookup, batch: Batch, loss: StepLoss) -> None:
        self._dense, self._lookup, self._batch, self.loss = dense, lookup, batch, loss
        self._parts = list(lookup.parts(batch.micro_batches, batch.id_bounds))
        rows, self.vector_lift = len(batch.weights), 1.0
        self.lift: float | torch.Tensor = 1.0
        if dense.travels_in_fp16:
            self.lift, self.vector_lift = weight_lift(loss.weight, rows), vector_lift(rows)
        # The loss is a sum over rows; exchanged gradients are those of the mean, apart from weights and rows left out.
        self._factor = self.lift * (dense.loss_scale.value / rows)
        self._by_part: list[list[torch.Tensor]] = []
        self.gradients: list[torch.Tensor] = []
        self.is_finite = torch.zeros(())

    def run(self) -> None:
        """Run all passes; the backward pass of the last one starts the exchanges.

        A loss that is not a sum over rows is computed on the outputs of all rows. These are then computed again,
        micro-batch by micro-batch, for the gradient (GradCache: Gao et al. 2021, arXiv:2101.06983).
        """
        self._dense.sort_buckets()
        cached = self._gradients_by_outputs() if len(self._parts) > 1 and not self._dense.model.loss_by_rows else None
        for part in self._parts:
            last = part is self._parts[-1]
            with self._dense.exchanging(last):
                self._pass(part, last, cached)
        self._dense.complete()

    def _pass(self, part: Part, last: bool, cached: list[Iterator[torch.Tensor]] | None) -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in self._lookup.rows(part)]
        rows = self._batch.dense_rows(*part.rows)
        sums = [LastInBackward.apply(self._dense.sums, partial(self._set_out, leaves))] if last else []
        self._dense.enter_phase("forward")
        outputs = self._dense.outputs(self._lookup, part, leaves, rows)
        self._dense.enter_phase("backward")
        if cached is None:
            torch.autograd.backward([self.loss.add(outputs, rows) * self._factor, *sums])
        else:
            pairs = [(output, next(gradients)) for output, gradients in zip(_as_tuple(outputs), cached, strict=True)]
            trained = [(output, gradient) for output, gradient in pairs if output.requires_grad]
            tensors, seeds = [output for output, _ in trained], [gradient for _, gradient in trained]
            torch.autograd.backward([*tensors, *sums], [*seeds, *(None for _ in sums)])
        if not last:
            self._by_part.append(_gradients(leaves))

    @torch.no_grad()
    def _set_out(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's `Totals.pack`, when the rest of the last backward pass is done.

        DistributedDataParallel then sends its last gradients.

        Args:
            leaves: those of the last micro-batch, whose gradients are ready, and are moved out of them.
        """
        by_part = [*self._by_part, _gradients(leaves)]
        self._by_part = []
        self.gradients = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*by_part, strict=True)]
        by_part.clear()  # to free the parts: they are as large as the result, and what follows needs memory too
        for leaf in leaves:
            leaf.grad = None
        dense, weights = self._dense, self._batch.weights
        own = [gradient for gradient in self.gradients if gradient.numel()]
        if dense.loss_scale.value != 1 and own:  # it is empty if no list has an id
            torch._foreach_div_(own, dense.loss_scale.value)
        if dense.l2:
            factors = {name: factor / len(weights) for name, factor in dense.l2.items()}
            self._lookup.add_l2(self.gradients, factors, weights * self.lift, dense.unpooled)
        if self.vector_lift != 1 and own:
            torch._foreach_mul_(own, self.vector_lift)
        self.is_finite = all_finite([self.loss.total, self.loss.weight, *own])
        if dense.travels_in_fp16 and own:
            self.is_finite &= torch.stack(torch._foreach_norm(own, torch.inf)).amax() < _MOST_IN_FP16
        sums, asks = (self.loss.total, self.loss.weight), (dense.stop_requested, dense.publish_requested)
        return Totals.pack(*sums, self._batch, self.is_finite, *asks, self.loss.by_task)

    def _gradients_by_outputs(self) -> list[Iterator[torch.Tensor]]:
        """Return the gradients that each of the model's outputs gets from the whole batch's loss, part by part."""
        with torch.no_grad():
            by_part = [
                _as_tuple(
                    self._dense.outputs(self._lookup, part, self._lookup.rows(part), self._batch.dense_rows(*part.rows))
                )
                for part in self._parts
            ]
        outputs = list(zip(*by_part, strict=True))
        leaves = [torch.cat(parts) for parts in outputs]
        trained = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        loss = self.loss.add(tuple(leaves) if len(leaves) > 1 else leaves[0], self._batch)
        by_trained = iter(torch.autograd.grad(loss * self._factor, trained, materialize_grads=True))
        # Outputs of whole numbers have no gradient, and `_pass` leaves them out.
        gradients = [next(by_trained) if leaf.requires_grad else leaf for leaf in leaves]
        return [iter(whole.split(list(map(len, parts)))) for whole, parts in zip(gradients, outputs, strict=True)]


def _as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs
