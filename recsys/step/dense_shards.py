"""The optimizer of the dense part, sharded over the ranks (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054).

Every rank still holds all weights and all averaged gradients. But it keeps the optimizer's state for only a slice of
the weights, updates this slice, and sends it to the other ranks. Optimizers that update each element independently
learn the same to the last bit.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import nn

from recsys.config import Config
from recsys.config.choices import DenseSharding
from recsys.errors import UserError

_ALIGNED = 128  # numbers: parameters begin at multiples of 512 bytes, as blocks of CUDA's allocator do
_LANES = 16  # of the widest registers: kernels round a remainder differently, so slices are cut at multiples


@dataclass(frozen=True)
class Layout:
    """Where parameters lie in one buffer, and which slice of it each rank trains.

    Attributes:
        shapes: those of the parameters, in order. starts: where each begins, and the end of the last.
        cuts: between ranks, from (0, 0) on: index of a parameter, and its first row after the cut.
    """

    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], num_ranks: int) -> "Layout":
        """Return the layout whose cuts, between rows of parameters, give ranks slices as equal as possible."""
        sizes = (-(-shape.numel() // _ALIGNED) * _ALIGNED for shape in shapes)
        starts = tuple(accumulate(sizes, initial=0))
        targets = (starts[-1] * rank // num_ranks for rank in range(1, num_ranks))
        cuts = (_nearest_cut(shapes, starts, target) for target in targets)
        return cls(tuple(shapes), starts, ((0, 0), *cuts, (len(shapes), 0)))

    def slices(self, rank: int) -> list[tuple[int, int, int]]:
        """Return the slices of a rank: (parameter, first row, row after the last), none of them empty."""
        (first, row), (last, stop) = self.cuts[rank : rank + 2]
        slices = []
        for number in range(first, min(last + 1, len(self.shapes))):
            rows = num_rows(self.shapes[number])
            slices.append((number, row if number == first else 0, stop if number == last else rows))
        return [cut for cut in slices if cut[1] < cut[2]]

    def shape(self, rows: tuple[int, int, int]) -> torch.Size:
        """Return the shape of a slice."""
        number, first, stop = rows
        shape = self.shapes[number]
        return torch.Size((stop - first, *shape[1:])) if shape else shape

    def sizes(self) -> list[int]:
        """Return how many elements of the buffer each rank trains, in order."""
        at = [self.starts[number] + row * _width(self.shapes, number) for number, row in self.cuts]
        return [stop - start for start, stop in pairwise(at)]


def num_rows(shape: torch.Size) -> int:
    """Return how many rows a parameter has; a scalar has one."""
    return shape[0] if shape else 1


def _width(shapes: Sequence[torch.Size], number: int) -> int:
    return shapes[number][1:].numel() if number < len(shapes) else 0


def _nearest_cut(shapes: Sequence[torch.Size], starts: Sequence[int], target: int) -> tuple[int, int]:
    number = bisect_right(starts, target) - 1
    if number == len(shapes):
        return number, 0
    width = max(1, _width(shapes, number))
    unit = _LANES // math.gcd(width, _LANES)
    row = round((target - starts[number]) / width / unit) * unit
    return (number, row) if row < num_rows(shapes[number]) else (number + 1, 0)


def shards_dense(config: Config, num_ranks: int) -> bool:
    """Return whether the dense part's optimizer is sharded, which needs more than one rank."""
    return config.train.dense_sharding is DenseSharding.optimizer and num_ranks > 1


class DenseShards:
    """The parameters of a model as views of one buffer, of which this rank trains a slice.

    Args:
        model: its parameters are moved into the buffer.

    Attributes:
        slices: for each slice, which is a parameter of this rank's optimizer: the model's parameter, and the first row.

    Raises:
        UserError: a parameter is not FP32.
    """

    def __init__(self, model: nn.Module, rank: int, num_ranks: int) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if others := {str(parameter.dtype) for parameter in parameters if parameter.dtype != torch.float32}:
            raise UserError(
                f"config key 'train.dense_sharding': a model's parameters must be torch.float32, found {min(others)}; "
                f"set it to none"
            )
        layout = Layout.of([parameter.shape for parameter in parameters], num_ranks)
        # A model without parameters only adds up vectors of its tables.
        buffer = torch.empty(layout.starts[-1], device=parameters[0].device if parameters else None)
        for parameter, start in zip(parameters, layout.starts, strict=False):
            view = buffer[start : start + parameter.numel()].view(parameter.shape)
            parameter.data = view.copy_(parameter.detach())
        self._by_rank = buffer.split(layout.sizes())
        self.slices: dict[torch.Tensor, tuple[torch.Tensor, int]] = {
            nn.Parameter(_rows(parameters[number].detach(), first, stop)): (parameters[number], first)
            for number, first, stop in layout.slices(rank)
        }

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run a step of the optimizer of `slices`, and send the changed slices to all ranks; collective."""
        for own, (parameter, first) in self.slices.items():
            gradient = parameter.grad
            own.grad = None if gradient is None else _rows(gradient, first, first + num_rows(own.shape))
        optimizer.step()
        optimizer.zero_grad()
        # A broadcast for each rank, since slices differ in size; in place, so that it takes no memory.
        slices = enumerate(self._by_rank)
        broadcasts = [dist.broadcast(values, rank, async_op=True) for rank, values in slices if values.numel()]
        for broadcast in broadcasts:
            broadcast.wait()


def _rows(tensor: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    return tensor[first:stop] if tensor.dim() else tensor
