"""How the scripts start processes that train."""

import sys


def launch_command(nproc: int) -> list[str]:
    """Return what a Python script and its arguments are put behind to run in so many processes."""
    if nproc == 1:
        return [sys.executable]
    # The address because torchrun otherwise asks the network for this host's name.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *launcher, "--nproc_per_node", str(nproc)]
