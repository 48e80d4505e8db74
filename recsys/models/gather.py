"""Rows of all ranks, for losses that compare them."""

from typing import Any

import torch
import torch.distributed as dist

from recsys.data.batch import Batch


def first_ids(batch: Batch, feature: str) -> torch.Tensor:
    """Return the first table row of each list of a feature, -1 where it is empty: [rows] integers."""
    jagged = batch.ids[feature]
    padded = torch.cat([jagged.values(), jagged.values().new_full((1,), -1)])
    first = jagged.offsets()[:-1].long().clamp(max=len(padded) - 1)
    return torch.where(jagged.lengths() > 0, padded[first], -1)


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in order of rank; the gradient of a row is summed over the ranks that used it."""
    gathered: torch.Tensor = _GatherRows.apply(rows)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, which have as many each, in order of rank."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)
