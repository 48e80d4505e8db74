"""DLRM ranker with binary cross-entropy."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import Config, FeatureType
from recsys.config.bounds import bounded
from recsys.config.choices import Interaction
from recsys.config.model import ModelConfig, Needs
from recsys.config.names import one_of
from recsys.errors import UserError
from recsys.models.base import WIDEST, DenseInputs, Model, RowDropout, Vectors, mlp, row_of_each_id, sum_by_row
from recsys.tables.module_names import module_name

_MOST_BY_MATRIX = 48  # vectors: the matrix has about half their number to the power of 4 elements, here 10 MiB


@dataclass
class DLRMConfig(ModelConfig):
    """DLRM ranker (Naumov et al. 2019, arXiv:1906.00091), over all features."""

    name: str = "dlrm"
    embedding_dim: int | None = bounded(None, 1, WIDEST)  # of all vectors; narrower are projected. Default: the widest
    bottom_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the last is embedding_dim
    top_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths; the last is 1
    dropout: float = bounded(0.0, 0, below=1)  # after each hidden layer
    embedding_dropout: float = bounded(0.0, 0, below=1)  # of elements of the pooled embeddings
    interaction: Interaction = Interaction.dot
    # List features whose ids are weighted by how they match another feature's vector, in place of being summed as one:
    # {history: item_id}. Of tables split by rows, by columns or not at all.
    attention: dict[str, str] = field(default_factory=dict)
    attention_mlp: list[int] = bounded([32], 1, WIDEST)  # hidden widths; the last is 1

    free: ClassVar = ("dropout", "embedding_dropout")
    shapes: ClassVar = ("embedding_dim", "bottom_mlp", "top_mlp", "attention_mlp")

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
                "model dlrm with interaction=dot needs two features to take dot products of; add a feature, or set "
                "model.interaction=dot_and_embeddings"
            )
        for name, query in self.attention.items():
            self._check_attention(config, name, query)
        tables = sorted({config.features[name].table or "" for name in self.attention})
        dims = {table: config.tables[table].model_dim for table in tables}
        if len(set(dims.values())) > 1:
            shown = ", ".join(f"tables.{table} with {dim}" for table, dim in dims.items())
            raise UserError(
                f"config key 'model.attention': its features' tables must have one embedding_dim, found {shown}"
            )

    def _check_attention(self, config: Config, name: str, query: str) -> None:
        key = f"model.attention.{name}"
        ids = [feature for feature, settings in config.features.items() if settings.type is FeatureType.id]
        one_of("model.attention", name, ids, "id feature")
        one_of(key, query, ids, "id feature")
        if query in self.attention:
            raise UserError(
                f"config key '{key}': the rows of '{query}' are weighted themselves; name a feature that has one "
                f"vector a row"
            )
        own, other = (config.tables[config.features[each].table or ""].model_dim for each in (name, query))
        if own != other:
            raise UserError(
                f"config key '{key}': its table has embedding_dim {own}, and that of '{query}' {other}; they are "
                f"compared element by element, so make them equal"
            )


class _PairwiseDots(torch.autograd.Function):
    """The dot products of all pairs of a row's vectors, below the diagonal.

    Autograd's own backward takes two batched products where one is enough, since the products are symmetric, and picks
    the pairs by indices, which takes CPUs longer than multiplying by a matrix of zeros and ones, unless that is large.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, picked: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        """Return the products, [rows, pairs].

        Args:
            vectors: [rows, n, dim].
            picked, spread: what `_pairs` gives; without elements: indices pick the pairs.
        """
        ctx.save_for_backward(vectors, spread)
        n, products = vectors.shape[1], torch.bmm(vectors, vectors.transpose(1, 2))
        if not spread.numel():
            rows, columns = torch.tril_indices(n, n, offset=-1, device=vectors.device)
            return products[:, rows, columns]
        return products.flatten(1) @ picked

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        vectors, spread = ctx.saved_tensors
        n, gradient = vectors.shape[1], gradient.to(vectors.dtype)  # under autocast it comes in its type
        if not spread.numel():
            rows, columns = torch.tril_indices(n, n, offset=-1, device=vectors.device)
            both = gradient.new_zeros(len(gradient), n, n)
            both[:, rows, columns] = gradient
            both[:, columns, rows] = gradient
        else:
            both = (gradient @ spread).view(-1, n, n)
        return torch.bmm(both, vectors), None, None


def _pairs(n: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what picks the entries below the diagonal, [n * n, pairs], and what puts them on both of its sides."""
    rows, columns = torch.tril_indices(n, n, offset=-1, device=device)
    numbers = torch.arange(len(rows), device=device)
    picked, spread = torch.zeros(2, n * n, len(rows), dtype=dtype, device=device)
    picked[rows * n + columns, numbers] = 1
    spread[rows * n + columns, numbers] = spread[columns * n + rows, numbers] = 1
    return picked, spread.T.contiguous()


class TargetAttention(nn.Module):
    """The sum of a list's vectors, each times how it matches another vector (DIN: Zhou et al. 2018, arXiv:1706.06978).

    As there, the factors are not normalised, so that long lists weigh more.
    """

    def __init__(self, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.mlp = mlp(4 * dim, hidden, 1, dropout=0.0)

    def forward(self, query: torch.Tensor, jagged: JaggedTensor) -> torch.Tensor:
        """Return [rows, dim] from the queries [rows, dim] and a vector for each id; nothing is padded."""
        queries, keys = query[row_of_each_id(jagged)], jagged.values()
        factors = self.mlp(torch.cat([queries, keys, queries - keys, queries * keys], dim=1))
        return sum_by_row(jagged, factors.squeeze(1))


class DLRM(Model):
    """Dot products of all pairs of vectors, then an MLP (Naumov et al. 2019, arXiv:1906.00091).

    A float feature or more makes one more vector of them, by the bottom MLP. An id feature whose embedding_dim is not
    that of the vectors is brought to it by a matrix (mixed dimensions: Ginart et al. 2019, arXiv:1909.11810).
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
        # Made once for each type that vectors come in, which autocast may change.
        self._pairs: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self._like: str | None = None  # computes as on such a device
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
        stacked = torch.stack(vectors, dim=1)  # [rows, vectors, dim]
        device = stacked.device.type
        if (self._like or device) == "cuda" and torch.is_autocast_enabled(device):
            stacked = stacked.to(torch.get_autocast_dtype(device))  # and so are its gradient's products
        dots = _PairwiseDots.apply(stacked, *self._picks(stacked))
        kept = [stacked.flatten(1)] if self.keep_vectors else vectors[:1] if self.bottom is not None else []
        return self.top(torch.cat([*kept, dots], dim=1)).squeeze(1)

    def rehearse(self, device: torch.device) -> None:
        self._like = device.type

    def _picks(self, stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = stacked.dtype, stacked.device
        if stacked.shape[1] > _MOST_BY_MATRIX or (self._like or stacked.device.type) != "cpu":
            return stacked.new_zeros(0), stacked.new_zeros(0)
        if key not in self._pairs:
            self._pairs[key] = _pairs(stacked.shape[1], *key)
        return self._pairs[key]
