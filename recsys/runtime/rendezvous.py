"""How ranks find each other: a store prefix for each start, and messages about what they wait for meanwhile."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from recsys.errors import LostPeerError, end_run
from recsys.runtime.launch import local_ranks
from recsys.runtime.logs import logger

_TELL_AFTER_S = 30.0  # the wait may go on for another ten minutes


@contextmanager
def told_if_slow(text: Callable[[], str], limit_s: float | None = None) -> Iterator[None]:
    """Log what the block waits for, once on each machine, if it takes more than half a minute.

    Args:
        text: returns what the block waits for. limit_s: this rank ends if the block takes longer.
    """
    ended = threading.Event()

    def watch() -> None:
        if ended.wait(_TELL_AFTER_S):
            return
        if local_ranks()[0] == 0:
            logger.warning("%s", text())
        if limit_s is not None and not ended.wait(limit_s - _TELL_AFTER_S):
            end_run(LostPeerError(f"{text()}; not all came in {limit_s:g} s"))

    threading.Thread(target=watch, name="slow start", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def agree_on_prefix(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that rank 0 chooses, the same on all ranks, and another at each start; once all have started.

    torchrun --max-restarts keeps its store. Without a prefix, gloo would sometimes read the address of a process of the
    last start instead of its peer's, and fail. The count of restarts cannot serve: machines may count differently.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"start/{rank}", own)
        with told_if_slow(lambda: f"rank {rank} waits for rank 0 to start, or for others; see the output of rank 0"):
            prefix = store.get(f"start/answer/{own}").decode()
            store.set(f"start/{prefix}/{rank}", "")
            store.get(f"start/{prefix}")  # a rank that connected to others before they start would not wait as long
        return prefix
    missing, deadline = list(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    with told_if_slow(
        lambda: f"rank 0 waits for ranks to start (see their output): {', '.join(map(str, missing[:8]))}"
    ):
        while missing:
            if time.monotonic() > deadline:
                raise LostPeerError(f"rank {missing[0]} did not start in {timeout.total_seconds():.0f} s")
            for other in tuple(missing):
                if store.check([f"start/{other}"]):  # if the last start has left it, nobody reads the answer
                    store.set(f"start/answer/{store.get(f'start/{other}').decode()}", own)
                if store.check([f"start/{own}/{other}"]):
                    missing.remove(other)
            time.sleep(0.01)
    store.set(f"start/{own}", "")
    return own
