"""Gradients of parameters summed over the first half of a batch, then over the second, as two processes sum them.

Sums of floats follow their order. One process that adds up all rows at once is a rounding apart from two that have a
half each; optimizers that divide by a gradient's size, and layers with a kink, make 1e-4 of it within 100 steps.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_ELEMENTS_AT_ONCE = 1 << 20  # of a weight's gradient, so that a large one is not in memory twice


def sum_in_halves(model: nn.Module, world_size: int) -> None:
    """Have one process sum gradients of a model's linear layers in halves, and those of what has `num_parts`.

    Several processes get layers that sum in the same order. All are to read rows in the order of the batch, in FP32, on
    a CPU. What they give stays the same to the last bit.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear
        if hasattr(module, "num_parts"):
            module.num_parts = 2 if world_size == 1 else 1  # type: ignore[assignment]


def in_parts(function: Callable[..., torch.Tensor], num_parts: int, *rows: torch.Tensor) -> torch.Tensor:
    """Return what a function of rows gives, called for one part of them after the other.

    Gradients of what it reads beside them are then summed part by part.

    Args:
        num_parts: 1 or 2. rows: [rows, ...] each.
    """
    if not torch.is_grad_enabled():
        return function(*rows)
    if num_parts == 1:
        return function(*(each.view_as(each) for each in rows))  # gradients by them are summed by themselves too
    first, second = zip(*(each.split(_sizes(len(each), num_parts)) for each in rows), strict=True)
    return torch.cat([function(*first), function(*second)])


def _sizes(num_rows: int, num_parts: int) -> tuple[int, ...]:
    return (num_rows,) if num_parts == 1 else (num_rows // 2, num_rows - num_rows // 2)


class _Linear(nn.Linear):
    num_parts = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        result: torch.Tensor = _LinearInParts.apply(x, self.weight, self.bias, self.num_parts)
        return result


class _LinearInParts(torch.autograd.Function):
    """`F.linear`; to split what it reads and to join what it gives would copy both."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_parts: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.num_parts = num_parts
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        sizes = _sizes(len(x), ctx.num_parts)
        gradients = [part.flatten(0, -2) for part in gradient.split(sizes)]
        inputs = [part.flatten(0, -2) for part in x.split(sizes)]
        return (
            gradient @ weight if of_x else None,
            _of_weight(gradients, inputs) if of_weight else None,
            sum(part.sum(0) for part in gradients) if of_bias else None,
            None,
        )


def _of_weight(gradients: list[torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of a weight, [outputs, inputs], by parts of the rows."""
    product = _product if gradients[0].shape[1] > 1 else _product_with_vector
    result = product(gradients[0], inputs[0])
    at_once = max(1, _ELEMENTS_AT_ONCE // len(result))
    for gradient, part in zip(gradients[1:], inputs[1:], strict=True):
        for first in range(0, result.shape[1], at_once):
            columns = slice(first, first + at_once)
            result[:, columns] += product(gradient, part[:, columns])
    return result


def _product(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return gradient.T @ inputs


def _product_with_vector(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the product for one output, summed in the same order by any number of threads; MKL's is not."""
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, len(inputs)))
    return torch.cat([(gradient * columns).sum(0, keepdim=True) for columns in inputs.split(at_once, dim=1)], dim=1)
