"""Layers that models share: MLPs, dropout that no number of ranks changes, sums over jagged lists."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.runtime.counter_random import make_key, uniform
from recsys.tables.module_names import parameter_name

WIDEST = 2**24  # of a layer


class RowDropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, layer, row of the global batch, column).

    torch's own draws from the rank's generator, so that the number of ranks would change what is learned.
    `set_dropout_keys` must be called before each training step.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.key = 0
        self.rows = torch.zeros(0)  # their places in the global batch, int64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zero elements of x, [rows, columns], with probability p, and scale the rest by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return x
        kept = uniform(self.key, self.rows, torch.arange(x.shape[1], device=x.device)) >= self.p
        return x * kept / (1 - self.p)


def set_dropout_keys(model: nn.Module, seed: int, step: int, rows: torch.Tensor) -> None:
    """Give every RowDropout of a model its key for some rows of a step.

    Args:
        step: any number that no two steps share. rows: their places in the global batch, int64.
    """
    for name, module in model.named_modules():
        if isinstance(module, RowDropout) and module.p > 0:
            # As the layer was called once, so that earlier runs draw the same masks.
            layer = f"module.{parameter_name(name)}"
            module.key, module.rows = make_key(seed, "dropout", step, layer), rows


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


def row_of_each_id(jagged: JaggedTensor) -> torch.Tensor:
    """Return the row that each id belongs to, [ids] int64."""
    rows = torch.arange(len(jagged.lengths()), device=jagged.lengths().device)
    return rows.repeat_interleave(jagged.lengths(), output_size=jagged.values().shape[0])


def sum_by_row(jagged: JaggedTensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weighted sums of the ids' vectors, [rows, width]; `factors` are further weights, [ids]."""
    values = jagged.values()
    for weights in (jagged.weights_or_none(), factors):
        if weights is not None:
            values = values * weights[:, None]
    return values.new_zeros(len(jagged.lengths()), values.shape[1]).index_add(0, row_of_each_id(jagged), values)
