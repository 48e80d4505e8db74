"""Base class of models, with default losses and metrics, and layers that models share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import Config, DistillConfig, LabelConfig, ModelConfig
from recsys.config.choices import LabelLoss
from recsys.data.batch import Batch
from recsys.errors import UserError
from recsys.models.columns import by_label, in_order_of_tasks
from recsys.models.dropout import RowDropout
from recsys.models.halves import InParts, sum_of_rows
from recsys.models.items import ItemVectors
from recsys.models.label_metrics import LabelEvaluator
from recsys.models.metrics import Evaluator

# By feature, a vector for each row, [rows, width], or a JaggedTensor with a vector for each id of each row's list.
Vectors = dict[str, Any]


@dataclass(frozen=True)
class DenseInputs:
    """Inputs of the dense part.

    Attributes:
        dims: `TableConfig.model_dim` of the id features, in order. floats: feature of each column of the floats, in
            order; a vector has several columns.
        labels: labels to learn, in the order of a batch's columns.
        distill: settings of a teacher, whose scores follow the labels in a batch; None: there is none.
        log_shares: logarithms of the shares that table rows of `Needs.log_shares_of` have in data.train,
            [num_embeddings] float32, if the model needs them.
        num_counted: number of ids in data.train from which the shares were counted.
    """

    dims: dict[str, int]
    floats: list[str]
    labels: dict[str, LabelConfig] = field(default_factory=dict)
    log_shares: torch.Tensor | None = None
    distill: DistillConfig | None = None
    num_counted: int = 0

    def float_columns(self) -> dict[str, tuple[int, int]]:
        """Return the columns of each float feature, as (start, stop)."""
        names = list(dict.fromkeys(self.floats))
        starts = list(map(self.floats.index, names))
        return dict(zip(names, pairwise([*starts, len(self.floats)]), strict=True))


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")


def _squared_error(values: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights * (values - labels).square()).sum()


def _softened_cross_entropy(
    logits: torch.Tensor, scores: torch.Tensor, weights: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the cross-entropy to a teacher's probabilities, both softened by a temperature, times its square."""
    taught = (scores.logit(eps=torch.finfo(scores.dtype).eps) / temperature).sigmoid()
    return temperature**2 * _cross_entropy(logits / temperature, taught, weights)


_SUMS = {LabelLoss.binary: _cross_entropy, LabelLoss.squared: _squared_error}


class Model(InParts, nn.Module):
    """The dense part of a model; it is made as `Subclass(config.model, inputs)`, with a `DenseInputs`.

    It must not keep state that training changes outside its parameters (no BatchNorm), and must draw random numbers by
    `RowDropout` alone: rows are computed in micro-batches and on any number of ranks, and what is learned must not
    depend on that.

    Attributes:
        Config: the dataclass of its section of a config, derived from ModelConfig.
        loss_by_rows: whether the loss of a batch is the sum of the losses of its rows.
        reads_teacher: whether the class's own `losses`, if it has any, learn a teacher's scores: by `with_teacher`, or
            by `super().losses`.
    """

    Config: ClassVar[type[ModelConfig]]
    loss_by_rows: ClassVar[bool] = True
    reads_teacher: ClassVar[bool] = False

    def __init__(self, inputs: DenseInputs) -> None:
        super().__init__()
        self.labels, self.distill = inputs.labels, inputs.distill
        self.check_teacher(inputs.distill)

    @classmethod
    def check_teacher(cls, distill: DistillConfig | None) -> None:
        """Raise a UserError if there is a teacher whose scores the class's own losses would not read."""
        if distill is not None and cls.losses is not Model.losses and not cls.reads_teacher:
            raise UserError(
                f"config key 'train.distill': {cls.__qualname__} has its own losses, which read no teacher; train "
                f"without a teacher, or, if the class is your own, let `losses` call `with_teacher`, and set "
                f"`reads_teacher = True` (docs/own_model.md)"
            )

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return a tensor or tuple of tensors whose first dimension is rows, or in training the ids of their lists.

        Args:
            vectors: by feature, in the order of `DenseInputs.dims`, [rows, `TableConfig.model_dim`]; for
                `Needs.sequences` a JaggedTensor, a vector for each id.
            floats: [rows, `DenseInputs.floats`].
        """
        raise NotImplementedError

    def losses(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> dict[str, torch.Tensor]:
        """Return, by task, the sum over this rank's rows of weight times loss, a scalar; rows of weight 0 add nothing.

        By default a task is a label, with the loss that the config gives it, and outputs are [rows] for one label, or
        [rows, labels].
        """
        columns = by_label(outputs, self.labels, len(batch.weights))
        losses = {
            name: _SUMS[label.loss](column, batch.labels[:, i], batch.label_weights(i))
            for i, ((name, label), column) in enumerate(zip(self.labels.items(), columns, strict=True))
        }
        return self.with_teacher(losses, outputs, batch)

    def with_teacher(
        self, losses: dict[str, torch.Tensor], outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch
    ) -> dict[str, torch.Tensor]:
        """Return losses with the teacher's share, as `train.distill` says; without a teacher, as they are.

        Args:
            losses: what `losses` returns, for the labels alone. outputs: [rows] for one label, or [rows, labels]: the
                logit of a binary label, or the value of any other.
        """
        if self.distill is None:
            return losses
        share, of_labels = self.distill.weight, in_order_of_tasks(losses, list(self.labels))
        columns = enumerate(by_label(outputs, self.labels, len(batch.weights)))
        taught = [self._taught(i, column, batch, self.distill.temperature) for i, column in columns]
        return {
            name: (1 - share) * loss + share * of_teacher
            for name, loss, of_teacher in zip(self.labels, of_labels, taught, strict=True)
        }

    def _taught(self, i: int, column: torch.Tensor, batch: Batch, temperature: float) -> torch.Tensor:
        """Return the sum over rows of weight times the loss of label number `i` against its teacher."""
        scores, weights = batch.labels[:, len(self.labels) + i], batch.label_weights(i)
        if list(self.labels.values())[i].loss.is_binary:
            return _softened_cross_entropy(column, scores, weights, temperature)
        return _squared_error(column, scores, weights)

    def denominator(self, batch: Batch) -> torch.Tensor:
        """Return this rank's part of the denominator of the step's losses, a scalar; by default the rows' weights.

        A model whose losses have another number of terms in each row adds up the weights of the terms.
        """
        return sum_of_rows(batch.weights, self.num_parts)

    def predictions(self, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Return the predictions of a finished run for rows, by the name of their column: each [rows] float32.

        By default `score` for one label, and `score_LABEL` for each of several: the probability that a binary label is
        1, or the value of any other label.
        """
        columns = by_label(outputs, self.labels, len(outputs))
        names = [f"score_{name}" for name in self.labels] if len(self.labels) > 1 else ["score"]
        is_binary = [label.loss.is_binary for label in self.labels.values()]
        return {
            name: column.float().sigmoid() if binary else column.float()
            for name, column, binary in zip(names, columns, is_binary, strict=True)
        }

    def evaluator(self, items: ItemVectors | None) -> Evaluator:
        """Return an evaluator, which collects outputs and computes metrics; by default those of the labels.

        Args:
            items: for a retrieval model, the vectors of all items, [items, vector_dim].
        """
        return LabelEvaluator(self.labels)

    def rehearse(self, device: torch.device) -> None:
        """Compute from now on only what is needed to show the peak memory of a step on `device`; for fake tensors."""


WIDEST = 2**24  # of a layer


def checkpoint_mlps(model: nn.Module) -> None:
    """Make every MLP keep only its input, and compute its layers again in the backward pass.

    Dropout draws the same masks again, since they are a function of the step and the row.
    """
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, preserve_rng_state=False),
        check_fn=lambda module: isinstance(module, nn.Sequential),
    )


def mlp(
    input_dim: int, hidden: Sequence[int], output_dim: int | None, dropout: float, layer_norm: bool = False
) -> nn.Sequential:
    """Return Linear-ReLU-Dropout layers of the hidden widths, then a plain Linear if there is an output width.

    Args:
        layer_norm: normalise the output of each hidden layer, by row, before the ReLU (arXiv:1607.06450).
    """
    layers: list[nn.Module] = []
    for width in hidden:
        linear = nn.Linear(input_dim, width)
        if layer_norm:
            nn.init.zeros_(linear.bias)  # or it would hide vectors, which are small at first
        # The Identity stands where earlier versions had the ReLU, so that parameters keep their names.
        layers += [linear, nn.LayerNorm(width) if layer_norm else nn.Identity(), RowDropout(dropout, relu=True)]
        input_dim = width
    if output_dim is not None:
        layers.append(nn.Linear(input_dim, output_dim))
    return nn.Sequential(*layers)


def check_equal_widths(config: Config, why: str) -> None:
    """Raise a UserError, which begins with `why`, unless the vectors of all tables have the same width."""
    dims = {f"tables.{name}.embedding_dim": table.model_dim for name, table in config.tables.items()}
    if len(set(dims.values())) > 1:
        raise UserError(f"{why}: {', '.join(f'{key}={dim}' for key, dim in dims.items())}")


def row_of_each_id(jagged: JaggedTensor) -> torch.Tensor:
    """Return the row of each id, [ids] int64."""
    rows = torch.arange(len(jagged.lengths()), device=jagged.lengths().device)
    return rows.repeat_interleave(jagged.lengths(), output_size=jagged.values().shape[0])


def sum_by_row(jagged: JaggedTensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weighted sums of the ids' vectors, [rows, width]; `factors` are further weights, [ids]."""
    values = jagged.values()
    for weights in (jagged.weights_or_none(), factors):
        if weights is not None:
            values = values * weights[:, None]
    return values.new_zeros(len(jagged.lengths()), values.shape[1]).index_add(0, row_of_each_id(jagged), values)
