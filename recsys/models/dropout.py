"""Dropout whose masks do not depend on the number of ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recsys.runtime.counter_random import make_key
from recsys.runtime.uniform import kept
from recsys.tables.module_names import parameter_name


class RowDropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, layer, row of the global batch, column).

    torch's own dropout draws from the rank's generator, so the number of ranks would change what is learned.
    `set_dropout_keys` must be called before each training step.

    Args:
        p: the share of elements that are dropped. relu: negative ones become 0 too; in training, x may be overwritten.
    """

    def __init__(self, p: float, relu: bool = False) -> None:
        super().__init__()
        self.p, self.relu = p, relu
        self.key = 0
        self.rows = torch.zeros(0)  # their places in the global batch, int64

    def forward(self, x: torch.Tensor, row: torch.Tensor | None = None) -> torch.Tensor:
        """Zero elements of x, [rows, columns], with probability p, and scale the rest by 1 / (1 - p).

        Args:
            row: for each row of x, the row whose mask it uses, [len(x)]; default: x has all rows, in order.
        """
        if self.share == 1:
            return nn.functional.relu(x, inplace=self.training) if self.relu else x
        mask = self._mask(x)
        scaled: torch.Tensor = _Kept.apply(x, mask if row is None else mask[row], self.share, self.relu)
        return scaled

    @property
    def share(self) -> float:
        """Share of elements that are kept, by which these are divided."""
        return 1 - self.p if self.training else 1.0

    def without_autograd(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of `forward` with `relu` and dropped elements, without a gradient.

        The gradient of x is that of the result, divided by `share`, where the result is above 0, and 0 elsewhere.
        """
        return _dropped(x, self._mask(x), self.share, relu=True)

    def _mask(self, x: torch.Tensor) -> torch.Tensor:
        """Return which elements of x are kept, [rows, columns] bool."""
        return kept(self.key, self.rows, torch.arange(x.shape[1], device=x.device), self.p)


def _dropped(x: torch.Tensor, mask: torch.Tensor, share: float, relu: bool) -> torch.Tensor:
    result = mask.to(x.dtype).mul_(x)
    return (result.relu_() if relu else result).div_(share)


class _Kept(torch.autograd.Function):
    """Elements where the mask is true divided by `share`, and 0 elsewhere; with `relu`, 0 for negative ones too.

    Torch's product of numbers and a mask converts the mask to numbers first; here the result takes their memory. With
    `relu` the gradient needs nothing but the result, which the next layer keeps anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, share: float, relu: bool) -> torch.Tensor:
        result = _dropped(x, mask, share, relu)
        ctx.save_for_backward(result if relu else mask)
        ctx.share, ctx.relu = share, relu
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (saved,) = ctx.saved_tensors
        if ctx.relu:
            return torch.ops.aten.threshold_backward(gradient, saved, 0).div_(ctx.share), None, None, None
        return saved.to(gradient.dtype).mul_(gradient).div_(ctx.share), None, None, None


def dropouts(model: nn.Module) -> dict[str, RowDropout]:
    """Return the layers of a model that drop elements, by name."""
    # These names are those of earlier versions, so that earlier runs draw the same masks.
    return {
        f"module.{parameter_name(name)}": module
        for name, module in model.named_modules()
        if isinstance(module, RowDropout) and module.p > 0
    }


def set_dropout_keys(layers: Mapping[str, RowDropout], seed: int, step: int, rows: torch.Tensor) -> None:
    """Set the keys and rows by which `layers`, a result of `dropouts`, draw their masks in a step.

    Args:
        step: any number that no two steps share. rows: places of the rows in the global batch, int64.
    """
    for name, layer in layers.items():
        layer.key, layer.rows = make_key(seed, "dropout", step, name), rows
