"""What a model and its loss look like to the training step."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from recsys.counter_random import make_key, uniform
from recsys.data.batch import Batch
from recsys.module_names import parameter_name

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


class RowDropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, layer, row of the global batch, column).

    torch's own draws from the rank's generator, so that the number of ranks would change what is learned.
    `set_dropout_keys` must be called before each training step.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.key = 0
        self.first_row = 0  # of this rank, in the global batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zero elements of x, [rows, columns], with probability p, and scale the rest by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return x
        rows = torch.arange(self.first_row, self.first_row + x.shape[0], device=x.device)
        kept = uniform(self.key, rows, torch.arange(x.shape[1], device=x.device)) >= self.p
        return x * kept / (1 - self.p)


def set_dropout_keys(model: nn.Module, seed: int, step: int, first_row: int) -> None:
    """Give every RowDropout of a model its key for one step; `step` is any number that no two steps share."""
    for name, module in model.named_modules():
        if isinstance(module, RowDropout) and module.p > 0:
            # As the layer was called once, so that earlier runs draw the same masks.
            layer = f"module.{parameter_name(name)}"
            module.key, module.first_row = make_key(seed, "dropout", step, layer), first_row


def checkpoint_mlps(model: nn.Module) -> None:
    """Let every MLP keep its input alone, and compute its layers again in the backward pass.

    Dropout draws the same masks again, since they are a function of the step and the row.
    """
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, preserve_rng_state=False),
        check_fn=lambda module: isinstance(module, nn.Sequential),
    )


def mlp(input_dim: int, hidden: Sequence[int], output_dim: int | None, dropout: float) -> nn.Sequential:
    """Return Linear-ReLU-Dropout layers of the hidden widths, then a plain Linear if there is an output width."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(input_dim, width), nn.ReLU(), RowDropout(dropout)]
        input_dim = width
    if output_dim is not None:
        layers.append(nn.Linear(input_dim, output_dim))
    return nn.Sequential(*layers)
