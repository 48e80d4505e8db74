"""Memory and cores that this process may use: limits of its cgroups, which containers and batch systems set."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

UNLIMITED = 1 << 60  # bytes; without a limit, cgroup v1 reports more than this
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_bytes() -> int | None:
    """Return the lowest limit of memory in bytes, or None if there is no limit."""
    limits = []
    for folder, is_first in _folders("memory"):
        with suppress(OSError, ValueError):  # the file is missing, or holds `max`
            limits.append(int((folder / ("memory.limit_in_bytes" if is_first else "memory.max")).read_text()))
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


def num_cores() -> int:
    """Return the number of cores whose time this process may use; with more threads, some would always be paused."""
    limits = [len(os.sched_getaffinity(0))]
    for folder, is_first in _folders("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first else ("cpu.max",)
        with suppress(OSError, ValueError):  # the file is missing, or holds `max`
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota > 0:  # cgroup v1 reports -1 if there is no limit
                limits.append(math.ceil(quota / period))
    return min(limits)


def _folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's groups and of the groups above, whose limits hold too, and whether it is v1.

    Inside a container some of the paths may not exist, and the root is that of the container.
    """
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _ROOT / controller if controllers else _ROOT
            folder = root / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(root):
                    yield group, bool(controllers)
