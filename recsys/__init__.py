"""Distributed training of user-item models with sharded, hashed, mixed-precision embedding tables."""

import os

# Arrow gives memory back to the system 10 ms after its last use, in the middle of decoding the next row group; on
# virtual machines, where getting it back is expensive, that costs a quarter of the time. Its allocator (mimalloc) reads
# this when pyarrow is loaded: so many milliseconds.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")
