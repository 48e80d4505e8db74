"""Sections `topology` and `memory` of a config, and sizes of memory as people write them."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from recsys.config.choices import Device, Saver
from recsys.errors import UserError

_UNITS = {  # in lower case
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", 1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", 1)},
}


@dataclass
class TopologyConfig:
    """Machines of a dry run, and the memory that a plan may use: 80GiB, 1.5TiB, 500GB or bytes."""

    world_size: int | None = None  # dry run: number of ranks; default: 1
    local_world_size: int | None = None  # dry run: ranks on each machine; default: all
    device: Device | None = None  # dry run: device of the ranks; default: run.device
    device_memory: Any = None  # memory of one GPU; default: that of the GPU here
    # Memory of one machine; default: that of this machine, or the limit of its cgroup. If a key above is set, a dry run
    # is for other machines: then the default is unknown, and host memory is not checked.
    host_memory: Any = None
    speeds: str | None = None  # dry run: file of `recsys calibrate`, to predict how long a step takes


@dataclass
class MemoryConfig:
    """Memory budget of a rank, and what to do when a run needs more."""

    budget: Any = None  # memory of the GPU of each rank, or on CPU of its process: 8GiB or bytes. Default: all of it
    fit: bool = False  # change settings, the cheapest first, until the run fits into 95 % of that, and report them
    allow: list[Saver] = field(default_factory=list)  # changes that `fit` may make though they change what is learned
    snapshot: bool = False  # GPUs: when memory runs out, write a file for the viewer at pytorch.org/memory_viz


def num_bytes(key: str, value: Any) -> int:
    """Return the bytes of a size such as `80GiB`, `1.5 TB` or a number.

    Args:
        key: the config key of the size, for messages.

    Raises:
        UserError: the value is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    factor = _UNITS.get(match[2].lower()) if match and not isinstance(value, bool) else None
    size = float(match[1]) * factor if match and factor else 0.0
    if not 1 <= size < math.inf:
        raise UserError(
            f"config key '{key}' must be a size above 0, such as 80GiB, 1.5TiB, 500GB or a number of bytes, "
            f"found {value!r}"
        )
    return int(size)


def check_topology(topology: TopologyConfig) -> None:
    """Refuse numbers of ranks and sizes of memory that no machine can have.

    Raises:
        UserError: names the key, what was found and what is allowed.
    """
    for key in ("world_size", "local_world_size"):
        count = getattr(topology, key)
        if count is not None and not 1 <= count <= 1 << 20:
            raise UserError(f"config key 'topology.{key}' must be from 1 to {1 << 20}, found {count}")
    for key in ("device_memory", "host_memory"):
        if getattr(topology, key) is not None:
            num_bytes(f"topology.{key}", getattr(topology, key))
    ranks, local = topology.world_size or 1, topology.local_world_size
    if local is not None and (local > ranks or ranks % local):
        raise UserError(
            f"config key 'topology.local_world_size' must divide topology.world_size={ranks}, so that all machines "
            f"have the same number of ranks, found {local}"
        )
