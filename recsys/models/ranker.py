"""DLRM ranker with binary cross-entropy."""

import torch
import torch.nn.functional as F
from torch import nn

from recsys.config import DLRMConfig
from recsys.config.schema import Interaction
from recsys.data.batch import Batch
from recsys.models.task import Pooled, RowDropout, Task, mlp


class DLRM(nn.Module):
    """Dot products of all pairs of vectors, then an MLP (Naumov et al. 2019, arXiv:1906.00091).

    Args:
        features: id features, in order; each gives a vector of `dim`.
        num_floats: float features; with any, the bottom MLP makes one more vector of them.
    """

    def __init__(self, config: DLRMConfig, features: list[str], num_floats: int, dim: int) -> None:
        super().__init__()
        self.features = features
        self.bottom = mlp(num_floats, config.bottom_mlp, dim, config.dropout) if num_floats else None
        self.embedding_dropout = RowDropout(config.embedding_dropout)
        num_vectors = len(features) + (num_floats > 0)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.keep_vectors = config.interaction is Interaction.dot_and_embeddings
        num_kept = num_vectors if self.keep_vectors else int(num_floats > 0)
        self.top = mlp(num_pairs + num_kept * dim, config.top_mlp, 1, config.dropout)

    def forward(self, pooled: Pooled, floats: torch.Tensor) -> torch.Tensor:
        """Return logits [rows]."""
        embeddings = self.embedding_dropout(torch.cat([pooled[name] for name in self.features], dim=1))
        vectors = list(embeddings.chunk(len(self.features), dim=1))
        if self.bottom is not None:
            vectors.insert(0, self.bottom(floats))
        stacked = torch.stack(vectors, dim=1)  # [rows, vectors, dim]
        # No buffer: DistributedDataParallel would broadcast it at every step.
        pairs = torch.tril_indices(len(vectors), len(vectors), offset=-1, device=stacked.device)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, pairs[0], pairs[1]]
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
