"""Starts train.py as a user does, as one process or through torchrun."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def train_command(*arguments: str, nproc: int = 1) -> list[str]:
    """Return the command line of train.py with these arguments."""
    if nproc == 1:
        return [sys.executable, "train.py", *arguments]
    # The address because torchrun otherwise asks the network for this host's name.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *launcher, "--nproc_per_node", str(nproc), "train.py", *arguments]


def environment() -> dict[str, str]:
    """Return the environment without what a launcher above the tests may have set."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_train(
    *arguments: str, nproc: int = 1, timeout: float = 120, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end; text output, standard output and error apart."""
    command = train_command(*arguments, nproc=nproc)
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)
