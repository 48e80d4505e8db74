"""What a model and its loss look like to the training step."""

from collections.abc import Sequence

import torch
from torch import nn

from recsys.data.batch import Batch

Pooled = dict[str, torch.Tensor]


class Task(nn.Module):
    """A dense model and its loss.

    Attributes:
        model: maps (pooled embeddings by feature, each [rows, embedding_dim]; floats [rows, float features]) to a
            tensor or tuple of tensors whose first dimension is rows. Training wraps it in DistributedDataParallel.
    """

    model: nn.Module

    def loss(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
        """Return the sum over this rank's rows of weight times loss, a scalar; rows of weight 0 add nothing."""
        raise NotImplementedError


def mlp(input_dim: int, hidden: Sequence[int], output_dim: int | None, dropout: float) -> nn.Sequential:
    """Return Linear-ReLU-Dropout layers of the hidden widths, then a plain Linear if there is an output width."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(input_dim, width), nn.ReLU(), nn.Dropout(dropout)]
        input_dim = width
    if output_dim is not None:
        layers.append(nn.Linear(input_dim, output_dim))
    return nn.Sequential(*layers)
