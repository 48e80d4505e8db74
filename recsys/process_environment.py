"""What libraries read from the environment once, when they are loaded; to be set before they are."""

import os


def prepare_environment() -> None:
    """Set up Arrow's allocator; call it before pyarrow is imported. A value of the user's own stays."""
    # Arrow gives memory back to the system 10 ms after its last use, in the middle of decoding the next row group. On
    # virtual machines, where getting it again is expensive, that costs a quarter of the time. So many milliseconds:
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")
