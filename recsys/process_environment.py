"""What allocators are told."""

import ctypes
import os
from contextlib import suppress

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_LARGE_BYTES = 8 << 20


def prepare_environment() -> None:
    """Set up Arrow's allocator; call it before pyarrow is imported. A value of the user's own stays."""
    # Arrow gives memory back to the system 10 ms after its last use, in the middle of decoding the next row group. On
    # virtual machines, where getting it again is expensive, that costs a quarter of the time. So many milliseconds,
    # which are enough; with a minute, what threads leave behind piles up to some 50 MB more:
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")


def give_large_blocks_back() -> None:
    """Let glibc give blocks from 8 MiB on back to the system when they are freed. A threshold of the user's own stays.

    glibc raises that size up to 32 MiB by itself, and the tensors of a step below it leave holes in its heap: a run of
    micro-batches, which is to take little, held a quarter more than what lived. It is not done for every run, because
    each step then faults those pages in anew: with blocks from 1 MiB on, steps of 8192 rows took twice as long.
    """
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
