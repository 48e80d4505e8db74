"""What a model is to the training step: a dense part over looked-up vectors, its loss, its metrics."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from recsys.config import LabelConfig, ModelConfig
from recsys.config.choices import LabelLoss
from recsys.data.batch import Batch
from recsys.models.metrics import Evaluator, LabelEvaluator

# By feature a vector for each row, [rows, embedding_dim], or for each id of each row's list.
Vectors = dict[str, Any]


@dataclass(frozen=True)
class DenseInputs:
    """What the dense part is given.

    Attributes:
        dims: embedding_dim of the id features, in order. floats: names of the float features, in order.
        labels: what is learned of rows, in the order of a batch's columns.
        log_shares: of the table rows of `Needs.log_shares_of`, [num_embeddings] float32, if the model wants them.
    """

    dims: dict[str, int]
    floats: list[str]
    labels: dict[str, LabelConfig] = field(default_factory=dict)
    log_shares: torch.Tensor | None = None


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")


def _squared_error(values: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights * (values - labels).square()).sum()


_SUMS = {LabelLoss.binary: _cross_entropy, LabelLoss.squared: _squared_error}


class Model(nn.Module):
    """The dense part of a model. A subclass is made as `Subclass(config.model, inputs)`, with a `DenseInputs`.

    It must not keep state that training changes outside its parameters (no BatchNorm), and must not draw random numbers
    but by `RowDropout`: rows are computed in micro-batches and on any number of ranks, and learn the same on all.

    Attributes:
        Config: the dataclass of its section of a config, derived from ModelConfig.
        loss_by_rows: the loss of a batch is the sum of the losses of its parts.
    """

    Config: ClassVar[type[ModelConfig]]
    loss_by_rows: ClassVar[bool] = True

    def __init__(self, inputs: DenseInputs) -> None:
        super().__init__()
        self.labels = inputs.labels

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return a tensor or tuple of tensors whose first dimension is rows.

        Args:
            vectors: by feature [rows, embedding_dim]; for `Needs.sequences` a JaggedTensor, a vector for each id.
            floats: [rows, float features].
        """
        raise NotImplementedError

    def losses(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> dict[str, torch.Tensor]:
        """Return by task the sum over this rank's rows of weight times loss, scalars; rows of weight 0 add nothing.

        By default a task is a label, with the loss that the config gives it, and outputs are [rows] for one label, or
        [rows, labels].
        """
        assert isinstance(outputs, torch.Tensor)
        columns = outputs.view(len(outputs), len(self.labels)).unbind(1)
        return {
            name: _SUMS[label.loss](column, batch.labels[:, i], batch.label_weights(i))
            for i, ((name, label), column) in enumerate(zip(self.labels.items(), columns, strict=True))
        }

    def predictions(self, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Return what a finished run tells of rows, by the name of its column: each [rows] float32.

        By default `score` for one label, and `score_LABEL` for each of several: the probability that a binary one is 1,
        and the number that another is.
        """
        assert isinstance(outputs, torch.Tensor)
        columns = outputs.float().view(len(outputs), len(self.labels)).unbind(1)
        names = [f"score_{name}" for name in self.labels] if len(self.labels) > 1 else ["score"]
        is_binary = [label.loss is LabelLoss.binary for label in self.labels.values()]
        return {
            name: column.sigmoid() if binary else column
            for name, column, binary in zip(names, columns, is_binary, strict=True)
        }

    def evaluator(self, items: torch.Tensor | None) -> Evaluator:
        """Return what collects outputs and gives metrics; by default those of the labels.

        Args:
            items: of a retrieval model, the vectors of all items, [items, vector_dim].
        """
        return LabelEvaluator(self.labels)

    def rehearse(self, device: torch.device) -> None:
        """Compute from now on only what shows the peak of memory that a step has on `device`; for fake tensors."""
