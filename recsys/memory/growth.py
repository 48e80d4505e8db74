"""Memory growth over the steps of a run: how fast, of what kind, and when memory would run out."""

import time
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recsys.memory.measure import heap, rss
from recsys.report.text import size
from recsys.runtime.machine import Topology

_WARM_UP = 300  # steps after which heaps and caches have mostly found their size
_LEAST_SAMPLES, _MOST_SAMPLES = 8, 512
_LEAST_SECONDS = 0.05  # between two samples, each of which takes up to a millisecond
_AHEAD = 5  # growth is assumed to last for so many times the steps that showed it
_SLOWER = 0.85  # growth is assumed to end if its pace in the later half is below this share of the earlier pace
_NAMED_SHARE = 0.1  # of all growth: kinds with a larger share are named
_PROCESS, _GPU, _OTHER = "process", "GPU", "Python's objects and all else"


class Growth:
    """Samples of this process's and its GPU's memory by kind over the steps, bounded in number.

    Args:
        num_steps: the last step of the run.
    """

    def __init__(self, device: torch.device, topology: Topology, num_steps: int) -> None:
        self._device, self._num_steps = device, num_steps
        self._limits = {_PROCESS: topology.host_share_bytes} | (
            {_GPU: topology.device_bytes} if topology.on_gpu else {}
        )
        self._first: int | None = None
        self._steps: list[int] = []
        self._samples: list[dict[str, int]] = []
        self._calls, self._every, self._last_s, self._next_look = 0, 1, 0.0, 0
        self._suspected = False
        self._warning: str | None = None

    def sample(self, step: int, loader_bytes: dict[str, int]) -> str | None:
        """Sample memory after a step; return a warning, once, if it would run out before the last step.

        Args:
            loader_bytes: bytes of the loader's blocks, by kind.
        """
        self._first = step if self._first is None else self._first
        self._calls += 1
        now = time.monotonic()
        if step - self._first < _WARM_UP or self._calls % self._every or now - self._last_s < _LEAST_SECONDS:
            return None
        self._last_s = now
        self._steps.append(step)
        self._samples.append(_kinds(self._device, loader_bytes))
        if len(self._steps) >= _MOST_SAMPLES:
            del self._steps[::2], self._samples[::2]
            self._every *= 2
        if step < self._next_look or self._warning is not None:
            return None
        self._next_look = step + (step - self._first) // 8
        sooner = self._runs_out()
        if sooner is not None and self._suspected:  # seen for a second time
            self._warning = sooner
        self._suspected = sooner is not None
        return self._warning

    def _recent(self) -> tuple[np.ndarray, list[dict[str, int]]]:
        """Return the steps of the later half of the samples, and the samples themselves."""
        if not self._steps:
            return np.empty(0), []
        start = int(np.searchsorted(self._steps, (self._steps[0] + self._steps[-1]) / 2))
        return np.array(self._steps[start:], float), self._samples[start:]

    def _slopes(self) -> dict[str, float]:
        """Return how many bytes a step each kind has steadily grown lately; empty if there are too few samples."""
        steps, samples = self._recent()
        if len(steps) < _LEAST_SAMPLES:
            return {}
        slopes = {kind: _steady(steps, np.array([sample[kind] for sample in samples], float)) for kind in samples[0]}
        explained = sum(slope for kind, slope in slopes.items() if not kind.startswith((_PROCESS, _GPU)))
        return slopes | {_OTHER: max(0.0, slopes[_PROCESS] - explained)}

    def _runs_out(self) -> str | None:
        slopes, (steps, samples) = self._slopes(), self._recent()
        for total, limit in self._limits.items():
            slope = slopes.get(total, 0.0)
            if slope <= 0 or _slows_down(steps, np.array([sample[total] for sample in samples], float)):
                continue
            num_steps = (limit - samples[-1][total]) / slope
            if num_steps <= _AHEAD * (steps[-1] - steps[0]) and steps[-1] + num_steps < self._num_steps:
                grown = describe_growth({kind: round(1000 * value) for kind, value in slopes.items()}, total)
                what = "the GPU" if total == _GPU else "this process"
                return (
                    f"memory grows by {grown}: at this rate {what} exceeds its limit of {size(limit)} "
                    f"by about step {int(steps[-1] + num_steps):,} of {self._num_steps:,}"
                )
        return None

    def report(self) -> dict[str, Any] | None:
        """Return the entry of rank_K.json on growth; None after too few steps."""
        slopes, (steps, _) = self._slopes(), self._recent()
        if not slopes:
            return None
        return {
            "first_step": int(steps[0]),
            "last_step": int(steps[-1]),
            "bytes_per_1000_steps": {kind: round(1000 * slope) for kind, slope in slopes.items()},
            "warning": self._warning,
        }


def describe_growth(by_kind: dict[str, int], total: str = _PROCESS) -> str:
    """Return in words how much memory grows, and which kinds of it.

    Args:
        by_kind: growth in bytes per 1,000 steps.
    """
    slopes = {kind: slope for kind, slope in by_kind.items() if kind.startswith(_GPU) == (total == _GPU)}
    grown = slopes.pop(total)
    named = [kind for kind in sorted(slopes, key=lambda kind: -slopes[kind]) if slopes[kind] > _NAMED_SHARE * grown]
    shown = ", ".join(f"{kind}: {size(slopes[kind])}" for kind in named)
    return f"{size(grown)} in 1,000 steps" + (f" ({shown})" if shown and grown > 0 else "")


def memory_now(device: torch.device, loader_bytes: dict[str, int]) -> dict[str, int]:
    """Return the bytes of this process and of its GPU by kind, as far as they can be read in microseconds."""
    kinds = {_PROCESS: rss(), "Arrow": pa.default_memory_pool().bytes_allocated()}
    kinds |= {f"loader's {kind.removesuffix('_bytes')} blocks": value for kind, value in loader_bytes.items()}
    if device.type == "cuda":
        kinds[_GPU] = torch.cuda.memory_reserved(device)
        kinds[f"{_GPU} tensors"] = torch.cuda.memory_allocated(device)
    return kinds


def _kinds(device: torch.device, loader_bytes: dict[str, int]) -> dict[str, int]:
    kinds, used_and_free = memory_now(device, loader_bytes), heap()
    if used_and_free is not None:
        kinds["tensors and other blocks of malloc"], kinds["what malloc keeps free"] = used_and_free
    return kinds


def _steady(steps: np.ndarray, values: np.ndarray) -> float:
    """Return the least slope of all samples and of either half; 0 if ups and downs may explain it.

    What happens once, such as a first evaluation, raises one half at most.
    """
    slopes = [_slope(steps, values), *_halves(steps, values)]
    least = min(slopes, key=abs)
    rest = values - least * steps
    noise = float(np.median(np.abs(rest - np.median(rest))))
    same_sign = min(slopes) > 0 or max(slopes) < 0
    return least if same_sign and abs(least) * (steps[-1] - steps[0]) > 4 * noise else 0.0


def _slows_down(steps: np.ndarray, values: np.ndarray) -> bool:
    earlier, later = _halves(steps, values)
    return later < _SLOWER * earlier


def _halves(steps: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    half = len(steps) // 2
    return _slope(steps[:half], values[:half]), _slope(steps[half:], values[half:])


def _slope(steps: np.ndarray, values: np.ndarray) -> float:
    """Return the median slope between samples that lie a sixth of all apart.

    A jump affects a sixth of these pairs at most. It would affect up to half of all pairs, which Theil and Sen use.
    """
    apart = max(1, len(steps) // 6)
    return float(np.median((values[apart:] - values[:-apart]) / (steps[apart:] - steps[:-apart])))
