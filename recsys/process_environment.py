"""What allocators are told once, before the libraries that use them are loaded."""

import ctypes
import os
from contextlib import suppress

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_MAPPED_BYTES = 1 << 20


def prepare_environment() -> None:
    """Set up glibc's allocator and Arrow's; call it before pyarrow is imported. A value of the user's own stays."""
    # Arrow gives memory back to the system 10 ms after its last use, in the middle of decoding the next row group. On
    # virtual machines, where getting it again is expensive, that costs a quarter of the time. So many milliseconds:
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")
    # glibc moves the size from which on blocks are mapped, and given back when they are freed, up to 32 MiB. Tensors of
    # a step then leave holes in its heap: a run of micro-batches held twice what lived.
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
