"""What ranks exchange in a step, and in which order.

lookup             ids to the ranks that hold the rows, vectors back       while the step before is computed
factors of tasks   one sum for each task's weights                         only with several tasks
dense part         forward and backward, micro-batch by micro-batch        nothing is exchanged
gradients          of the dense part, with totals among them: `Totals`     on GPUs in buckets, as they become ready with
                                                                           the last micro-batch; on CPUs as one tensor
gradients          of looked-up vectors, to the ranks that hold the rows   while those are under way, on GPUs while the
                                                                           host waits for the totals
totals are read (`agree`): is the step finite everywhere? Then, and on all ranks alike:
updates            of the dense part, of replicated tables, of tables      the second sends gradients; the first, if it
                                                                           is sharded over ranks, sends weights

Without `train.check_every_step` totals are read a step later: updates use them on the device.
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

_SMALL = 1 << 18  # up to so many numbers over all ranks, each rank sends its own to each other rank
LEAST_WEIGHT = 1e-27  # sum of weights of a step: a mean by less, of as many rows as possible, would overflow FP32
_DIGIT = 1 << 12  # a number of rows is sent as two digits, since FP32 counts exactly to 2^24 only


@dataclass(frozen=True)
class Totals:
    """What a step sums over all ranks, in FP32.

    Attributes:
        loss, weight: the sums of losses and of `Model.denominator`; their ratio is the loss of the step.
        num_bad, num_stops, num_publishes: how many ranks have a step that is not finite, ask to stop, ask to publish.
        num_rows, num_bad_rows: of the global batch, as in `Batch`.
        task_losses: with several tasks, their shares of the loss; NaN for one whose label no row has.
    """

    SIZE = 8  # without the tasks
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
        """Return this rank's summands, FP32 [SIZE + tasks]."""
        counts = [
            float(stops + _DIGIT * publishes),
            *divmod(batch.num_rows, _DIGIT),
            *divmod(batch.num_bad_rows, _DIGIT),
        ]
        sums = torch.stack([loss, weight, (~is_finite).float()])
        return torch.cat([sums, filled(counts, sums), task_losses])

    @staticmethod
    def unpack(sums: Sequence[float]) -> "Totals":
        """Return the totals, given the sums over all ranks of the results of `pack`."""
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
        """Return the outputs of the model."""
        return self.model(vectors, floats)


@torch.no_grad()
def set_to_rank_zero(tensor: torch.Tensor) -> None:
    """Set a tensor of any layout to its values on rank 0; collective."""
    values = tensor.contiguous()  # the tensor itself, if it is
    dist.broadcast(values.view(-1).view(torch.uint8), 0)  # as bytes: gloo does not know all types
    if values is not tensor:
        tensor.copy_(values)


class JoinedGradients:
    """Gradients of parameters as views of one buffer for each type, summed over CPU ranks by one message each.

    DistributedDataParallel hooks each parameter and sends buckets during the backward pass, which pays on GPUs. On CPUs
    an exchange takes cores from the computation, and few numbers are sent faster by `SumOverRanks`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buffers: list[torch.Tensor] = []
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            of_type = [parameter for parameter in parameters if parameter.dtype == dtype]
            sizes = [parameter.numel() for parameter in of_type]
            self._buffers.append(of_type[0].new_zeros(sum(sizes)))
            views = self._buffers[-1].split(sizes)
            self._gradients += [(p, view.view(p.shape)) for p, view in zip(of_type, views, strict=True)]

    def clear(self) -> None:
        """Set all gradients to 0; backward passes then add to them."""
        torch._foreach_zero_(self._buffers)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def send(self) -> "list[SumOverRanks]":
        """Start to average the gradients over the ranks; return the exchanges to wait for; collective."""
        torch._foreach_div_(self._buffers, dist.get_world_size())
        return [SumOverRanks(buffer) for buffer in self._buffers]


class SumOverRanks:
    """A sum of a tensor over all ranks, in place, which runs until `wait`. Collective.

    gloo's all-reduce is a ring: it takes 1.4 ms on two ranks and 6.6 ms on four, for 1,000 numbers just as for 100,000.
    Messages from each rank to each take 0.3 and 1.5 ms, so few numbers are sent that way. They are added in the order
    of the ranks, one operation after another, so that all ranks get the same bits.

    Args:
        tensor: contiguous, on any device; replaced by the sum.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, ranks = tensor.view(-1), dist.get_world_size()
        self._by_rank: torch.Tensor | None = None
        if tensor.is_cuda or tensor.numel() * ranks > _SMALL:
            self._work = dist.all_reduce(tensor, async_op=True)
            return
        self._by_rank = tensor.new_empty(ranks, tensor.numel())
        self._work = dist.all_to_all_single(self._by_rank.view(-1), self._tensor.repeat(ranks), async_op=True)

    def wait(self) -> None:
        """Wait until the tensor holds the sum."""
        self._work.wait()
        if self._by_rank is not None:
            self._tensor.copy_(self._by_rank[0])
            for summand in self._by_rank[1:]:
                self._tensor.add_(summand)


class Agreement:
    """A step's `Totals` on their device, and their copy to the host, which runs until `wait`.

    Args:
        totals: sums over all ranks of `Totals.pack`. dense_gradients: means over all ranks; checked to be finite.
    """

    def __init__(self, totals: torch.Tensor, dense_gradients: list[torch.Tensor]) -> None:
        is_bad = totals.new_zeros(1)
        if totals.is_cuda and dense_gradients:  # a dense part without parameters has none
            is_bad = (~all_finite(dense_gradients)).float()[None]
        elif dense_gradients:
            # One operation for all of them; the factor of 1 leaves them unchanged. On CUDA it lacks BF16.
            torch._amp_foreach_non_finite_check_and_unscale_(dense_gradients, is_bad, totals.new_ones(1))
        # One tensor, so one copy into page-locked memory; the host waits for it, not for later work of the GPU.
        self._sums = torch.cat([totals, is_bad])
        self._on_host, self._fence = self._sums.to("cpu", non_blocking=True), Fence()
        if totals.is_cuda:
            self._fence.record()

    def wait(self) -> Totals:
        """Wait for the copy, and return the totals."""
        self._fence.wait()
        *sums, is_bad = self._on_host.tolist()
        totals = Totals.unpack(sums)
        return replace(totals, num_bad=totals.num_bad + is_bad)

    def is_bad(self) -> torch.Tensor:
        """Return whether to skip the step, as a bool tensor of no dimensions on the device: a loss or gradient of some
        rank is not finite, or the sum of weights is below `LEAST_WEIGHT`."""
        weight = self._sums[Totals.WEIGHT]
        return (self._sums[Totals.NUM_BAD] + self._sums[-1] > 0) | ((weight > 0) & (weight < LEAST_WEIGHT))

    def over_weight(self, number: float) -> torch.Tensor:
        """Return a number divided by the sum of weights, or 0 if that is 0, of no dimensions on the device."""
        weight = self._sums[Totals.WEIGHT]
        return torch.where(weight == 0, 0.0, number / weight)


def agree(sums: nn.Parameter, dense_gradients: list[torch.Tensor]) -> Agreement:
    """Return the agreement on a step, given `sums`, whose gradient is the mean over ranks of `Totals.pack`."""
    assert sums.grad is not None
    return Agreement(sums.grad * dist.get_world_size(), dense_gradients)


def filled(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return numbers as a tensor like another, filled on its device, since the host would wait for a copy."""
    return torch.cat([like.new_full((1,), number) for number in numbers])


def all_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return whether all values are finite, as a bool tensor of no dimensions."""
    # A sum of values that are not all finite is not finite either. A GPU computes all L1 norms in one kernel; on CPUs
    # plain sums take an eighteenth of their time. A sum that overflows counts as not finite.
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return torch.isfinite(torch.stack([t.sum() for t in tensors] if on_cpu else torch._foreach_norm(tensors, 1))).all()
