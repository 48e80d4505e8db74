"""Environment variables of this process, and settings of its memory allocators."""

import ctypes
import gc
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from recsys.errors import LAUNCHER_FILE
from recsys.runtime.launch import end_with_parent
from recsys.runtime.versions import check_versions

HEAP_BLOCK_BYTES = 2 << 20  # malloc cuts smaller blocks out of heaps; larger ones come from the system, and go back
# Settings that glibc reads when a process starts: no cache of small blocks for each thread, and memory in huge pages.
# Versions before 2.26 and 2.35, which do not have them, ignore them.
_TUNABLES, _NO_CACHE, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", "glibc.malloc.hugetlb=1"
MALLOC_SETTINGS = {_TUNABLES: f"{_NO_CACHE}:{_HUGE_PAGES}"}  # with which programs restart themselves
_keeps_freed = False  # whether `keep_freed_memory` has been called
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def processor_name() -> str:
    """Return the model of this machine's processor, or its architecture if the system does not name it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def process_bytes(file: str, key: str, process: int | str = "self") -> int | None:
    """Return a size, in bytes, of a process (default: this one) from /proc, or None if it is not there."""
    try:
        return int(Path("/proc", str(process), file).read_text().partition(f"\n{key}:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None


def is_first_rank() -> bool:
    """Return whether this is the only process of the run, or the first in the count of the launcher."""
    return os.environ.get("RANK", "0") == "0"


def is_below_torchrun() -> bool:
    """Return whether torchrun, whose summary says how each rank has ended, has started this process."""
    return LAUNCHER_FILE in os.environ


def draws_on(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def colours_on(stream: TextIO) -> bool:
    """Return whether a stream is a terminal, and its user has not turned colours off (no-color.org)."""
    return draws_on(stream) and not os.environ.get("NO_COLOR")


def restart_with_malloc_settings() -> None:
    """Restart this program in this process, with settings for glibc: no caches of threads, and huge pages.

    PyTorch asks for aligned blocks, and glibc cuts off a few bytes before and after each. Bytes in a thread's cache
    count as used, so that a freed block is not joined with them, the next tensor of its size does not fit there, and
    heaps may grow to twice the memory in use. Huge pages give memory 2 MiB at a time; without them each step had
    thousands of page faults, and with them layers of 256 to 1024 trained in 0.71 to 0.88 of the time.

    Programs call this before they import libraries, because glibc reads settings only at the start. Settings of the
    user are kept, and with another C library nothing happens.
    """
    tunables, is_late = os.environ.get(_TUNABLES, ""), {"torch", "pyarrow"} & sys.modules.keys()
    missing = [setting for setting in (_NO_CACHE, _HUGE_PAGES) if setting.partition("=")[0] not in tunables]
    if not missing or is_late or not sys.executable or not _is_glibc():
        return
    os.environ[_TUNABLES] = ":".join([tunables, *missing] if tunables else missing)
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError, AttributeError):  # a system without such a name
        return False


def prepare_environment() -> None:
    """Set up allocators and the log before libraries are imported; values that the user has set are kept.

    From here on, a child of this program or of torchrun ends with the process that started it.
    """
    end_with_parent()
    # Arrow's own allocator keeps what each thread has freed: while up to 40 MiB were decoded it held 110, and if set to
    # give memory back at once, it took twice the time. malloc is as fast, and holds only what is used.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # PyTorch then aligns blocks of 2 MiB and more to pages, and asks for huge pages. From blocks aligned to 64 bytes,
    # malloc cuts off slivers, small objects fill these, and the next block of that size does not fit there: for layers
    # of 256 to 1024, heaps then took twice the memory in use, and 1.3 times with blocks aligned to pages.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # PyTorch and oneDNN keep a compiled half-precision product for each shape seen, up to 1,024 of a megabyte or two:
    # lists of all lengths through layers in BF16 took a gigabyte. Ten layers have some 30 products if batches have one
    # size.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    # A thread of libgomp that has done its part spins for 300,000 turns before it sleeps: for some ten milliseconds, no
    # decoding thread gets its core, while a step takes five. With one millisecond of spinning, two threads on two cores
    # trained 1.17 times as many rows at batches of 2,048, and 1.08 times at 8,192. Without spinning, waking the thread
    # up each time doubles the time of a step.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # A warning of torch from C++ is twenty lines of addresses, such as when a rank has ended and others still ask it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # CUDA's allocator then extends the block that it has; by default it allocates a new one for each size of batches.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Blocks of the first size or more come from the system, in huge pages, and go back to it when they are freed.
    # Smaller ones are cut out of heaps, whose free end goes back once it is larger than the second size. By default,
    # glibc raises both, up to 32 and 64 MiB, when large blocks are freed; blocks of steps then left holes in the heap.
    # Experts of 16,384 rows then took 847 MiB, and take 676 with these sizes; the CPU time of steps of 2,048 to 16,384
    # rows was the same, as far as four pairs of runs can show.
    _tell_malloc(_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", HEAP_BLOCK_BYTES)
    _tell_malloc(_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", 64 << 20)
    logging.getLogger().addFilter(_is_news)


@contextmanager
def importing() -> Iterator[None]:
    """Prepare the environment, check versions, and turn Python's garbage collector off while a program imports.

    While libraries make 400,000 objects, the collector looks through them again and again, and more than once at the
    program's end: 1.0 s of 4.9. So it runs once after the imports, to free what is garbage by then, and ignores the
    other objects from then on. Only programs may call this, because these objects stay until the process ends.
    """
    prepare_environment()
    check_versions()
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        if is_enabled:
            gc.enable()


def _is_news(record: logging.LogRecord) -> bool:
    # FBGEMM 1.6 logs this about itself 14 times when imported; recsys.runtime.versions checks what fits together.
    return "_fbgemm_torch_compat_table has no entry" not in str(record.msg)


def keep_freed_memory() -> None:
    """Let malloc keep freed memory from now on; for runs on a GPU, where host memory matters less.

    Decoding threads allocate and free blocks of megabytes all the time. The system must find and zero the pages of such
    a block, for one thread of a process after the other: on the 16 cores of a machine with an H100, that took a quarter
    of the time of decoding lists. A variable that the user has set is kept.
    """
    global _keeps_freed
    _keeps_freed = True
    _tell_malloc(_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", 32 << 20)  # the most that glibc accepts
    _tell_malloc(_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", 1 << 30)


def give_unused_back() -> None:
    """Give the freed memory that Arrow and glibc keep back to the system, after work that is done once."""
    if _keeps_freed:
        return
    import pyarrow as pa  # here, because it reads the environment that this module prepares

    pa.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class GiveBack:
    """Gives unused memory back, at most once a second; call it often, such as after each step.

    Holes of a heap that are not filled again stay, and others are added: over twenty steps of layers of 1024, a heap
    grew from one and a half to three times the memory in use. Allocating again costs a step less than 0.01 s.
    """

    def __init__(self) -> None:
        self._at = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._at >= 1:
            give_unused_back()
            self._at = time.monotonic()


def _tell_malloc(parameter: int, variable: str, size: int) -> None:
    if variable not in os.environ:
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(parameter, size)
