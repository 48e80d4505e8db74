"""Wukong: stacked factorisation machines, each over the products that those below it have made."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.errors import UserError
from recsys.models.attention import AttendedLists, AttentionConfig
from recsys.models.base import WIDEST, DenseInputs, Model, Vectors, mlp
from recsys.models.dropout import RowDropout
from recsys.models.projections import EqualWidths


@dataclass
class WukongConfig(AttentionConfig):
    """Wukong (Zhang et al. 2024, arXiv:2403.02545), over all features.

    A layer makes `fm_vectors` vectors of the products of all pairs of vectors, and `linear_vectors` weighted sums.
    """

    name: str = "wukong"
    embedding_dim: int | None = bounded(None, 2, WIDEST)  # width that others are projected to; default: the widest
    num_layers: int = bounded(2, 1, 64)  # each doubles the degree of the products of features
    fm_vectors: int = bounded(8, 1, WIDEST)  # vectors of a layer that an MLP makes of the products of vectors
    linear_vectors: int = bounded(8, 1, WIDEST)  # vectors of a layer that are weighted sums of those that it reads
    rank: int = bounded(8, 1, WIDEST)  # weighted sums that each vector is multiplied with, instead of with all vectors
    fm_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths of the MLP over these products
    bottom_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the output is a vector for all floats together
    top_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the output is a logit for each label
    dropout: float = bounded(0.0, 0, below=1)  # dropout after each hidden layer
    embedding_dropout: float = bounded(0.0, 0, below=1)  # dropout of elements of the vectors

    free: ClassVar = ("dropout", "embedding_dropout")
    shapes: ClassVar = (
        *(*AttentionConfig.shapes, "embedding_dim", "num_layers", "fm_vectors", "linear_vectors", "rank"),
        *("fm_mlp", "bottom_mlp", "top_mlp"),
    )
    mlps: ClassVar = {"bottom_mlp": "bottom", "top_mlp": "top"}

    def layer_inputs(self, ids: Sequence[str], floats: Sequence[str]) -> dict[str, list[str]]:
        first = ("linear.weight", "factors.weight", "mlp.0.weight", "residual.weight")
        return {"bottom.0.weight": [*floats], **{f"layers.0.{name}": [*ids] for name in first}}

    def meaning(self, config: Config) -> dict[str, Any]:
        return {**asdict(self), "embedding_dim": self._width(config)}

    def check(self, config: Config) -> None:
        super().check(config)
        if self._width(config) == 1:
            raise UserError(
                "model wukong normalises vectors, which leaves nothing of those of width 1; set a larger "
                "model.embedding_dim"
            )

    def _width(self, config: Config) -> int:
        return self.embedding_dim or max(table.model_dim for table in config.tables.values())


class _Layer(nn.Module):
    """LayerNorm(X' + R X) with X' = [MLP(LayerNorm(X Xᵀ Y)), L X] of vectors X, [number, dim] for each row.

    R is the identity if as many vectors are returned as are read.
    """

    def __init__(self, number: int, dim: int, config: WukongConfig) -> None:
        super().__init__()
        self.dim, self.num_outputs = dim, config.fm_vectors + config.linear_vectors
        self.linear = nn.Linear(number, config.linear_vectors, bias=False)
        self.factors = nn.Linear(number, config.rank, bias=False)
        self.products_norm = nn.LayerNorm(number * config.rank)
        self.mlp = mlp(number * config.rank, config.fm_mlp, config.fm_vectors * dim, config.dropout)
        self.residual = None if number == self.num_outputs else nn.Linear(number, self.num_outputs, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, num_outputs, dim] of [rows, number, dim]."""
        columns = x.mT.reshape(-1, x.shape[1])  # layers of [n, width] alone are summed in halves
        products = torch.bmm(x, self.factors(columns).view(-1, self.dim, self.factors.out_features)).flatten(1)
        of_products = self.mlp(self.products_norm(products)).view(len(x), -1, self.dim)
        outputs = torch.cat([of_products, self._rows(self.linear(columns))], dim=1)
        outputs = outputs + (x if self.residual is None else self._rows(self.residual(columns)))
        return self.norm(outputs.view(-1, self.dim)).view(outputs.shape)

    def _rows(self, columns: torch.Tensor) -> torch.Tensor:
        return columns.view(-1, self.dim, columns.shape[1]).mT


class Wukong(Model):
    """Layers that multiply all vectors with each other, then an MLP over the vectors of the last.

    The bottom MLP turns the float features, if there are any, into one more vector.
    """

    Config = WukongConfig

    def __init__(self, config: WukongConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        num_floats, dim = len(inputs.floats), config.embedding_dim or max(inputs.dims.values())
        self.attention = AttendedLists(config, inputs)
        self.projections = EqualWidths(inputs.dims, dim)
        self.embedding_dropout = RowDropout(config.embedding_dropout)
        self.bottom = mlp(num_floats, config.bottom_mlp, dim, config.dropout) if num_floats else None
        outputs = config.fm_vectors + config.linear_vectors
        read = [len(inputs.dims) + (num_floats > 0), *[outputs] * (config.num_layers - 1)]
        self.layers = nn.ModuleList(_Layer(number, dim, config) for number in read)
        self.top = mlp(outputs * dim, config.top_mlp, len(inputs.labels), config.dropout)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits, [rows] for one label, or [rows, labels]."""
        ids = self.projections(self.attention(vectors))
        side_by_side = self.embedding_dropout(torch.cat(ids, dim=1))
        if self.bottom is not None:
            side_by_side = torch.cat([self.bottom(floats), side_by_side], dim=1)
        x = side_by_side.view(len(floats), -1, ids[0].shape[1])
        for layer in self.layers:
            x = layer(x)
        return self.top(x.flatten(1)).squeeze(1)
