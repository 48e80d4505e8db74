"""Measures the memory that Arrow allocates within a block."""

import contextlib
from collections.abc import Iterator

import pyarrow as pa

_POOLS: list[pa.MemoryPool] = []


@contextlib.contextmanager
def arrow_pool() -> Iterator[pa.MemoryPool]:
    """Yield a pool from which Arrow allocates all memory within the block, and which counts only that memory.

    The pool is kept for ever: decoded data may live longer, and freeing a buffer after its pool ends the process.
    """
    before = pa.default_memory_pool()
    _POOLS.append(pa.proxy_memory_pool(before))
    pa.set_memory_pool(_POOLS[-1])
    try:
        yield _POOLS[-1]
    finally:
        pa.set_memory_pool(before)
