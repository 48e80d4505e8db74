"""What a model and its loss look like to the training step."""

from typing import Any

import torch
from torch import nn

from recsys.data.batch import Batch

# By feature a vector for each row, [rows, embedding_dim], or for each id of each row's list.
Vectors = dict[str, Any]


class Task(nn.Module):
    """A dense model and its loss.

    Attributes:
        model: maps (vectors by feature: [rows, embedding_dim], or a JaggedTensor with a vector for each id; floats
            [rows, float features]) to a tensor or tuple of tensors whose first dimension is rows.
        loss_by_rows: the loss of a batch is the sum of the losses of its parts.
    """

    model: nn.Module
    loss_by_rows = True

    def loss(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
        """Return the sum over this rank's rows of weight times loss, a scalar; rows of weight 0 add nothing."""
        raise NotImplementedError

    def rehearse(self, device: torch.device) -> None:
        """Compute from now on only what shows the peak of memory that a step has on `device`; for fake tensors."""
