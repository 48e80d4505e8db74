"""Rank, device, collectives, and an orderly end. The only module that reads rank variables."""

import contextlib
import gc
import os
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recsys.config import Device
from recsys.errors import LostPeerError, UserError

T = TypeVar("T")

# What gloo, NCCL and the store say when the other side is gone; all else keeps its traceback.
_LOST_PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Timed out waiting",
    "Socket closed",
)


@dataclass(frozen=True)
class World:
    """This process among the others.

    Attributes:
        rank, world_size: of all processes; local_world_size: how many of them are on this machine.
        device: where this rank computes.
        host_group: gloo group over all ranks, for objects and tensors in host memory.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    host_group: dist.ProcessGroup

    @property
    def group(self) -> dist.ProcessGroup:
        """The default group over all ranks: NCCL for GPUs, gloo for the CPU."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` (any picklable object), in order of rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over all ranks of a host tensor."""
        total = tensor.clone()
        dist.all_reduce(total, group=self.host_group)
        return total

    def agree(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it fails anywhere, raise the first failure on every rank.

        Raises:
            UserError: some rank raised one; the message is that of the lowest such rank.
        """
        result, error = _attempt(action)
        for other in self.gather(error):
            if other is not None:
                raise other
        assert error is None
        return result  # type: ignore[return-value]

    def from_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result, or raise its failure, on every rank."""
        outcome: list[Any] = [_attempt(action) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.host_group)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier(group=self.host_group)


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error
    except Exception as error:
        # Not every exception can be pickled and rebuilt; its text can, and the rest is printed here.
        traceback.print_exc()
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def world_size_from_environment() -> int:
    """Return the number of processes as the launcher set it, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def open_world(device: Device = Device.auto, num_threads: int | None = None) -> Iterator[World]:
    """Join the process group that the launcher describes, or make one of a single process; leave it in order.

    What holds tensors or collectives (model, pipeline, optimizers) must be released inside the block: gloo and
    NCCL threads that outlive the interpreter's objects abort the process after its last line.

    Args:
        device: where to compute.
        num_threads: OpenMP threads of this rank; default: its share of this machine's cores, less one for decoding
            where there are more than two.

    Raises:
        UserError: CUDA is asked for and not there, or there are more ranks than GPUs.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch_device = _choose_device(device, local_rank, local_world_size)
    torch.set_num_threads(num_threads or _default_threads(num_cores() // local_world_size))
    _init_process_group(torch_device)
    host_group = dist.group.WORLD if torch_device.type == "cpu" else dist.new_group(backend="gloo")
    assert host_group is not None
    world = World(dist.get_rank(), dist.get_world_size(), local_world_size, torch_device, host_group)
    yield world
    # Only in success: after an error other ranks may be gone, and the barrier would wait for them.
    gc.collect()
    world.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def rehearse_world(world_size: int, local_world_size: int, device: torch.device) -> Iterator[World]:
    """Stand in for rank 0 of any number of ranks, in this process alone: collectives do nothing.

    For tensors without memory and for what only rank 0 does. A process group that is open already is left as it is,
    and must have as many ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    opened = not dist.is_initialized()
    if opened:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        group = dist.group.WORLD
        assert group is not None and dist.get_world_size() == world_size
        yield World(0, world_size, local_world_size, device, group)
    finally:
        if opened:
            dist.destroy_process_group()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_threads(cores: int) -> int:
    return cores - 1 if cores > 2 else max(1, cores)


def _choose_device(device: Device, local_rank: int, local_world_size: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is Device.cpu or (device is Device.auto and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise UserError("config key 'run.device' is cuda, but torch finds no GPU here; use run.device=cpu")
    if local_world_size > gpus:
        raise UserError(
            f"{local_world_size} processes were started on a machine with {gpus} GPUs; "
            f"use --nproc_per_node {gpus}, or run.device=cpu"
        )
    # NCCL binds to the current device when it starts, so the device is set first.
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _init_process_group(device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=10)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def as_lost_peer(error: Exception) -> LostPeerError | None:
    """Return the error that says so when `error` is a collective broken by the end of another rank, else None."""
    text = str(error)
    if any(sign in text for sign in _LOST_PEER_SIGNS):
        # Without the place in gloo's or NCCL's source that stands before it, and the advice after it.
        first = re.sub(r"^\[\S*\]\s*", "", " ".join(text.split())).split(". ")[0][:120]
        return LostPeerError(f"another rank ended or did not answer, see its own error ({first})")
    return None
