"""Ranks that are threads of a test, for code in which ranks gather values from each other."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class Rank:
    """A substitute for `World`; all ranks must call the same methods."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world_size = rank, len(values)
        self._barrier, self._values = barrier, values

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def agree(self, action: Callable[[], Any]) -> Any:
        return action()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(tensor)).sum(0)

    def exchange(self, values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return torch.cat([of_rank[self.rank] for of_rank in self.gather(values.split(sizes))])


ALONE = Rank(0, threading.Barrier(1), [None])


def on_ranks(num_ranks: int, compute: Callable[[Any], Any]) -> list[Any]:
    """Return what each rank computes with its `Rank`; if one fails, the others wait for a minute."""
    barrier, values = threading.Barrier(num_ranks, timeout=60), [None] * num_ranks
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(compute, [Rank(rank, barrier, values) for rank in range(num_ranks)]))
