"""The peak of live tensors of a piece of code, run on fake tensors that take no memory."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.runtime.environment import HEAP_BLOCK_BYTES


class LivePeak(TorchDispatchMode):
    """Counts the bytes of storages that operators make inside it, while they live.

    Args:
        outside: tensors whose memory is not counted, such as a model's parameters and its inputs.
        heap_block_bytes: larger blocks do not come from the heap.
        apart: bytes, of those that live, which are accounted for elsewhere; asked at every new peak.

    Attributes:
        live: bytes now; highest: the most that has been; peak: the most that `live` less `apart` has been.
        heap_peak: the most that the blocks of the heap have taken together.
    """

    def __init__(
        self,
        outside: Iterable[torch.Tensor] = (),
        apart: Callable[[], int] = lambda: 0,
        heap_block_bytes: int = HEAP_BLOCK_BYTES,
    ) -> None:
        super().__init__()
        self.live = self.highest = self.peak = 0
        self._on_heap = self.heap_peak = 0
        self._apart, self._heap_block_bytes = apart, heap_block_bytes
        self._known: dict[int, Any] = {id(s): s for s in (t.untyped_storage() for t in outside)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.live += size
        if self.live > self.highest:
            self.highest = self.live
            self.peak = max(self.peak, self.live - self._apart())
        if size < self._heap_block_bytes:
            self._on_heap += size
            self.heap_peak = max(self.heap_peak, self._on_heap)

    def _forget(self, key: int, size: int) -> None:
        self.live -= size
        self._on_heap -= size if size < self._heap_block_bytes else 0
        del self._known[key]


def storage_bytes(tensors: Any) -> int:
    """Return the bytes of the storages of tensors, each once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
