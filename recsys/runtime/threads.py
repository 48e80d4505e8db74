"""How many threads a rank runs, by its device, its cores and the ranks beside it."""

import os
from functools import cache

import torch

from recsys.runtime.cgroups import num_cores

_FEWEST_PROCESSES = 3
_MOST_DECODING = 12  # on GPUs: more were never measured


def computing_threads(wanted: int | None, device: torch.device, local_world_size: int) -> int:
    """Return how many OpenMP threads a rank computes with: `wanted`, or the default.

    On CPU it is the rank's share of the cores, less one for decoding where there are more than two. Beside a GPU there
    is little to compute, and OpenMP's threads would spin on the cores that decode.
    """
    cores = num_cores() // local_world_size
    return wanted or (1 if device.type == "cuda" else max(1, cores - 1 if cores > 2 else cores))


def decoding_threads(wanted: int | None, device: torch.device, local_world_size: int) -> int:
    """Return how many threads of a rank decode: `wanted`, or two, and on GPUs the rank's cores less two, up to 12.

    Where GPUs are planned for and none is here, the cores beside them are not known: it is 12, which takes most memory.
    """
    if wanted is not None:
        return wanted
    if device.type != "cuda":
        return 2
    cores = num_cores() // local_world_size if torch.cuda.is_available() else _MOST_DECODING + 2
    return max(2, min(_MOST_DECODING, cores - 2))


def decode_in_processes(wanted: bool | None, num_threads: int, device: torch.device) -> bool:
    """Return whether so many processes of a rank decode data.train in place of threads: `wanted`, or the default.

    Threads that decode and the one that trains take turns with Python's lock: beside 12 of them an H200 was idle two
    thirds of the time. A CPU's steps are long beside that, and a process takes memory.
    """
    is_worth_it = device.type == "cuda" and num_threads >= _FEWEST_PROCESSES
    return num_threads > 0 and (is_worth_it if wanted is None else wanted) and _shares_memory()


@cache
def _shares_memory() -> bool:
    """Return whether this system has memory without a name that other processes can map; some sandboxes have none."""
    try:
        os.close(os.memfd_create("recsys"))
    except (OSError, AttributeError):
        return False
    return True


def windows_ahead(num_threads: int, num_streams: int) -> int:
    """Return how many windows of each stream that a rank reads are decoded ahead: enough to keep its threads at work.

    Where ranks have few streams each, such as 8 of them one of 8 each, one window at a time would keep one thread.
    """
    return -(-num_threads // max(1, num_streams))


def batches_ahead(wanted: int | None, device: torch.device) -> int:
    """Return how many batches a thread collates ahead of training: `wanted`, or the default.

    Beside training on a CPU, such a thread takes Python's lock from operators that are short: a rank on two cores
    trained a twelfth faster without it, two gloo ranks a tenth.
    """
    return wanted if wanted is not None else 4 if device.type == "cuda" else 0
