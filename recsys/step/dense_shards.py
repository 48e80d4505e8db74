"""The dense part's optimizer shared out over the ranks (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054).

Every rank holds all weights and all averaged gradients, as without. But it trains a slice of the weights alone, and
keeps the optimizer's state of that alone; then each sends its slice to the others. Optimizers that compute each number
by itself learn the same to the last bit.
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

_ALIGNED = 128  # numbers: parameters begin at multiples of 512 bytes, as where CUDA's allocator gives each its own
_AT_ONCE = 16  # numbers of the widest registers: kernels round what is left behind these otherwise, at a cut too


@dataclass(frozen=True)
class Layout:
    """Where parameters lie in one tensor, and which rank trains what of it.

    Attributes:
        shapes: of the parameters, in order. starts: the first place of each, and the end of the last.
        cuts: between ranks, from (0, 0) on: a parameter's number, and the first of its rows behind the cut.
    """

    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], num_ranks: int) -> "Layout":
        """Cut parameters between rows, so that all ranks have as many numbers as that allows."""
        sizes = (-(-shape.numel() // _ALIGNED) * _ALIGNED for shape in shapes)
        starts = tuple(accumulate(sizes, initial=0))
        targets = (starts[-1] * rank // num_ranks for rank in range(1, num_ranks))
        cuts = (_nearest_cut(shapes, starts, target) for target in targets)
        return cls(tuple(shapes), starts, ((0, 0), *cuts, (len(shapes), 0)))

    def slices(self, rank: int) -> list[tuple[int, int, int]]:
        """Return what a rank trains: (parameter, first row, row behind the last), none of them empty."""
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
        """Return how many numbers of the tensor each rank sends, in order."""
        at = [self.starts[number] + row * _width(self.shapes, number) for number, row in self.cuts]
        return [stop - start for start, stop in pairwise(at)]


def num_rows(shape: torch.Size) -> int:
    """Return how many rows a parameter has; of one number, one."""
    return shape[0] if shape else 1


def _width(shapes: Sequence[torch.Size], number: int) -> int:
    return shapes[number][1:].numel() if number < len(shapes) else 0


def _nearest_cut(shapes: Sequence[torch.Size], starts: Sequence[int], target: int) -> tuple[int, int]:
    number = bisect_right(starts, target) - 1
    if number == len(shapes):
        return number, 0
    width = max(1, _width(shapes, number))
    unit = _AT_ONCE // math.gcd(width, _AT_ONCE)
    row = round((target - starts[number]) / width / unit) * unit
    return (number, row) if row < num_rows(shapes[number]) else (number + 1, 0)


def shards_dense(config: Config, num_ranks: int) -> bool:
    """Return whether the dense part's optimizer is shared out: one rank has nobody to share with."""
    return config.train.dense_sharding is DenseSharding.optimizer and num_ranks > 1


class DenseShards:
    """The parameters of a model as parts of one tensor, of which this rank trains a slice.

    Args:
        model: its parameters are moved into the tensor.

    Attributes:
        slices: rows of parameters, as parameters for this rank's optimizer; of each the whole one, and its first row.

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
        # A model may have none: one that adds up what its tables give.
        whole = torch.empty(layout.starts[-1], device=parameters[0].device if parameters else None)
        for parameter, start in zip(parameters, layout.starts, strict=False):
            place = whole[start : start + parameter.numel()].view(parameter.shape)
            parameter.data = place.copy_(parameter.detach())
        self._by_rank = whole.split(layout.sizes())
        self.slices: dict[torch.Tensor, tuple[torch.Tensor, int]] = {
            nn.Parameter(_rows(parameters[number].detach(), first, stop)): (parameters[number], first)
            for number, first, stop in layout.slices(rank)
        }

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer of `slices` take a step, and exchange what it has changed; collective."""
        for own, (whole, first) in self.slices.items():
            own.grad = None if whole.grad is None else _rows(whole.grad, first, first + num_rows(own.shape))
        optimizer.step()
        optimizer.zero_grad()
        # One message from each rank, as ranks do not have exactly as much; in place, so that it takes no memory.
        sent = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(self._by_rank) if part.numel()]
        for message in sent:
            message.wait()


def _rows(tensor: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    return tensor[first:stop] if tensor.dim() else tensor
