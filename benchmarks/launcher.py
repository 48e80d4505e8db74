"""Shared parts of benchmarks: the command that starts processes, facts about the machine, and files of results."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from recsys.runtime.environment import processor_name


def launch_command(nproc: int) -> list[str]:
    """Return the beginning of a command that runs a Python script, which follows it, in `nproc` processes."""
    if nproc == 1:
        return [sys.executable]
    # The address is given because torchrun otherwise asks the network for this host's name.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *launcher, "--nproc_per_node", str(nproc)]


def machine() -> dict[str, str | int]:
    """Return processor, cores and system, to be written with results."""
    name, kind = processor_name(), platform.machine()
    processor = kind if name == kind else f"{name} ({kind})"
    return {"processor": processor, "cores": os.cpu_count() or 1, "system": platform.system()}


def write(out: Path | None, result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the machine that it is from, and write it to `out` if given."""
    result = {**result, "machine": machine()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def earlier(out: Path | None, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the settings `asked`, with their results so far from the file `out`; exit if that has other settings."""
    if out is None or not out.exists():
        return asked
    content: dict[str, Any] = json.loads(out.read_text())
    before = {key: content[key] for key in asked}
    if before != asked:
        sys.exit(f"{out} is of {', '.join(map(str, before.values()))}; name another file")
    return content
