"""What benchmarks share: the command that starts processes, and the machine that they ran on."""

import os
import platform
import sys

from recsys.runtime.environment import processor_name


def launch_command(nproc: int) -> list[str]:
    """Return what a Python script and its arguments are put behind to run in so many processes."""
    if nproc == 1:
        return [sys.executable]
    # The address because torchrun otherwise asks the network for this host's name.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *launcher, "--nproc_per_node", str(nproc)]


def machine() -> dict[str, str | int]:
    """Return processor, cores and system, for results."""
    name, kind = processor_name(), platform.machine()
    processor = kind if name == kind else f"{name} ({kind})"
    return {"processor": processor, "cores": os.cpu_count() or 1, "system": platform.system()}
