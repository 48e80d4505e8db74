"""Factorisation machine, and DeepFM, which adds an MLP over the same vectors."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.errors import UserError
from recsys.models.attention import AttendedLists, AttentionConfig
from recsys.models.base import WIDEST, DenseInputs, Model, Vectors, check_equal_widths, mlp
from recsys.models.dropout import RowDropout
from recsys.models.halves import in_parts


@dataclass
class FMConfig(AttentionConfig):
    """Factorisation machine (Rendle 2010, doi:10.1109/ICDM.2010.127). A vector ends with the weight of its id."""

    name: str = "fm"
    embedding_dropout: float = bounded(0.0, 0, below=1)  # dropout of elements of the vectors

    free: ClassVar[tuple[str, ...]] = ("embedding_dropout",)

    def has_mlps(self) -> bool:
        return bool(self.attention)

    def check(self, config: Config) -> None:
        super().check(config)
        check_equal_widths(config, f"model {self.name} multiplies vectors element by element; make them equal")
        if len(config.labels()) > 1:
            raise UserError(
                f"model {self.name} learns one label, but config key 'data.labels' has {len(config.labels())}"
            )


class FM(Model):
    """A bias, a weight for each feature, and the dot products of all pairs of features' factors.

    A number has factors and a weight of its own, which its value multiplies. A vector of numbers is one feature, whose
    factors and weight are the sums of theirs.
    """

    Config = FMConfig

    def __init__(self, config: FMConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.attention = AttendedLists(config, inputs)
        dim = max(inputs.dims.values())
        self.embedding_dropout = RowDropout(config.embedding_dropout)
        self.numbers = nn.Parameter(torch.empty(len(inputs.floats), dim).normal_(std=0.01))
        columns = inputs.float_columns().values()
        self.vectors = [(start, stop) for start, stop in columns if stop > start + 1]
        self.num_single = sum(stop == start + 1 for start, stop in columns)  # which come first
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits [rows]."""
        return self._pairs(self._stacked(vectors, floats))

    def _stacked(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all features, [rows, features, dim]."""
        vectors = self.attention(vectors)
        side_by_side = self.embedding_dropout(torch.cat(list(vectors.values()), dim=1))
        ids = side_by_side.view(len(floats), len(vectors), -1)
        return torch.cat([ids, in_parts(self._of_numbers, self.num_parts, floats)], dim=1)

    def _of_numbers(self, floats: torch.Tensor) -> torch.Tensor:
        first = self.num_single
        single = floats[:, :first, None] * self.numbers[:first]
        sums = [floats[:, start:stop] @ self.numbers[start:stop] for start, stop in self.vectors]
        return torch.cat([single, torch.stack(sums, dim=1)], dim=1) if sums else single

    def _pairs(self, stacked: torch.Tensor) -> torch.Tensor:
        factors, weights = stacked[:, :, :-1], stacked[:, :, -1]
        pairs = (factors.sum(dim=1).square() - factors.square().sum(dim=1)).sum(dim=1) / 2
        return in_parts(self.bias.add, self.num_parts, pairs + weights.sum(dim=1))


@dataclass
class DeepFMConfig(FMConfig):
    """DeepFM (Guo et al. 2017, arXiv:1703.04247): the sum of the logits of a factorisation machine and an MLP."""

    name: str = "deepfm"
    mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the output has width 1
    layer_norm: bool = False  # normalise the output of each hidden layer for a row, before its ReLU
    dropout: float = bounded(0.0, 0, below=1)  # dropout after each hidden layer

    free: ClassVar[tuple[str, ...]] = ("embedding_dropout", "dropout")
    shapes: ClassVar = (*FMConfig.shapes, "mlp")
    mlps: ClassVar = {"mlp": "mlp"}

    def has_mlps(self) -> bool:
        return True


class DeepFM(FM):
    """A factorisation machine, and an MLP over its vectors."""

    Config = DeepFMConfig

    def __init__(self, config: DeepFMConfig, inputs: DenseInputs) -> None:
        super().__init__(config, inputs)
        width = self.numbers.shape[1] * (len(inputs.dims) + len(inputs.float_columns()))
        self.mlp = mlp(width, config.mlp, 1, config.dropout, config.layer_norm)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits [rows]."""
        stacked = self._stacked(vectors, floats)
        return self._pairs(stacked) + self.mlp(stacked.flatten(1)).squeeze(1)
