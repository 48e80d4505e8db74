"""Bytes that libraries load and keep on their first use, measured on CPUs."""

from recsys.config import Config
from recsys.config.choices import Autocast
from recsys.runtime.loops import are_worth_compiling

_LIBRARY_BYTES = {"init": 5 << 20, "later": 30 << 20}
_RANK_ZERO_BYTES = 8 << 20  # rank 0 reads the footers and plans
_NUMBA_BYTES = 106 << 20  # numba, and the loops over ids that it compiles
# Only on CPUs: compiled kernels for 16-bit products, and torch.compile with what it keeps.
_AUTOCAST_BYTES, _INDUCTOR_BYTES = 12 << 20, 110 << 20


def library_bytes(config: Config, when: str, rank: int, num_threads: int, on_gpu: bool) -> int:
    """Return the host bytes of libraries and, on rank 0, of footers and plan.

    Args:
        when: "init", up to the end of the initialisation, or "later".
        num_threads: threads of this process that decode; 0 if other processes decode.
    """
    size = _LIBRARY_BYTES[when] + (_RANK_ZERO_BYTES if rank == 0 else 0)
    if when == "init":
        return size
    if num_threads and are_worth_compiling(num_threads, on_gpu):
        size += _NUMBA_BYTES
    if not on_gpu:
        size += _AUTOCAST_BYTES if config.precision.autocast is not Autocast.none else 0
        size += _INDUCTOR_BYTES if config.train.compile else 0
    return size
