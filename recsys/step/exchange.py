"""What ranks exchange in a step, and in which order.

lookup             ids to the ranks that hold the rows, vectors back       while the step before is computed
factors of tasks   one sum for each task's weights                         only with several tasks
dense part         forward and backward, micro-batch by micro-batch        nothing is exchanged
gradients          of the dense part, with totals among them: `Totals`     on GPUs in buckets, as they become ready with
                                                                           the last micro-batch; on CPUs as one tensor
gradients          by looked-up vectors, to the ranks that hold the rows   while those are under way, on GPUs while the
                                                                           host waits for the totals
totals are read (`agree`): is the step finite everywhere? Then, and on all ranks alike:
updates            of the dense part, of replicated tables, of tables      nothing is exchanged but for the second

Without `train.check_every_step` totals are read a step later: updates ask them on their device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recsys.data.batch import Batch
from recsys.data.pool import Fence
from recsys.models.base import Vectors

_SMALL = 1 << 18  # numbers that a rank sends to all others together
LEAST_WEIGHT = 1e-27  # of a step: a mean over less, of as many rows as there may be, is beyond FP32
_DIGIT = 1 << 12  # a number of rows travels in two digits, since FP32 counts to 2^24


@dataclass(frozen=True)
class Totals:
    """What a step sums over all ranks, in FP32.

    Attributes:
        loss, weight: the sum over rows, and what it is divided by.
        num_bad, num_stops, num_publishes: ranks that are not finite, that ask to stop, and to publish.
        num_rows, num_bad_rows: of the global batch, as in `Batch`.
        task_losses: where there are several tasks, their shares of the loss.
    """

    SIZE = 8  # beside the tasks
    WEIGHT, NUM_BAD = 1, 2  # their places

    loss: float
    weight: float
    num_bad: float
    num_stops: int
    num_publishes: int
    num_rows: int
    num_bad_rows: int
    task_losses: tuple[float, ...]

    @staticmethod
    def pack(
        loss: torch.Tensor,
        weight: torch.Tensor,
        batch: Batch,
        is_finite: torch.Tensor,
        stops: bool,
        publishes: bool,
        task_losses: torch.Tensor,
    ) -> torch.Tensor:
        """Return what this rank adds, [SIZE + tasks]."""
        counts = [
            float(stops + _DIGIT * publishes),
            *divmod(batch.num_rows, _DIGIT),
            *divmod(batch.num_bad_rows, _DIGIT),
        ]
        sums = torch.stack([loss, weight, (~is_finite).float()])
        return torch.cat([sums, filled(counts, sums), task_losses])

    @staticmethod
    def unpack(sums: Sequence[float]) -> "Totals":
        """Return the totals of the sums over all ranks of what `pack` gave."""
        loss, weight, num_bad, asked, *digits = sums[: Totals.SIZE]
        num_publishes, num_stops = divmod(round(asked), _DIGIT)
        high, low, bad_high, bad_low = map(round, digits)
        rows = high * _DIGIT + low, bad_high * _DIGIT + bad_low
        return Totals(loss, weight, num_bad, num_stops, num_publishes, *rows, tuple(sums[Totals.SIZE :]))


class Replica(nn.Module):
    """The model with one more parameter, `sums`, whose gradient DistributedDataParallel exchanges with the others."""

    def __init__(self, model: nn.Module, sums: nn.Parameter) -> None:
        super().__init__()
        self.model, self.sums = model, sums

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> Any:
        """Return what the model gives."""
        return self.model(vectors, floats)


class JoinedGradients:
    """Gradients of parameters as parts of one tensor, which one message sums over the ranks of CPUs.

    DistributedDataParallel has a hook on each parameter, and sends buckets while the backward pass goes on. That pays
    on GPUs. Here an exchange takes the cores that compute, and few numbers are better sent by `SumOverRanks`.

    Args:
        parameters: each rank then has the values of rank 0. Collective.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._wholes: list[torch.Tensor] = []
        self._parts: list[tuple[nn.Parameter, torch.Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            own = [parameter for parameter in parameters if parameter.dtype == dtype]
            self._wholes.append(own[0].new_zeros(sum(parameter.numel() for parameter in own)))
            parts = self._wholes[-1].split([parameter.numel() for parameter in own])
            self._parts += [(parameter, part.view(parameter.shape)) for parameter, part in zip(own, parts, strict=True)]
        for parameter in parameters:
            dist.broadcast(parameter.detach(), 0)

    def clear(self) -> None:
        """Set all gradients to 0; backward passes then add to them."""
        torch._foreach_zero_(self._wholes)
        for parameter, part in self._parts:
            parameter.grad = part

    def send(self) -> "list[SumOverRanks]":
        """Let all become means over the ranks, once what is returned has been waited for; collective."""
        torch._foreach_div_(self._wholes, dist.get_world_size())
        return [SumOverRanks(whole) for whole in self._wholes]


class SumOverRanks:
    """The sum of a tensor over all ranks, on its way into its place. Collective.

    gloo's all-reduce goes round the ranks by segments: 1.4 ms on two ranks and 6.6 on four, for a thousand numbers as
    for a hundred thousand. A message from each to each takes .3 and 1.5, so few numbers go this way. They are added in
    the order of the ranks: on all of them alike, and by one operation after the other, which each CPU does alike.

    Args:
        tensor: contiguous, of any device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, ranks = tensor.view(-1), dist.get_world_size()
        self._parts: torch.Tensor | None = None
        if tensor.is_cuda or tensor.numel() * ranks > _SMALL:
            self._work = dist.all_reduce(tensor, async_op=True)
            return
        self._parts = tensor.new_empty(ranks, tensor.numel())
        self._work = dist.all_to_all_single(self._parts.view(-1), self._tensor.repeat(ranks), async_op=True)

    def wait(self) -> None:
        """Wait until the sum is in the place of the tensor."""
        self._work.wait()
        if self._parts is not None:
            self._tensor.copy_(self._parts[0])
            for part in self._parts[1:]:
                self._tensor.add_(part)


class Agreement:
    """The sums over all ranks of what `Totals.pack` gave, on their device and on their way to the host.

    Args:
        totals: the sums. dense_gradients: of the dense part, over all ranks; they count among what is bad.
    """

    def __init__(self, totals: torch.Tensor, dense_gradients: list[torch.Tensor]) -> None:
        is_bad = totals.new_zeros(1)
        if totals.is_cuda and dense_gradients:  # there may be none, of a dense part without parameters
            is_bad = (~all_finite(dense_gradients)).float()[None]
        elif dense_gradients:
            # All of them in one operation, which a factor of 1 leaves as they are. CUDA's has no BF16.
            torch._amp_foreach_non_finite_check_and_unscale_(dense_gradients, is_bad, totals.new_ones(1))
        # One tensor, for one copy from the GPU into page-locked memory: what a GPU is given after it is not waited for.
        self._sums = torch.cat([totals, is_bad])
        self._copied, self._fence = self._sums.to("cpu", non_blocking=True), Fence()
        if totals.is_cuda:
            self._fence.record()

    def wait(self) -> Totals:
        """Return the totals on the host, once they are there."""
        self._fence.wait()
        *numbers, is_bad = self._copied.tolist()
        unpacked = Totals.unpack(numbers)
        return replace(unpacked, num_bad=unpacked.num_bad + is_bad)

    def is_bad(self) -> torch.Tensor:
        """Return whether a step is to be left out, as a bool tensor of no dimensions on the device: something is not
        finite on some rank, or its weights add up to too little."""
        weight = self._sums[Totals.WEIGHT]
        return (self._sums[Totals.NUM_BAD] + self._sums[-1] > 0) | ((weight > 0) & (weight < LEAST_WEIGHT))

    def over_weight(self, number: float) -> torch.Tensor:
        """Return a number over the sum of weights, 0 where that is 0, of no dimensions on the device."""
        weight = self._sums[Totals.WEIGHT]
        return torch.where(weight == 0, 0.0, number / weight)


def agree(sums: nn.Parameter, dense_gradients: list[torch.Tensor]) -> Agreement:
    """Return the sums over all ranks, of which means have been made."""
    assert sums.grad is not None
    return Agreement(sums.grad * dist.get_world_size(), dense_gradients)


def filled(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of numbers, of the type and device of another; a copy from the host would be waited for."""
    return torch.cat([like.new_full((1,), number) for number in numbers])


def all_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return whether all values are finite, as a bool tensor of no dimensions."""
    # A sum is finite exactly if all values are (and it does not overflow). A GPU takes all the norms of absolute values
    # at once; on CPUs they take 18 times as long as plain sums, which what is not finite makes so as well.
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return torch.isfinite(torch.stack([t.sum() for t in tensors] if on_cpu else torch._foreach_norm(tensors, 1))).all()
