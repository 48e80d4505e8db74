"""What allocators are told once, before the libraries that use them are loaded."""

import os


def prepare_environment() -> None:
    """Set up Arrow's allocator; call it before pyarrow is imported. A value of the user's own stays.

    glibc's is left as it is. With blocks of a step mapped one by one (a low M_MMAP_THRESHOLD) a process takes no more
    than what lives, but every step faults all its pages in anew: on two cores it then trains half as many rows.
    """
    # Arrow gives memory back to the system 10 ms after its last use, in the middle of decoding the next row group. On
    # virtual machines, where getting it again is expensive, that costs a quarter of the time. So many milliseconds:
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")
