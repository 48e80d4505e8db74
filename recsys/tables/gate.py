"""The gate between the gradients that come back to a rank's tables and the update of these."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Cut(torch.autograd.Function):
    """A tensor as it is, whose gradient is handed to a function and goes no further."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, vectors: torch.Tensor, take: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Return `vectors`; the first argument is to require a gradient, so that autograd comes here."""
        ctx.take = take
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        """Hand the gradient over."""
        ctx.take(gradients[0])
        return None, None, None


class UpdateGate:
    """Keeps gradients from the tables on this rank until it is opened.

    FBGEMM updates tables as soon as a gradient comes in. Here it waits after the exchange over the ranks, so that this
    need not wait for what the ranks have to agree on first.
    """

    def __init__(self) -> None:
        # Edges in place of tensors: what was looked up for all ranks is large, and not read after its exchange.
        self._waiting: list[tuple[GradientEdge, list[torch.Tensor]]] = []

    def guard(self, kernels: nn.Module) -> None:
        """Hook the local lookups so that their output gradients are held until `open`."""
        kernels.register_forward_hook(self._cut)

    def _cut(self, _: nn.Module, __: object, found: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and found.requires_grad):
            return found
        gradients: list[torch.Tensor] = []
        self._waiting.append((get_gradient_edge(found), gradients))
        cut: torch.Tensor = Cut.apply(found.new_empty(0, requires_grad=True), found.detach(), gradients.append)
        return cut

    def open(self, scale: float) -> None:
        """Let the gradients that have come in update the tables, times `scale`."""
        edges = [edge for edge, gradients in self._waiting if gradients]
        gradients = [gradient for _, gradients in self._waiting for gradient in gradients]
        self.close()
        if not edges:
            return
        if scale != 1:
            gradients = list(torch._foreach_mul(gradients, scale))  # not in place, for two may be the same tensor
        torch.autograd.backward(edges, gradients)

    def close(self) -> None:
        """Forget the gradients that have come in."""
        self._waiting = []
