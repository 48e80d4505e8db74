"""What ranks exchange in a step, and in which order.

lookup             ids to the ranks that hold the rows, vectors back       while the step before is computed
factors of tasks   one sum for each task's weights                         only with several tasks
dense part         forward and backward, micro-batch by micro-batch        nothing is exchanged
gradients          of the dense part, in buckets, as they become ready     with the last micro-batch
  └ totals         ride in the last bucket: see `Totals`, `LastInBackward`
gradients          by looked-up vectors, to the ranks that hold the rows   while the last bucket is under way,
                                                                           on GPUs while the host waits for the totals
totals are read (`agree`): is the step finite everywhere? Then, and on all ranks alike:
updates            of the dense part, of replicated tables, of tables      nothing is exchanged but for the second
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recsys.data.batch import Batch
from recsys.data.pool import Fence
from recsys.models.base import Vectors

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


def agree(sums: nn.Parameter, dense_gradients: list[torch.Tensor]) -> Callable[[], Totals]:
    """Return what waits for the sums over all ranks, which are on their way to the host; the gradients of the dense
    part, of all ranks, count among what is bad."""
    assert sums.grad is not None
    totals = sums.grad * dist.get_world_size()  # DistributedDataParallel gives means
    # One tensor, for one copy from the GPU, into page-locked memory: what a GPU is given after it is not waited for.
    gradients = dense_gradients or [totals.new_zeros(1)]  # of a dense part without parameters
    copied = torch.cat([totals, (~all_finite(gradients)).float()[None]]).to("cpu", non_blocking=True)
    fence = Fence()
    if totals.is_cuda:
        fence.record()

    def wait() -> Totals:
        fence.wait()
        *numbers, is_bad = copied.tolist()
        unpacked = Totals.unpack(numbers)
        return replace(unpacked, num_bad=unpacked.num_bad + is_bad)

    return wait


def filled(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of numbers, of the type and device of another; a copy from the host would be waited for."""
    return torch.cat([like.new_full((1,), number) for number in numbers])


def all_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return whether all values are finite, as a bool tensor of no dimensions."""
    # A sum is finite exactly if all values are (and it does not overflow). A GPU takes all the norms of absolute values
    # at once; on CPUs they take 18 times as long as plain sums, which what is not finite makes so as well.
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return torch.isfinite(torch.stack([t.sum() for t in tensors] if on_cpu else torch._foreach_norm(tensors, 1))).all()
