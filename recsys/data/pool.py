"""Blocks of memory that batches and windows lie in, used again.

A block is used again when nothing views it any more, neither an array nor a tensor, and its last copy to the GPU is
done. So whoever keeps a batch keeps its values, and a loop that lets go of them runs in constant memory.
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
    """Marks the end of the last copy out of a block."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None

    def record(self) -> None:
        """Note that the block is read by what has been queued on the current CUDA stream so far."""
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        """Return when the copy is done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class Block:
    """Cuts arrays out of a piece of memory of a pool.

    Attributes:
        file: of a shared pool, the descriptor by which another process maps the memory.
    """

    def __init__(self, memory: np.ndarray, fence: Fence, file: int | None = None) -> None:
        self._memory, self.fence, self.file = memory, fence, file
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return the next part of the block as an array of this shape and type, not initialised."""
        array = np.ndarray(shape, dtype, self._memory, self._used)  # which refuses to go beyond the end
        self._used += padded(array.nbytes)
        return array

    @property
    def used(self) -> np.ndarray:
        """The memory of all arrays so far, [bytes] uint8."""
        return self._memory[: self._used]


def padded(num_bytes: int) -> int:
    """Return what an array of so many bytes takes of a block."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class BlockPool:
    """Gives out blocks, free ones again before new ones; safe to call from several threads.

    Args:
        pin: page-locked memory of a GPU machine. share: memory that other processes can map.
    """

    def __init__(self, pin: bool = False, share: bool = False) -> None:
        self._pin, self._share = pin, share
        self._free: dict[int, deque[_Held]] = {}  # by size, those that have been free for longest first
        self._held: set[_Held] = set()  # all of them
        self._most_used = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        with self._lock:
            return self._total()

    def inodes(self) -> list[int]:
        """Return of a shared pool's blocks, in use or free, the numbers of their files."""
        with self._lock:
            return [os.fstat(held.file).st_ino for held in self._held if held.file is not None]

    def take(self, num_bytes: int) -> Block:
        """Return a block of at least `num_bytes` bytes."""
        # What is asked for differs a little from time to time. CUDA's allocator locks a power of two anyway; of other
        # memory, pages that were never written to take none.
        size = 1 << max(12, (num_bytes - 1).bit_length())
        with self._lock:
            fitting = next((each for each in (size, 2 * size, 4 * size) if self._free.get(each)), None)
            if fitting is not None:
                held = self._free[fitting].popleft()
            else:
                self._make_room(size)
                held = _Held(size, self._pin, self._share)
                self._held.add(held)
            held.fence.wait()
            return Block(held.lend(self._free.setdefault(held.size, deque())), held.fence, held.file)

    def _total(self) -> int:
        return sum(held.size for held in self._held)

    def _make_room(self, size: int) -> None:
        """Drop free blocks, small ones first, unless no more bytes are held than have been in use at once."""
        total = self._total() + size
        free_bytes = sum(num_bytes * len(blocks) for num_bytes, blocks in self._free.items())
        self._most_used = max(self._most_used, total - free_bytes)
        for num_bytes in sorted(self._free):
            while self._free[num_bytes] and total > self._most_used:
                held = self._free[num_bytes].popleft()
                held.fence.wait()
                self._held.remove(held)
                total -= num_bytes


class _Held:
    """Memory of a pool, and the fence of its copies."""

    def __init__(self, size: int, pin: bool, share: bool) -> None:
        self.size, self.fence = size, Fence()
        self.file: int | None = None
        if pin:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # outside malloc's heaps, where blocks leave holes
        if share:  # not in /dev/shm, of which containers have 64 MiB
            self.file, kind = os.memfd_create("recsys-windows"), mmap.MAP_SHARED
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, size)
        self._memory = torch.frombuffer(
            mmap.mmap(-1 if self.file is None else self.file, size, kind), dtype=torch.uint8
        )

    def lend(self, free: "deque[_Held]") -> np.ndarray:
        """Return the memory; when that array and all that are cut out of it are gone, this is in `free`."""
        lent = self._memory.numpy()  # arrays and tensors that view it refer to this one, which is new each time
        # Whatever thread lets go of the last one runs this, maybe one that holds the pool's lock.
        self._lent = weakref.ref(lent, lambda _: free.append(self))
        return lent
