"""Columns of tensors that lie beside each other in memory, and rows that are picked out of tensors."""

from collections.abc import Sequence
from typing import Any

import torch


def beside(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors, [rows, width] each, where neighbours lie beside each other in memory as one; under no_grad."""
    joined: list[torch.Tensor] = []
    for tensor in tensors:
        if joined and not torch.compiler.is_compiling() and _continues(joined[-1], tensor):
            rows, width = joined[-1].shape
            joined[-1] = joined[-1].as_strided((rows, width + tensor.shape[1]), tensor.stride())
        else:
            joined.append(tensor)
    return joined


def _continues(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.stride(), one.dtype, one.stride(1)) == (other.stride(), other.dtype, 1)
        and one.storage_offset() + one.shape[1] == other.storage_offset()
    )


class Columns(torch.autograd.Function):
    """A tensor cut into columns; the gradients by them are one without a copy where they lie beside each other."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, ...]:
        """Return tensors of some widths, in the memory of one, [rows, columns]."""
        return tensor.split(widths, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        joined = beside(gradients)
        return joined[0] if len(joined) == 1 else torch.cat(joined, dim=1), None


def take_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `tensor[rows]`, [n, ...], for rows of one dimension, int64 [n], with gradients summed in their order.

    On a CPU an index has its gradient summed by several threads in the order of chance, in seven times the time.
    """
    return tensor.index_select(0, rows) if tensor.device.type == "cpu" else tensor[rows]
