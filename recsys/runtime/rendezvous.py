"""A name for each start of the ranks in a store that outlives it, on which they agree before they are connected."""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from recsys.errors import LostPeerError
from recsys.runtime.launch import local_ranks
from recsys.runtime.logs import logger

_TELL_AFTER_S = 30.0  # what is waited for, which may be for ten minutes more


def agree_on_prefix(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that rank 0 chooses, the same on all ranks, and another at each start of the ranks.

    torchrun --max-restarts keeps its store. Without a prefix, gloo would now and then take the address of a process of
    the last start for its peer's, and fail. The count of restarts will not do: machines may count differently.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        return _prefix_of_rank_zero(store, rank, own)
    begun, limit, told = time.monotonic(), timeout.total_seconds(), False
    missing = set(range(1, world_size))
    while missing:
        waited = time.monotonic() - begun
        if waited > limit:
            raise LostPeerError(f"rank {min(missing)} did not start in {limit:.0f} s")
        if waited > _TELL_AFTER_S and not told:
            text = "rank 0 waits for %d of %d ranks to start, the first of them rank %d; see what that one has told"
            logger.warning(text, len(missing), world_size, min(missing))
            told = True
        for other in sorted(missing):
            if store.check([f"start/{other}"]):  # left by the last start, maybe: then nobody takes the answer
                store.set(f"start/answer/{store.get(f'start/{other}').decode()}", own)
            if store.check([f"start/{own}/{other}"]):
                missing.remove(other)
        time.sleep(0.01)
    return own


def _prefix_of_rank_zero(store: dist.Store, rank: int, own: str) -> str:
    answer = f"start/answer/{own}"
    store.set(f"start/{rank}", own)
    try:
        store.wait([answer], timedelta(seconds=_TELL_AFTER_S))
    except dist.DistStoreError:
        if local_ranks()[0] == 0:  # once a machine
            logger.warning("rank %d waits for rank 0 to start; see what that one has told", rank)
    prefix = store.get(answer).decode()
    store.set(f"start/{prefix}/{rank}", "")
    return prefix
