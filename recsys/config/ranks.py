"""Checks of a config against the number of ranks."""

import math

from recsys.config.schema import Config
from recsys.errors import UserError


def check_ranks(config: Config, world_size: int) -> None:
    """Refuse a global batch with fewer rows than ranks.

    Raises:
        UserError: a batch has fewer rows than there are ranks.
    """
    for key in ("global_batch_size", "eval_batch_size"):
        size = getattr(config.train, key)
        if size is not None and size < world_size:
            raise UserError(
                f"config key 'train.{key}' is {size}, so that {world_size - size} of {world_size} ranks would have no "
                f"row of a step; use at least {world_size}, or start at most {size} ranks"
            )


def repeated_decoding(config: Config, world_size: int) -> str | None:
    """Return a sentence if several ranks decode the same stream of data.train; else None."""
    streams = config.data.num_streams
    if streams % world_size == 0:
        return None
    # Laid beside each other, streams and ranks have so many pieces in common.
    times = (streams + world_size - math.gcd(streams, world_size)) / streams
    better = world_size * min(-(-streams // world_size), config.train.global_batch_size // world_size)
    return (
        f"data.num_streams={streams} is no multiple of {world_size} ranks, so streams are shared, and rows are decoded "
        f"{times:.3g} times; for a new run, data.num_streams={better} avoids that (rows then come in another order)"
    )
