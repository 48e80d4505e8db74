"""World: the rank, device and collectives of this process."""

import contextlib
import gc
import os
import platform
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recsys.config import Device
from recsys.errors import EchoError, LostPeerError, StuckError, UserError, is_out_of_memory, system_problem
from recsys.runtime.environment import keep_freed_memory
from recsys.runtime.launch import is_launched, local_ranks
from recsys.runtime.rendezvous import agree_on_prefix, told_if_slow
from recsys.runtime.threads import computing_threads

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
FAILURE_KEY = "failure"
_FAILURE_WAIT_S = 2.0
_ECHO_WAIT_S = 1.0
_CONNECT_S = 300.0
_NOT_CONNECTED = (
    "rank {} has found the others and waits for connections to them: machines must reach each other at every port, "
    "which a firewall may close, and by one network, which GLOO_SOCKET_IFNAME names if there are several"
)

# Messages of gloo, NCCL and the store if the other side is gone; all other errors keep their traceback.
_LOST_PEER = re.compile(
    "Connection (closed|reset) by peer|Connection was likely closed|Socket closed|Broken pipe|remote process exited|"
    "Timed out waiting|wait timeout after|client socket has timed out|connectFullMesh failed"
)


@dataclass(frozen=True)
class World:
    """This process among the others of a run.

    Attributes:
        rank, world_size: among all processes. local_world_size: how many of them are on this machine.
        device: where this rank computes.
        host_group: gloo group over all ranks, for objects and tensors in host memory.
        store: keys and values that all ranks see, for this start of the ranks; other threads need a `clone()`.
        launch_store: the same, but torchrun keeps it when it restarts the ranks.
        timeout: how long a collective waits for the other ranks.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    host_group: dist.ProcessGroup
    store: dist.Store
    launch_store: dist.Store
    timeout: timedelta

    @property
    def group(self) -> dist.ProcessGroup:
        """The default group over all ranks: NCCL for GPUs, gloo for the CPU."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def gather(self, value: T) -> list[T]:
        """Return the `value` (any picklable object) of every rank, in order of rank, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum of a host tensor over all ranks."""
        total = tensor.clone()
        dist.all_reduce(total, group=self.host_group)
        return total

    def exchange(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Send rank r the next `sizes[r]` values of a host tensor; return those for this rank, in order of rank."""
        sent = torch.tensor(sizes)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.host_group)
        incoming = values.new_empty(int(received.sum()))
        dist.all_to_all_single(incoming, values, received.tolist(), list(sizes), group=self.host_group)
        return incoming

    def agree(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it fails anywhere, raise the first failure on every rank.

        Raises:
            UserError: some rank has raised one; the message is that of the lowest such rank.
        """
        result, error = _attempt(action)
        for rank, other in enumerate(self.gather(error)):
            if other is not None:
                raise self._echoed(rank, other)
        assert error is None
        return result  # type: ignore[return-value]

    def from_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result, or raise its failure, on every rank."""
        if self.world_size == 1:
            return action()
        outcome: list[Any] = [_attempt(action) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.host_group)
        result, error = outcome[0]
        if error is not None:
            raise self._echoed(0, error)
        return result

    def _echoed(self, rank: int, error: Exception) -> Exception:
        """Return the error of a rank as this rank must raise it: a UserError of another rank becomes an EchoError."""
        return EchoError(*error.args) if rank != self.rank and type(error) is UserError else error

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        dist.barrier(group=self.host_group)

    @property
    def num_collectives(self) -> int:
        """How many collectives this rank has begun; the rank that the others wait for has begun the fewest."""
        groups = {id(group): group for group in (self.group, self.host_group)}
        return sum(group._get_sequence_number_for_group() for group in groups.values())  # type: ignore[attr-defined]

    def explain(self, error: Exception) -> Exception:
        """Publish this rank's error; if it follows from the error of another rank, return one that quotes that.

        torchrun's summary shows only ranks of its own machine, and the cause may be on another.
        """
        if isinstance(error, EchoError):
            return error
        lost = as_lost_peer(error)
        try:
            if lost is None:
                first = announce(self.store, self.rank, error)
                if isinstance(error, UserError):
                    self._wait_for_echoes()
                return EchoError(*error.args) if isinstance(error, UserError) and first != self.rank else error
            deadline = time.monotonic() + _FAILURE_WAIT_S
            while not (cause := self.store.get(FAILURE_KEY).decode()) and time.monotonic() < deadline:
                time.sleep(0.1)
        except RuntimeError:  # the store has gone with the rank or the launcher that held it
            return lost or error
        return LostPeerError(f"another rank ended: {cause}") if cause else lost

    def _wait_for_echoes(self) -> None:
        """On rank 0, whose end ends the store, wait a moment for ranks with the same mistake, which read the store."""
        deadline = time.monotonic() + _ECHO_WAIT_S
        num_ranks = self.store.add("mistakes", 1)
        while self.rank == 0 and num_ranks < self.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            num_ranks = self.store.add("mistakes", 0)


def announce(store: dist.Store, rank: int, error: Exception) -> int:
    """Publish the error that ends this rank under FAILURE_KEY, unless another rank was first.

    Returns:
        The rank that was first with this error.
    """
    is_plain = isinstance(error, UserError | StuckError | LostPeerError)
    text = " ".join(f"{'' if is_plain else type(error).__name__ + ': '}{error}".split())[:500]
    first, _, first_text = store.compare_set(FAILURE_KEY, "", f"rank {rank}: {text}").decode().partition(": ")
    return int(first.removeprefix("rank ")) if first_text == text else rank


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error
    except Exception as error:
        explained = system_problem(error)
        if explained is not error:
            return None, explained
        # Not every exception can be pickled, but its text can; the traceback is printed here.
        text = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            return None, MemoryError(text)
        traceback.print_exc()
        return None, RuntimeError(text)


@contextlib.contextmanager
def open_world(
    device: Device = Device.auto, num_threads: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[World]:
    """Join the process group that the launcher describes, or make one of a single process; leave it at the end.

    Objects that hold tensors or collectives (model, pipeline, optimizers) must be released inside the block: gloo and
    NCCL threads that outlive the interpreter's objects abort the process after its last line.

    Args:
        device: where to compute. Of several GPUs, a rank uses that of its local rank; a single visible one is its own.
        num_threads: OpenMP threads of this rank; default: see `computing_threads`.
        timeout_s: how long a collective waits for the other ranks.

    Raises:
        UserError: CUDA is required but missing, or there are more ranks than GPUs; and the errors of `local_ranks`.
    """
    local_rank, local_world_size = local_ranks()
    if is_launched():  # torchrec reads the variable; if it is not set, it assumes 8 ranks on a machine, or all
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    torch_device = _choose_device(device, local_rank, local_world_size)
    torch.set_num_threads(computing_threads(num_threads, torch_device, local_world_size))
    timeout = timedelta(seconds=timeout_s)
    store, launch_store = _init_process_group(torch_device, timeout)
    host_group = dist.group.WORLD if torch_device.type == "cpu" else _host_group(timeout)
    assert host_group is not None
    sizes = dist.get_rank(), dist.get_world_size(), local_world_size
    world = World(*sizes, torch_device, host_group, store, launch_store, timeout)
    if torch_device.type == "cuda":
        keep_freed_memory()
        _check_own_gpu(world)
    try:
        yield world
        # Only after success: after an error, other ranks may be gone, and the barrier would wait for them. It is needed
        # because rank 0 may fail after the last step of the others, for example when it writes the results.
        gc.collect()
        world.barrier()
    except Exception as error:
        explained = world.explain(system_problem(error))
        if explained is error:
            raise
        raise explained from error
    dist.destroy_process_group()


@contextlib.contextmanager
def rehearse_world(world_size: int, local_world_size: int, device: torch.device) -> Iterator[World]:
    """Fake rank 0 of any number of ranks in this process: collectives do nothing.

    This is for tensors without memory and for work that only rank 0 does. A process group that is open already stays
    open, and must have this number of ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    opened = not dist.is_initialized()
    if opened:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        group = dist.group.WORLD
        assert group is not None and dist.get_world_size() == world_size
        store = dist.HashStore()
        yield World(0, world_size, local_world_size, device, group, store, store, timedelta(seconds=DEFAULT_TIMEOUT_S))
    finally:
        if opened:
            dist.destroy_process_group()


def _choose_device(device: Device, local_rank: int, local_world_size: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is Device.cpu or (device is Device.auto and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise UserError("config key 'run.device' is cuda, but torch finds no GPU here; use run.device=cpu")
    # Launchers may show each process only its own GPU, like `srun --gpus-per-task=1`.
    if max(local_world_size, local_rank + 1) > gpus > 1:
        raise UserError(_too_few_gpus(max(local_world_size, local_rank + 1), gpus))
    index = 0 if gpus == 1 else local_rank
    # NCCL binds to the current device when it starts, so the device is set first.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_own_gpu(world: World) -> None:
    """Raise a UserError on every rank if each rank sees one GPU, and two of them see the same."""
    gpus = torch.cuda.device_count()
    name = platform.node(), str(torch.cuda.get_device_properties(world.device).uuid)
    names = [gpu for gpu in world.gather(name if world.local_world_size > gpus else None) if gpu is not None]
    if len(set(names)) < len(names):
        raise UserError(_too_few_gpus(world.local_world_size, gpus))


def _too_few_gpus(processes: int, gpus: int) -> str:
    return (
        f"{processes} processes were started on a machine where torch finds {gpus} GPU{'s' if gpus > 1 else ''}; use "
        f"--nproc_per_node {gpus}, or run.device=cpu"
    )


def _init_process_group(device: torch.device, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """Make the default group; return the store of this start of the ranks and that of the whole launch."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    launch_store, rank, world_size = _rendezvous(timeout) if is_launched() else (dist.HashStore(), 0, 1)
    store = launch_store
    try:
        if is_launched():
            store = dist.PrefixStore(agree_on_prefix(launch_store, rank, world_size, timeout), launch_store)
        store.compare_set(FAILURE_KEY, "", "")
        with _connecting():
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:  # for example, a rank has ended after joining the store and before connecting
        raise as_lost_peer(error) or error from None
    return store, launch_store


def _host_group(timeout: timedelta) -> dist.ProcessGroup | None:
    with _connecting():
        return dist.new_group(backend="gloo", timeout=timeout)


def _connecting() -> contextlib.AbstractContextManager[None]:
    """Watch what connects ranks that have all started; gloo tries for five times as long as its timeout."""
    return told_if_slow(lambda: _NOT_CONNECTED.format(os.environ.get("RANK", "0")), _CONNECT_S)


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store through which ranks find each other, this rank, and the number of ranks."""
    # Without torchrun, rank 0 keeps the store, and waits here for all others; they wait later, for rank 0.
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    missing = f"all {size} ranks to start; see their output" if rank == "0" else "rank 0 to start; see its output"
    try:
        with told_if_slow(lambda: f"rank {rank} waits for {missing}"):
            return next(iter(dist.rendezvous("env://", timeout=timeout)))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        cause = str(error).rpartition("message: ")[2].rstrip(".")[:200]
        place = " and ".join(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"ranks do not find each other by {place} ({cause}); name the machine of rank 0 and a port that is free "
            f"there, the same on all, and start all {os.environ['WORLD_SIZE']} of them"
        ) from error


def as_lost_peer(error: Exception) -> LostPeerError | None:
    """Return a LostPeerError for the error of a broken collective; None for any other error."""
    text = str(error)
    if isinstance(error, RuntimeError) and _LOST_PEER.search(text):
        # Drop the place in the source of gloo or NCCL before the message, and the advice after it.
        first = re.sub(r"^(Gloo .* with )?\[\S*\]\s*", "", " ".join(text.split())).split(". ")[0][:120]
        slow = "; run.stuck_after_s sets how long ranks wait for one that works alone" if "Timed out" in first else ""
        return LostPeerError(f"another rank ended or did not answer, see its own error ({first}){slow}")
    return None
