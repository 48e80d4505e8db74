"""What libraries read from the environment once, when they are loaded; to be set before they are."""

import os


def prepare_environment() -> None:
    """Set up the allocator of Arrow and the threads of OpenMP; call it before torch and pyarrow are imported.

    A value of the user's own stays.
    """
    # Arrow gives memory back to the system 10 ms after its last use, in the middle of decoding the next row group. On
    # virtual machines, where getting it again is expensive, that costs a quarter of the time. So many milliseconds:
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")
    # OpenMP's threads spin at barriers, for milliseconds, and take the cores of those that they wait for, such as the
    # loader's. With so many rounds they soon sleep: on idle cores as fast, and twice as fast where one core is taken.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
