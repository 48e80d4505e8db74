"""DLRM: a ranker by dot products of vectors."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.config.choices import Interaction
from recsys.errors import UserError
from recsys.models.attention import AttendedLists, AttentionConfig
from recsys.models.base import WIDEST, DenseInputs, Model, Vectors, mlp
from recsys.models.columns import PairwiseDots
from recsys.models.dropout import RowDropout
from recsys.models.projections import EqualWidths


@dataclass
class DLRMConfig(AttentionConfig):
    """DLRM ranker (Naumov et al. 2019, arXiv:1906.00091), over all features."""

    name: str = "dlrm"
    embedding_dim: int | None = bounded(None, 1, WIDEST)  # width that others are projected to; default: the widest
    bottom_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the output has width embedding_dim
    top_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the output is a logit for each label
    dropout: float = bounded(0.0, 0, below=1)  # dropout after each hidden layer
    embedding_dropout: float = bounded(0.0, 0, below=1)  # dropout of elements of the pooled embeddings
    interaction: Interaction = Interaction.dot

    free: ClassVar = ("dropout", "embedding_dropout")
    shapes: ClassVar = (*AttentionConfig.shapes, "embedding_dim", "bottom_mlp", "top_mlp")
    mlps: ClassVar = {"bottom_mlp": "bottom", "top_mlp": "top"}

    def layer_inputs(self, ids: Sequence[str], floats: Sequence[str]) -> dict[str, list[str]]:
        return {"bottom.0.weight": [*floats], "top.0.weight": [*ids]}

    def meaning(self, config: Config) -> dict[str, Any]:
        widest = max(table.model_dim for table in config.tables.values())
        return {**asdict(self), "embedding_dim": self.embedding_dim or widest}

    def check(self, config: Config) -> None:
        if len(config.features) == 1 and self.interaction is Interaction.dot:
            raise UserError(
                "model dlrm with interaction=dot needs two features for a dot product; add a feature, or set "
                "model.interaction=dot_and_embeddings"
            )
        super().check(config)


class DLRM(Model):
    """Dot products of all pairs of vectors, then an MLP (Naumov et al. 2019, arXiv:1906.00091).

    The bottom MLP turns the float features, if there are any, into one more vector. Vectors of another width are
    projected to embedding_dim by a matrix (mixed dimensions: Ginart et al. 2019, arXiv:1909.11810).
    """

    Config = DLRMConfig

    def __init__(self, config: DLRMConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        dims, num_floats = inputs.dims, len(inputs.floats)
        dim = config.embedding_dim or max(dims.values())
        self.projections = EqualWidths(dims, dim)
        self.attention = AttendedLists(config, inputs)
        self.bottom = mlp(num_floats, config.bottom_mlp, dim, config.dropout) if num_floats else None
        self.embedding_dropout = RowDropout(config.embedding_dropout)
        num_vectors = len(dims) + (num_floats > 0)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.keep_vectors = config.interaction is Interaction.dot_and_embeddings
        num_kept = num_vectors if self.keep_vectors else int(num_floats > 0)
        self._dots = PairwiseDots()
        self.top = mlp(num_pairs + num_kept * dim, config.top_mlp, len(inputs.labels), config.dropout)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits, [rows] for one label, or [rows, labels]."""
        return self._logits(self.projections(self.attention(vectors)), floats)

    def _logits(self, vectors: list[torch.Tensor], floats: torch.Tensor) -> torch.Tensor:
        if self.training and self.embedding_dropout.p > 0:
            vectors = list(self.embedding_dropout(torch.cat(vectors, dim=1)).chunk(len(vectors), dim=1))
        if self.bottom is not None:
            vectors.insert(0, self.bottom(floats))
        device = vectors[0].device.type
        on_gpu = (self._dots.like or device) == "cuda" and torch.is_autocast_enabled(device)
        dots = self._dots(vectors, torch.get_autocast_dtype(device) if on_gpu else None)
        kept = vectors if self.keep_vectors else vectors[:1] if self.bottom is not None else []
        return self.top(torch.cat([*kept, dots], dim=1)).squeeze(1)

    def rehearse(self, device: torch.device) -> None:
        self._dots.like = device.type
