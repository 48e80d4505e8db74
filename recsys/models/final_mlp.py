"""FinalMLP: two MLPs over differently gated features, whose outputs are multiplied with each other."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.config.features import id_features
from recsys.config.names import one_of
from recsys.errors import UserError
from recsys.models.attention import AttendedLists, AttentionConfig
from recsys.models.base import WIDEST, DenseInputs, Model, Vectors, mlp
from recsys.models.dropout import RowDropout
from recsys.models.halves import in_parts


@dataclass
class FinalMLPConfig(AttentionConfig):
    """FinalMLP (Mao et al. 2023, arXiv:2304.00902), over all features.

    The features of `gate_1` and `gate_2` decide how much the others count in a stream, and only gates read them. Give
    them tables of their own, as in `user_gate: {column: user, table: user_gate}`.
    """

    name: str = "final_mlp"
    mlp_1: list[int] = bounded([64], 1, WIDEST)  # widths of the layers of the first stream
    mlp_2: list[int] = bounded([64], 1, WIDEST)  # widths of the layers of the second stream
    num_heads: int = bounded(1, 1, WIDEST)  # parts of both outputs; each is multiplied with the same part of the other
    gate_1: list[str] = field(default_factory=list)  # features that weigh the others in the first stream
    gate_2: list[str] = field(default_factory=list)  # features that weigh the others in the second stream
    gate_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths of a gate
    layer_norm: bool = False  # normalise the output of each layer of a stream for a row, before its ReLU
    dropout: float = bounded(0.0, 0, below=1)  # dropout after each layer of a stream
    embedding_dropout: float = bounded(0.0, 0, below=1)  # dropout of elements of the vectors

    free: ClassVar = ("dropout", "embedding_dropout")
    shapes: ClassVar = (*AttentionConfig.shapes, "mlp_1", "mlp_2", "num_heads", "gate_1", "gate_2", "gate_mlp")
    mlps: ClassVar = {"mlp_1": "streams.0", "mlp_2": "streams.1"}

    def check(self, config: Config) -> None:
        super().check(config)
        ids = id_features(config)
        for key in ("gate_1", "gate_2"):
            for name in getattr(self, key):
                one_of(f"model.{key}", name, ids, "id feature")
        if set(ids) <= {*self.gate_1, *self.gate_2}:
            raise UserError(
                f"config keys 'model.gate_1' and 'model.gate_2' leave no id feature to gate, found "
                f"{self.gate_1} and {self.gate_2}; drop some"
            )
        for key in ("mlp_1", "mlp_2"):
            widths = getattr(self, key)
            if not widths or widths[-1] % self.num_heads:
                raise UserError(
                    f"config key 'model.{key}' must end in a multiple of model.num_heads={self.num_heads}, "
                    f"found {widths}"
                )


class FinalMLP(Model):
    """logit = w₁·o₁ + w₂·o₂ + Σ over heads o₁ᵀ W o₂ + b, with o₁ and o₂ the outputs of the two streams."""

    Config = FinalMLPConfig

    def __init__(self, config: FinalMLPConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.gate_features = (list(config.gate_1), list(config.gate_2))
        self.features = [name for name in inputs.dims if name not in {*config.gate_1, *config.gate_2}]
        width = sum(inputs.dims[name] for name in self.features) + len(inputs.floats)
        self.attention = AttendedLists(config, inputs)
        self.embedding_dropout = RowDropout(config.embedding_dropout)
        self.gates = nn.ModuleList(
            mlp(sum(inputs.dims[name] for name in names) or 1, config.gate_mlp, width, 0.0)
            for names in self.gate_features
        )
        self.streams = nn.ModuleList(
            mlp(width, widths, None, config.dropout, config.layer_norm) for widths in (config.mlp_1, config.mlp_2)
        )
        first, second, labels = config.mlp_1[-1], config.mlp_2[-1], len(inputs.labels)
        self.linear = nn.Linear(first + second, labels)
        shape = (labels, config.num_heads, first // config.num_heads, second // config.num_heads)
        self.products = nn.Parameter(nn.init.xavier_normal_(torch.empty(shape)))

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits, [rows] for one label, or [rows, labels]."""
        vectors = self.attention(vectors)
        ids = self.embedding_dropout(torch.cat([vectors[name] for name in self.features], dim=1))
        inputs = torch.cat([ids, floats], dim=1)
        outputs = []
        for names, gate, stream in zip(self.gate_features, self.gates, self.streams, strict=True):
            # A gate without features reads a constant, and is the same for all rows.
            read = torch.cat([vectors[name] for name in names], dim=1) if names else inputs.new_ones(len(inputs), 1)
            outputs.append(stream(2 * gate(read).sigmoid() * inputs))
        first, second = (output.view(len(inputs), self.products.shape[1], -1) for output in outputs)
        products = in_parts(self._products, self.num_parts, first, second)
        return (self.linear(torch.cat(outputs, dim=1)) + products).squeeze(1)

    def _products(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.einsum("rhi,lhij,rhj->rl", first, self.products, second)
