"""Checks that all ranks have the same config and code and see the same run directory, before a run begins."""

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from recsys.config import Config, config_text
from recsys.config.values import flat
from recsys.errors import UserError
from recsys.runtime.run_lock import RunLock, lock_id
from recsys.runtime.versions import git_commit, installed_versions, own_version
from recsys.runtime.world import World

# Keys that may differ between ranks: how a rank works on its machine, and what only rank 0 reads.
_MAY_DIFFER = (
    *("run.name", "run.dir", "run.overwrite", "run.stop_file", "run.num_threads", "memory.budget", "topology."),
    *("data.num_threads", "data.prefetch_batches", "data.processes"),
)
_SEEN_WITHIN_S = 90.0  # NFS may not show a new file for a minute


def check_alike(config: Config, world: World) -> None:
    """Refuse a config that differs on some rank, such as by another command line on one machine; collective.

    Ranks would wait for each other in different places, or silently train different things.

    Raises:
        UserError: on every rank; it names the first key that differs, and its values.
    """
    if world.world_size == 1:
        return
    # Compared with references to the environment resolved, but shown as written, since they may hold secrets.
    mine = config_text(replace(config, given=(None, None))), config_text(config)
    of_ranks = world.gather(mine)
    if len(set(of_ranks)) == 1:
        return
    (first, shown_first), *others = ((_values(resolved), _values(given)) for resolved, given in of_ranks)
    for rank, (other, shown) in enumerate(others, start=1):
        if keys := [key for key in {**first, **other} if first.get(key) != other.get(key)]:
            here, there = (values.get(keys[0], "not there") for values in (shown_first, shown))
            more = f" ({len(keys) - 1} more differ)" if len(keys) > 1 else ""
            raise UserError(
                f"config key '{keys[0]}' is {here} on rank 0 and {there} on rank {rank}{more}; give all ranks the same "
                f"config file and the same key=value"
            )


def check_shared(folder: Path, lock: RunLock, world: World, what: str = "config key 'run.dir'") -> None:
    """Refuse a folder that some rank does not see, and would write to on a disk of its own; collective.

    The lock shows this: no earlier run has left the same one on that disk.

    Args:
        lock: of the folder, held on rank 0.
        what: the option or key with which the user names the folder.

    Raises:
        UserError: on every rank; it names the rank and its machine.
    """
    held = world.from_rank_zero(lambda: lock.id)
    world.agree(lambda: _await(folder, held, world.rank, what))


def unlike_versions(world: World) -> list[str]:
    """Return a sentence for each machine whose code, Python or packages are not those of rank 0's; collective."""
    mine = {"recsys": own_version(), **installed_versions()}
    (_, first, commit), *others = world.gather((socket.gethostname(), mine, git_commit()))
    sentences: dict[str, str] = {}
    for rank, (host, versions, own_commit) in enumerate(others, start=1):
        pairs = {name: (versions.get(name), first.get(name)) for name in {**first, **versions}}
        if commit and own_commit:  # else a machine has no git
            pairs["commit"] = own_commit, commit
        if differing := [
            f"{name} {here} where rank 0 has {there}" for name, (here, there) in pairs.items() if here != there
        ]:
            text = f"rank {rank} on {host} has {', '.join(differing)}; install the same on all, or ranks may wait for"
            sentences.setdefault(host, f"{text} each other, or learn something else")
    return list(sentences.values())


def _await(folder: Path, held: str, rank: int, what: str) -> None:
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while lock_id(folder) != held:
        if time.monotonic() > deadline:
            raise UserError(
                f"{what}: rank {rank} on {socket.gethostname()} does not see in '{folder}' what rank 0 has written "
                f"there; name a folder that all machines share, and start all ranks in the same one"
            )
        time.sleep(0.1)


def _values(text: str) -> dict[str, Any]:
    """Return the values in the text of a config that all ranks must share, by dotted key."""
    return {key: value for key, value in flat("", yaml.safe_load(text)) if not key.startswith(_MAY_DIFFER)}
