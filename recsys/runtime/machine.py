"""Topology: the machines of a plan, with their ranks, devices and memory."""

import resource
from dataclasses import dataclass

import psutil
import torch

from recsys.config import Config, Device
from recsys.config.choices import Autocast
from recsys.config.topology import num_bytes
from recsys.errors import UserError
from recsys.runtime.cgroups import UNLIMITED, cgroup_bytes
from recsys.runtime.environment import processor_name
from recsys.runtime.threads import computing_threads
from recsys.runtime.world import World

_CUBLAS_THREADS = 2  # the training thread, and autograd's for backward passes
# MKL keeps copied parts of matrices in each thread, for each kind of product: inputs with weights, gradients with
# weights, gradients with inputs. At most two threads compute the last (models/products.py). 2.2 to 3 MiB were measured.
_PACKED_BYTES = 21 << 17


@dataclass(frozen=True)
class Topology:
    """Machines of equal size with equally many ranks.

    Attributes:
        world_size: number of ranks. local_world_size: ranks on one machine.
        device: where a rank computes; without an index.
        device_bytes: memory of one GPU; 0 on CPU, where all memory is host memory.
        host_bytes: memory of one machine that its processes may use; UNLIMITED if it is not known.
        locked_bytes: host memory that a process may lock without privilege; None: any. It limits memory of RDMA and
            mlock, but not CUDA's pinned memory.
        blas_bytes: memory that matrix products keep on the device of a rank.
        sources: where the two sizes come from, by `device_bytes` and `host_bytes`.
        process_bytes: on CPU, what memory.budget lets a process take; None: what its machine has.
        start_bytes: on CPU, what a process takes before it holds tables or batches; None: not measured.
    """

    world_size: int
    local_world_size: int
    device: torch.device
    device_bytes: int
    host_bytes: int
    locked_bytes: int | None
    blas_bytes: int
    sources: dict[str, str]
    process_bytes: int | None = None
    start_bytes: int | None = None

    @property
    def num_machines(self) -> int:
        """Number of machines."""
        return self.world_size // self.local_world_size

    @property
    def on_gpu(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.device.type == "cuda"

    @property
    def host_known(self) -> bool:
        """Whether the memory of a machine is known."""
        return self.host_bytes < UNLIMITED

    @property
    def host_share_bytes(self) -> int:
        """Host memory of one rank."""
        return self.host_bytes // self.local_world_size


def topology_of(config: Config, world: World | None = None) -> Topology:
    """Return the machines of a run, or without a `world` those of the config's section `topology`.

    The host memory of this machine says nothing about others: it is used only if `topology` describes none. If
    memory.budget is less than the memory there is, it is used instead.

    Raises:
        UserError: the memory of a GPU is not given, and there is no GPU here to ask.
    """
    settings = config.topology
    if world is not None:
        world_size, local, on_gpu = world.world_size, world.local_world_size, world.device.type == "cuda"
    else:
        world_size = settings.world_size or 1
        local = settings.local_world_size or world_size
        device = settings.device or config.run.device
        on_gpu = device is Device.cuda or (device is Device.auto and torch.cuda.is_available())
    device_bytes, device_source = _device_bytes(config) if on_gpu else (0, "")
    described = (settings.world_size, settings.local_world_size, settings.device, settings.device_memory)
    host_bytes, host_source = _host_bytes(config, here=world is not None or described == (None,) * 4)
    budget = None if config.memory.budget is None else num_bytes("memory.budget", config.memory.budget)
    if budget is not None:
        if on_gpu and budget < device_bytes:
            device_bytes, device_source = budget, "memory.budget"
        elif not on_gpu and budget * local < host_bytes:
            host_bytes, host_source = budget * local, "memory.budget"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Topology(
        world_size,
        local,
        torch.device("cuda" if on_gpu else "cpu"),
        device_bytes,
        host_bytes,
        None if limit == resource.RLIM_INFINITY else limit,
        _cublas_bytes() if on_gpu else _mkl_bytes(config, local),
        {"device_bytes": device_source, "host_bytes": host_source},
        None if on_gpu else budget,
    )


def _device_bytes(config: Config) -> tuple[int, str]:
    if config.topology.device_memory is not None:
        return num_bytes("topology.device_memory", config.topology.device_memory), "topology.device_memory"
    if not torch.cuda.is_available():
        raise UserError(
            "config key 'topology.device_memory' is not set, and there is no GPU here to ask; set the memory of one "
            "GPU, such as topology.device_memory=80GiB"
        )
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, "the GPU here"


def _cublas_bytes() -> int:
    """Return torch's default workspaces of all threads for the GPU here, or for Hopper (see CublasHandlePool.cpp)."""
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9
    return _CUBLAS_THREADS * ((32 << 20) if hopper else (2 * 4096 + 8 * 16) << 10)


def _mkl_bytes(config: Config, local_world_size: int) -> int:
    """Return the bytes that MKL keeps; under autocast, oneDNN computes products, and keeps compiled code instead."""
    if config.precision.autocast is not Autocast.none:
        return 0
    threads = computing_threads(config.run.num_threads, torch.device("cpu"), local_world_size)
    return _PACKED_BYTES * (2 * threads + min(2, threads))


def _host_bytes(config: Config, here: bool) -> tuple[int, str]:
    if config.topology.host_memory is not None:
        return num_bytes("topology.host_memory", config.topology.host_memory), "topology.host_memory"
    if not here:
        return UNLIMITED, "not given"
    total, limit = psutil.virtual_memory().total, cgroup_bytes()
    return (limit, "the limit of this cgroup") if limit is not None and limit < total else (total, "this machine's")


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or for CPU that of the machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
