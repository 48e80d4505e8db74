"""The gate between the gradients that come back to a rank's tables and the update of these."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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
        self._on_their_way: list[dist.Work] = []

    def wait_for(self, exchange: dist.Work) -> None:
        """Take note that gradients are not there before an exchange is done."""
        self._on_their_way.append(exchange)

    def guard(self, kernels: nn.Module) -> None:
        """Hook the local lookups so that their output gradients are held until `open`."""
        kernels.register_forward_hook(lambda _, __, found: self.cut(found))

    def cut(self, found: torch.Tensor) -> torch.Tensor:
        """Return what a local lookup gives, with its gradient held until `open`."""
        if not (torch.is_grad_enabled() and found.requires_grad):
            return found
        gradients: list[torch.Tensor] = []
        self._waiting.append((get_gradient_edge(found), gradients))
        cut: torch.Tensor = Cut.apply(found.new_empty(0, requires_grad=True), found.detach(), gradients.append)
        return cut

    def open(self, scale: float | torch.Tensor, is_bad: torch.Tensor | None = None) -> None:
        """Let the gradients that have come in update the tables, as `scaled` makes them."""
        edges = [edge for edge, gradients in self._waiting if gradients]
        gradients = [gradient for _, gradients in self._waiting for gradient in gradients]
        self.close()
        if not edges:
            return
        torch.autograd.backward(edges, scaled(gradients, scale, is_bad))

    def close(self) -> None:
        """Forget the gradients that have come in."""
        for exchange in self._on_their_way:
            exchange.wait()
        self._waiting, self._on_their_way = [], []


def scaled(
    gradients: list[torch.Tensor], scale: float | torch.Tensor, is_bad: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return gradients times a number, and 0 in their place where `is_bad`, a bool tensor of no dimensions."""
    if not isinstance(scale, torch.Tensor) and scale == 1:
        return gradients
    products = list(torch._foreach_mul(gradients, scale))  # not in place, for two may be the same tensor
    return products if is_bad is None else [product.masked_fill_(is_bad, 0) for product in products]
