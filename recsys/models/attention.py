"""Attention over lists for rankers: weights of a list's ids by the vector of another feature (DIN)."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import Config, ModelConfig, Needs
from recsys.config.bounds import bounded
from recsys.config.features import id_features, table_of_feature
from recsys.config.names import one_of
from recsys.errors import UserError
from recsys.models.base import WIDEST, DenseInputs, Vectors, mlp, row_of_each_id, sum_by_row
from recsys.models.columns import take_rows
from recsys.tables.module_names import module_name


@dataclass
class AttentionConfig(ModelConfig):
    """Keys of models that read lists through `AttendedLists`."""

    # List features whose ids are weighted by how they match the vector of another feature, instead of pooled by the
    # table: {history: item_id}. Their tables may be split by rows, by columns or not at all.
    attention: dict[str, str] = field(default_factory=dict)
    attention_mlp: list[int] = bounded([32], 1, WIDEST)  # hidden widths of what weighs an id; the output has width 1

    shapes: ClassVar[tuple[str, ...]] = ("attention_mlp",)
    deciding: ClassVar = {"attention_mlp": ("attention", ())}

    def needs(self) -> Needs:
        return Needs(sequences=tuple(self.attention))

    def check(self, config: Config) -> None:
        for name, query in self.attention.items():
            self._check_attention(config, name, query)

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


class AttendedLists(nn.ModuleDict):
    """A `TargetAttention` for each feature of `model.attention`."""

    def __init__(self, config: AttentionConfig, inputs: DenseInputs) -> None:
        hidden = config.attention_mlp
        super().__init__({module_name(name): TargetAttention(inputs.dims[name], hidden) for name in config.attention})
        self._queries = dict(config.attention)

    def forward(self, vectors: Vectors) -> Vectors:
        """Return the vectors of `Model.forward` with one vector a row for each of these features too."""
        return vectors | {
            name: self[module_name(name)](vectors[query], vectors[name]) for name, query in self._queries.items()
        }
