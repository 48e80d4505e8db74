"""Reusable blocks of memory for batches and windows.

A block is free again when no array or tensor views it any more and its last copy to the GPU is done. So a batch that is
held keeps its values, and a loop that drops its batches runs in constant memory.
"""

import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64


class Fence:
    """Marks the end of the last copy from a block to the GPU."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None

    def record(self) -> None:
        """Note that work queued on the current CUDA stream so far reads the block."""
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        """Return when the copy is done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class Block:
    """Cuts arrays out of a pool's memory, one after another.

    Attributes:
        file: in a shared pool, the file descriptor through which another process maps the memory.
    """

    def __init__(self, memory: np.ndarray, fence: Fence, file: int | None = None) -> None:
        self._memory, self.fence, self.file = memory, fence, file
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return the next part of the block as an array of this shape and type, not initialised."""
        array = np.ndarray(shape, dtype, self._memory, self._used)  # raises beyond the end
        self._used += padded(array.nbytes)
        return array

    @property
    def used(self) -> np.ndarray:
        """The memory of all arrays so far, [bytes] uint8."""
        return self._memory[: self._used]


def padded(num_bytes: int) -> int:
    """Return the bytes of a block that an array of `num_bytes` takes, rounded up for alignment."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class BlockPool:
    """Gives out blocks, reusing free ones first; safe to call from several threads.

    Args:
        pin: use page-locked memory, for copies to a GPU. share: use memory that other processes can map.
    """

    def __init__(self, pin: bool = False, share: bool = False) -> None:
        self._pin, self._share = pin, share
        self._free: dict[int, deque[_Memory]] = {}  # by size, the longest free first
        self._all: set[_Memory] = set()  # in use or free
        self._most_used = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        with self._lock:
            return self._total()

    def inodes(self) -> list[int]:
        """Return the inodes of a shared pool's blocks, in use or free."""
        with self._lock:
            return [os.fstat(memory.file).st_ino for memory in self._all if memory.file is not None]

    def take(self, num_bytes: int) -> Block:
        """Return a block of at least `num_bytes` bytes."""
        # Sizes vary a little from request to request, so they are rounded up to a power of two. CUDA's allocator locks
        # that much anyway, and in other memory, pages that are never written take no space.
        size = 1 << max(12, (num_bytes - 1).bit_length())
        with self._lock:
            fitting = next((n for n in (size, 2 * size, 4 * size) if self._free.get(n)), None)
            if fitting is not None:
                memory = self._free[fitting].popleft()
            else:
                self._make_room(size)
                memory = _Memory(size, self._pin, self._share)
                self._all.add(memory)
            memory.fence.wait()
            return Block(memory.lend(self._free.setdefault(memory.size, deque())), memory.fence, memory.file)

    def _total(self) -> int:
        return sum(memory.size for memory in self._all)

    def _make_room(self, size: int) -> None:
        """Drop free blocks, small ones first, until all blocks take no more bytes than were ever in use at once."""
        total = self._total() + size
        free_bytes = sum(num_bytes * len(blocks) for num_bytes, blocks in self._free.items())
        self._most_used = max(self._most_used, total - free_bytes)
        for num_bytes in sorted(self._free):
            while self._free[num_bytes] and total > self._most_used:
                memory = self._free[num_bytes].popleft()
                memory.fence.wait()
                self._all.remove(memory)
                total -= num_bytes


class _Memory:
    """The memory of a block, and the fence of its copies."""

    def __init__(self, size: int, pin: bool, share: bool) -> None:
        self.size, self.fence = size, Fence()
        self.file: int | None = None
        if pin:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # outside malloc's heaps, where blocks would leave holes
        if share:  # not in /dev/shm, which often has only 64 MiB in containers
            self.file, flags = os.memfd_create("recsys-windows"), mmap.MAP_SHARED
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, size)
        self._memory = torch.frombuffer(
            mmap.mmap(-1 if self.file is None else self.file, size, flags), dtype=torch.uint8
        )

    def lend(self, free: "deque[_Memory]") -> np.ndarray:
        """Return the memory as an array; once that and all its views are gone, this object is appended to `free`."""
        lent = self._memory.numpy()  # a new array each time, which all views refer to
        # The callback runs in whichever thread drops the last view, even one that holds the pool's lock.
        self._lent = weakref.ref(lent, lambda _: free.append(self))
        return lent
