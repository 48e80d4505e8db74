"""DLRM ranker with binary cross-entropy."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import DLRMConfig
from recsys.config.choices import Interaction
from recsys.data.batch import Batch
from recsys.models.base import Task, Vectors
from recsys.models.blocks import RowDropout, mlp, row_of_each_id, sum_by_row
from recsys.tables.module_names import module_name

_MOST_BY_MATRIX = 48  # vectors: the matrix has about half their number to the power of 4 elements, here 10 MiB


class _PairwiseDots(torch.autograd.Function):
    """The dot products of all pairs of a row's vectors, below the diagonal.

    Autograd's own backward takes two batched products where one is enough, since the products are symmetric, and picks
    the pairs by indices, which takes longer than multiplying by a matrix of zeros and ones, unless that is large.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(vectors)
        n, products = vectors.shape[1], torch.bmm(vectors, vectors.transpose(1, 2))
        if n > _MOST_BY_MATRIX:
            rows, columns = torch.tril_indices(n, n, offset=-1, device=vectors.device)
            return products[:, rows, columns]
        return products.flatten(1) @ _pairs(n, vectors.dtype, vectors.device)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (vectors,) = ctx.saved_tensors
        n, gradient = vectors.shape[1], gradient.to(vectors.dtype)  # under autocast it comes in its type
        if n > _MOST_BY_MATRIX:
            rows, columns = torch.tril_indices(n, n, offset=-1, device=vectors.device)
            both = gradient.new_zeros(len(gradient), n, n)
            both[:, rows, columns] = gradient
            both[:, columns, rows] = gradient
        else:
            both = (gradient @ _pairs(n, vectors.dtype, vectors.device)[1]).view(-1, n, n)
        return torch.bmm(both, vectors)


@lru_cache(maxsize=8)
def _pairs(n: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what picks the entries below the diagonal, [n * n, pairs], and what puts them on both of its sides."""
    rows, columns = torch.tril_indices(n, n, offset=-1, device=device)
    numbers = torch.arange(len(rows), device=device)
    picked, spread = torch.zeros(2, n * n, len(rows), dtype=dtype, device=device)
    picked[rows * n + columns, numbers] = 1
    spread[rows * n + columns, numbers] = spread[columns * n + rows, numbers] = 1
    return picked, spread.T.contiguous()


def forget_constants() -> None:
    """Drop the matrices that are kept between steps, so that fake ones never meet real tensors."""
    _pairs.cache_clear()


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


class DLRM(nn.Module):
    """Dot products of all pairs of vectors, then an MLP (Naumov et al. 2019, arXiv:1906.00091).

    Args:
        config: its `attention` names the features that come as a vector for each id of a list.
        dims: embedding_dim of the id features, in order. Where it is not that of the vectors, a matrix makes it so
            (mixed dimensions: Ginart et al. 2019, arXiv:1909.11810).
        num_floats: float features; with any, the bottom MLP makes one more vector of them.
    """

    def __init__(self, config: DLRMConfig, dims: dict[str, int], num_floats: int) -> None:
        super().__init__()
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
        self.top = mlp(num_pairs + num_kept * dim, config.top_mlp, 1, config.dropout)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits [rows]."""
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
        dots = _PairwiseDots.apply(stacked)
        kept = [stacked.flatten(1)] if self.keep_vectors else vectors[:1] if self.bottom is not None else []
        return self.top(torch.cat([*kept, dots], dim=1)).squeeze(1)


class RankingTask(Task):
    """Binary cross-entropy of a ranker's logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
        assert isinstance(outputs, torch.Tensor)
        return F.binary_cross_entropy_with_logits(outputs, batch.labels, batch.weights, reduction="sum")
