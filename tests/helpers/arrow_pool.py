"""Measures what Arrow allocates within a block."""

import contextlib
from collections.abc import Iterator

import pyarrow as pa

_POOLS: list[pa.MemoryPool] = []


@contextlib.contextmanager
def arrow_pool() -> Iterator[pa.MemoryPool]:
    """Yield a pool from which Arrow takes all memory within the block, and which counts that memory alone.

    The pool is kept for good: what was decoded may live on, and a buffer that is freed after its pool ends the process.
    """
    before = pa.default_memory_pool()
    _POOLS.append(pa.proxy_memory_pool(before))
    pa.set_memory_pool(_POOLS[-1])
    try:
        yield _POOLS[-1]
    finally:
        pa.set_memory_pool(before)
