"""How a few numbers of a step are summed over the ranks together with the gradients of the dense part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recsys.models.base import Vectors


class Replica(nn.Module):
    """What DistributedDataParallel takes for the model, so that the gradient of `sums` goes with the others."""

    def __init__(self, model: nn.Module, sums: nn.Parameter) -> None:
        super().__init__()
        self.model, self.sums = model, sums

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> Any:
        """Return what the model gives."""
        return self.model(vectors, floats)


class LastInBackward(torch.autograd.Function):
    """0, whose gradient by `parameter` is what a call gives, when all that is computed after this has its gradients.

    Autograd goes backward in the order of the forward pass, as far as dependencies leave it a choice.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return 0; `gradient` is called in the backward pass, and gives a tensor in the shape of `parameter`."""
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return what the call gives."""
        return ctx.gradient(), None
