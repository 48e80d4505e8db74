"""Numbers of threads that a rank runs, depending on its device, its cores and the other ranks of its machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from recsys.runtime.cgroups import num_cores

_FEWEST_PROCESSES = 3
_MOST_DECODING = 12  # on GPUs: more were never measured


def computing_threads(wanted: int | None, device: torch.device, local_world_size: int) -> int:
    """Return how many OpenMP threads a rank computes with: `wanted`, or the default.

    On CPU, the default is the rank's share of the cores, less one for decoding if there are more than two. With a GPU
    it is 1: there is little to compute, and OpenMP's threads would spin on the cores that decode.
    """
    cores = num_cores() // local_world_size
    return wanted or (1 if device.type == "cuda" else max(1, cores - 1 if cores > 2 else cores))


@contextmanager
def computed_by_one_thread() -> Iterator[None]:
    """Let this process compute with one thread while another one writes: threads of OpenMP would spin on its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def decoding_threads(wanted: int | None, device: torch.device, local_world_size: int) -> int:
    """Return how many threads of a rank decode: `wanted`, or two, and on GPUs the rank's cores less two, from 2 to 12.

    If GPUs are planned for and none is here, their machine's cores are not known: it is 12, which needs most memory.
    """
    if wanted is not None:
        return wanted
    if device.type != "cuda":
        return 2
    cores = num_cores() // local_world_size if torch.cuda.is_available() else _MOST_DECODING + 2
    return max(2, min(_MOST_DECODING, cores - 2))


def decode_in_processes(wanted: bool | None, num_threads: int, device: torch.device) -> bool:
    """Return whether `num_threads` processes decode data.train instead of threads: `wanted`, or the default.

    Decoding threads and the training thread take turns with Python's lock: with 12 of them, an H200 was idle two thirds
    of the time. Steps on a CPU are long compared with such waits, and a process takes memory.
    """
    is_worth_it = device.type == "cuda" and num_threads >= _FEWEST_PROCESSES
    return num_threads > 0 and (is_worth_it if wanted is None else wanted) and _shares_memory()


@cache
def _shares_memory() -> bool:
    """Return whether this system has unnamed memory that other processes can map; some sandboxes do not."""
    try:
        os.close(os.memfd_create("recsys"))
    except (OSError, AttributeError):
        return False
    return True


def windows_ahead(num_threads: int, num_streams: int) -> int:
    """Return how many windows of each of a rank's streams are decoded ahead: enough to keep its threads busy.

    If a rank has few streams, such as one of 8 for each of 8 ranks, one window of each would keep only one thread busy.
    """
    return -(-num_threads // max(1, num_streams))


def batches_ahead(wanted: int | None, device: torch.device) -> int:
    """Return how many batches a thread collates ahead of training: `wanted`, or the default.

    In training on a CPU, such a thread takes Python's lock from short operators: without it, a rank on two cores
    trained a twelfth faster, and two gloo ranks a tenth.
    """
    return wanted if wanted is not None else 4 if device.type == "cuda" else 0
