"""Columns of tensors that lie beside each other in memory, and rows that are picked out of tensors."""

from collections.abc import Sequence
from typing import Any

import torch


def beside(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors, [rows, width] each, where neighbours lie beside each other in memory as one; under no_grad."""
    if torch.compiler.is_compiling():
        return list(tensors)
    first: list[torch.Tensor] = []
    widths: list[int] = []
    before: tuple[Any, ...] | None = None
    end: int | torch.SymInt = 0
    for tensor in tensors:
        stride, offset, width = tensor.stride(), tensor.storage_offset(), tensor.shape[1]
        lies = tensor.untyped_storage()._cdata, stride, tensor.dtype
        if stride[1] == 1 and offset == end and lies == before:
            widths[-1] += width
        else:
            first.append(tensor)
            widths.append(width)
            before = lies
        end = offset + width
    return [
        tensor if width == tensor.shape[1] else tensor.as_strided((len(tensor), width), tensor.stride())
        for tensor, width in zip(first, widths, strict=True)
    ]


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
