"""DLRM: a ranker by dot products of vectors, with attention over lists if wanted."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.config.choices import Interaction
from recsys.config.features import id_features, table_of_feature
from recsys.config.model import ModelConfig, Needs
from recsys.config.names import one_of
from recsys.errors import UserError
from recsys.models.base import WIDEST, DenseInputs, Model, Vectors, mlp, row_of_each_id, sum_by_row
from recsys.models.columns import PairwiseDots, take_rows
from recsys.models.dropout import RowDropout
from recsys.tables.module_names import module_name


@dataclass
class DLRMConfig(ModelConfig):
    """DLRM ranker (Naumov et al. 2019, arXiv:1906.00091), over all features."""

    name: str = "dlrm"
    embedding_dim: int | None = bounded(None, 1, WIDEST)  # width that others are projected to; default: the widest
    bottom_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the output has width embedding_dim
    top_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the output is a logit for each label
    dropout: float = bounded(0.0, 0, below=1)  # dropout after each hidden layer
    embedding_dropout: float = bounded(0.0, 0, below=1)  # dropout of elements of the pooled embeddings
    interaction: Interaction = Interaction.dot
    # List features whose ids are weighted by how they match the vector of another feature, instead of pooled by the
    # table: {history: item_id}. Their tables may be split by rows, by columns or not at all.
    attention: dict[str, str] = field(default_factory=dict)
    attention_mlp: list[int] = bounded([32], 1, WIDEST)  # hidden widths; the output has width 1

    free: ClassVar = ("dropout", "embedding_dropout")
    shapes: ClassVar = ("embedding_dim", "bottom_mlp", "top_mlp", "attention_mlp")
    mlps: ClassVar = {"bottom_mlp": "bottom", "top_mlp": "top"}
    deciding: ClassVar = {"attention_mlp": ("attention", ())}

    def needs(self) -> Needs:
        return Needs(sequences=tuple(self.attention))

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
        for name, query in self.attention.items():
            self._check_attention(config, name, query)
        tables = sorted({config.features[name].table or "" for name in self.attention})
        dims = {table: config.tables[table].model_dim for table in tables}
        if len(set(dims.values())) > 1:
            shown = ", ".join(f"tables.{table} with {dim}" for table, dim in dims.items())
            raise UserError(
                f"config key 'model.attention': its features' tables must have the same embedding_dim, found {shown}"
            )

    def _check_attention(self, config: Config, name: str, query: str) -> None:
        key = f"model.attention.{name}"
        ids = id_features(config)
        one_of("model.attention", name, ids, "id feature")
        one_of(key, query, ids, "id feature")
        if query in self.attention:
            raise UserError(
                f"config key '{key}': '{query}' is itself weighted by attention; name a feature that has one "
                f"vector a row"
            )
        own, other = (table_of_feature(config, input_name).model_dim for input_name in (name, query))
        if own != other:
            raise UserError(
                f"config key '{key}': its table has embedding_dim {own}, but that of '{query}' has {other}; they are "
                f"compared element by element, so make them equal"
            )


class TargetAttention(nn.Module):
    """Attention of a vector to a list: the sum of its vectors times learned factors (DIN: Zhou et al. 2018,
    arXiv:1706.06978).

    As in the paper, the factors are not normalised, so that long lists weigh more.
    """

    def __init__(self, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.mlp = mlp(4 * dim, hidden, 1, dropout=0.0)

    def forward(self, query: torch.Tensor, jagged: JaggedTensor) -> torch.Tensor:
        """Return [rows, dim] from the queries [rows, dim] and a vector for each id; nothing is padded."""
        queries, keys = take_rows(query, row_of_each_id(jagged)), jagged.values()
        factors = self.mlp(torch.cat([queries, keys, queries - keys, queries * keys], dim=1))
        return sum_by_row(jagged, factors.squeeze(1))


class DLRM(Model):
    """Dot products of all pairs of vectors, then an MLP (Naumov et al. 2019, arXiv:1906.00091).

    The bottom MLP turns the float features, if there are any, into one more vector. Vectors of another width are
    projected to embedding_dim by a matrix (mixed dimensions: Ginart et al. 2019, arXiv:1909.11810).
    """

    Config = DLRMConfig

    def __init__(self, config: DLRMConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        dims, num_floats = inputs.dims, len(inputs.floats)
        self.features = features = list(dims)
        dim = config.embedding_dim or max(dims.values())
        self.projections = nn.ModuleDict(
            {module_name(name): nn.Linear(own, dim, bias=False) for name, own in dims.items() if own != dim}
        )
        self.queries = dict(config.attention)
        self.attention = nn.ModuleDict(
            {module_name(name): TargetAttention(dims[name], config.attention_mlp) for name in config.attention}
        )
        self.bottom = mlp(num_floats, config.bottom_mlp, dim, config.dropout) if num_floats else None
        self.embedding_dropout = RowDropout(config.embedding_dropout)
        num_vectors = len(features) + (num_floats > 0)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.keep_vectors = config.interaction is Interaction.dot_and_embeddings
        num_kept = num_vectors if self.keep_vectors else int(num_floats > 0)
        self._dots = PairwiseDots()
        self.top = mlp(num_pairs + num_kept * dim, config.top_mlp, max(1, len(inputs.labels)), config.dropout)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits, [rows] for one label, or [rows, labels]."""
        vectors = vectors | {
            name: self.attention[module_name(name)](vectors[query], vectors[name])
            for name, query in self.queries.items()
        }
        return self._logits(
            [
                self.projections[module_name(name)](vectors[name])
                if module_name(name) in self.projections
                else vectors[name]
                for name in self.features
            ],
            floats,
        )

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
