"""Deep and cross network: layers that multiply all features with each other, parallel to an MLP or below it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet

from recsys.config.bounds import bounded
from recsys.config.choices import CrossStructure
from recsys.models.attention import AttendedLists, AttentionConfig
from recsys.models.base import WIDEST, DenseInputs, Model, Vectors, mlp
from recsys.models.dropout import RowDropout
from recsys.models.halves import in_parts


@dataclass
class DCNConfig(AttentionConfig):
    """DCN V2 (Wang et al. 2021, arXiv:2008.13535), over all features."""

    name: str = "dcn"
    num_cross_layers: int = bounded(3, 1, 64)  # each adds a degree to the products of features
    rank: int | None = bounded(None, 1, WIDEST)  # rank of the matrix of a cross layer; default: full
    bottom_mlp: list[int] = bounded([], 1, WIDEST)  # widths of layers over the floats; none: floats are read directly
    mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths
    structure: CrossStructure = CrossStructure.parallel
    layer_norm: bool = False  # normalise the output of each hidden layer for a row, before its ReLU
    dropout: float = bounded(0.0, 0, below=1)  # dropout after each hidden layer
    embedding_dropout: float = bounded(0.0, 0, below=1)  # dropout of elements of the vectors

    free: ClassVar = ("dropout", "embedding_dropout")
    shapes: ClassVar = (*AttentionConfig.shapes, "num_cross_layers", "rank", "bottom_mlp", "mlp")
    mlps: ClassVar = {"bottom_mlp": "bottom", "mlp": "mlp"}


class _CrossNet(CrossNet):
    """torchrec's cross layers with fewer passes over [rows, width], which take most of their time on GPUs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            x = torch.addcmul(x, input, F.linear(x, kernel, bias.squeeze(1)))
        return x


class _LowRankCrossNet(LowRankCrossNet):
    """torchrec's low-rank cross layers, likewise with fewer passes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input
        for narrow, wide, bias in zip(self.V_kernels, self.W_kernels, self.bias, strict=True):
            x = torch.addcmul(x, input, F.linear(F.linear(x, narrow), wide, bias))
        return x


class DCN(Model):
    """Cross layers x ← x₀ ⊙ (W x + b) + x, with torchrec's parameters, and an MLP."""

    Config = DCNConfig

    def __init__(self, config: DCNConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.attention = AttendedLists(config, inputs)
        floats = len(inputs.floats)
        layers = config.dropout, config.layer_norm
        self.bottom = mlp(floats, config.bottom_mlp, None, *layers) if floats and config.bottom_mlp else None
        width = sum(inputs.dims.values()) + (config.bottom_mlp[-1] if self.bottom else floats)
        self.embedding_dropout = RowDropout(config.embedding_dropout)
        self.cross = (
            _CrossNet(width, config.num_cross_layers)
            if config.rank is None
            else _LowRankCrossNet(width, config.num_cross_layers, config.rank)
        )
        self.mlp = mlp(width, config.mlp, None, *layers)
        self.is_stacked = config.structure is CrossStructure.stacked
        mlp_width = config.mlp[-1] if config.mlp else width
        self.last = nn.Linear(mlp_width if self.is_stacked else mlp_width + width, len(inputs.labels))

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits, [rows] for one label, or [rows, labels]."""
        ids = list(self.attention(vectors).values())
        if self.embedding_dropout.p:
            ids = [self.embedding_dropout(torch.cat(ids, dim=1))]
        inputs = torch.cat([*ids, self.bottom(floats) if self.bottom else floats], dim=1)
        crossed = in_parts(self.cross, self.num_parts, inputs)
        if self.is_stacked:
            return self.last(self.mlp(crossed)).squeeze(1)
        return self.last(torch.cat([crossed, self.mlp(inputs)], dim=1)).squeeze(1)
