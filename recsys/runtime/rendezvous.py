"""A name for each start of the ranks in a store that outlives it, on which they agree before they are connected."""

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

_TELL_AFTER_S = 30.0  # what is waited for, which may be for ten minutes more


@contextmanager
def told_if_slow(text: Callable[[], str], limit_s: float | None = None) -> Iterator[None]:
    """Log what the block waits for, once a machine, where that takes half a minute or more.

    Args:
        limit_s: ends this rank after so long, where the block does not end by itself.
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
    """Return a name that rank 0 chooses, the same on all ranks, and another at each start of the ranks.

    torchrun --max-restarts keeps its store. Without a prefix, gloo would now and then take the address of a process of
    the last start for its peer's, and fail. The count of restarts will not do: machines may count differently.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"start/{rank}", own)
        with told_if_slow(lambda: f"rank {rank} waits for rank 0 to start; see what that one has told"):
            prefix = store.get(f"start/answer/{own}").decode()
        store.set(f"start/{prefix}/{rank}", "")
        return prefix
    missing, deadline = list(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    with told_if_slow(
        lambda: f"rank 0 waits for ranks to start, see what they have told: {', '.join(map(str, missing[:8]))}"
    ):
        while missing:
            if time.monotonic() > deadline:
                raise LostPeerError(f"rank {missing[0]} did not start in {timeout.total_seconds():.0f} s")
            for other in tuple(missing):
                if store.check([f"start/{other}"]):  # left by the last start, maybe: then nobody takes the answer
                    store.set(f"start/answer/{store.get(f'start/{other}').decode()}", own)
                if store.check([f"start/{own}/{other}"]):
                    missing.remove(other)
            time.sleep(0.01)
    return own
