"""Memory of this process, now and over the course of a run."""

import ctypes
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import torch

from recsys.runtime.environment import process_bytes

_MOST_SAMPLES = 1200
_MOST_SPANS = 600
_RECENT_SPANS = 3
_SAME_BYTES = 1 << 20


def rss() -> int:
    """Return this process's resident memory, in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """Return the peak of this process's resident memory since it began or `reset_peak_rss`, in bytes."""
    peak = process_bytes("status", "VmHWM")
    if peak is not None:
        return peak
    # For other systems: on Linux this would include what a launcher took before it became this program.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_rss() -> None:
    """Reset `peak_rss`, if the kernel allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def heap() -> tuple[int, int] | None:
    """Return the bytes that malloc has given out, and those that it keeps free; None without glibc 2.33 or later."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _MallInfo
    sizes = mallinfo2().sizes
    hblkhd, uordblks, fordblks = sizes[4], sizes[7], sizes[8]  # mapped by themselves; of heaps, in use and free
    return hblkhd + uordblks, fordblks


class BudgetExceeded(MemoryError):
    """This process has taken more memory than `memory.budget`."""


@dataclass
class Span:
    """A phase, from beginning to end.

    Attributes:
        start_s, stop_s: seconds since the timeline began; peak_bytes: peak of resident memory between them.
    """

    phase: str
    step: int
    start_s: float
    stop_s: float
    peak_bytes: int


class Timeline:
    """Resident memory over the course of a run: at most ten samples a second, and the true peak of every phase.

    Args:
        budget_bytes: resident memory that `check` allows; None: any.

    Attributes:
        baseline_bytes: resident memory when it began; step: the one that is being trained, set by the trainer.
        spans: phases in order; a phase inside another splits the outer one. If there are many, some are dropped, but
            never the highest of a phase.
        samples: (seconds, bytes), evenly thinned when there are many.
        device_peaks: by phase, the most that a GPU's allocator gave out; empty without a GPU.
        seen_bytes: the peak of the last phases at the last `check`.
        failed_phase: the innermost phase that an error ended, if any.
        device_reserved_peak: the most that the allocator has reserved on the GPU; 0 without a GPU.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        self._budget = budget_bytes
        self.baseline_bytes, self.step = rss(), 0
        self.spans: list[Span] = []
        self.samples: list[tuple[float, int]] = []
        self.device_peaks: dict[str, int] = {}
        self.device_reserved_peak = 0
        self._device, self._start, self._interval = device, time.monotonic(), 0.1
        self.seen_bytes = 0
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._phases, self.failed_phase = ["other"], ""
        reset_peak_rss()
        self._begin()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as a phase of this name."""
        self._end()
        self._phases.append(name)
        self._begin()
        try:
            yield
        except BaseException:
            self.failed_phase = self.failed_phase or name
            raise
        finally:
            self._end()
            self._phases.pop()
            self._begin()

    def check(self) -> None:
        """Raise BudgetExceeded if this process has taken more than its budget."""
        if self._budget is None:
            return
        peak = self.seen_bytes = max(rss(), *(span.peak_bytes for span in self.spans[-_RECENT_SPANS:]))
        if peak > self._budget:
            raise BudgetExceeded(
                f"this process has used {peak / 2**20:,.0f} MiB, but memory.budget allows {self._budget / 2**20:,.0f}"
            )

    def peak(self) -> Span:
        """Return the span with the highest peak so far; its step is that of the peak."""
        self._end()
        self._begin()
        with self._lock:
            highest = max(span.peak_bytes for span in self.spans)
            # Memory that has been freed often stays with the process: the first span is the one that asked for it.
            return next(span for span in self.spans if span.peak_bytes >= highest - _SAME_BYTES)

    def peaks(self) -> dict[str, int]:
        """Return the peak of each phase."""
        peaks: dict[str, int] = {}
        for span in self.spans:
            peaks[span.phase] = max(peaks.get(span.phase, 0), span.peak_bytes)
        return peaks

    def close(self) -> None:
        """End the last phase and the thread."""
        self._stopped.set()
        self._thread.join()
        self._end()

    def _seconds(self) -> float:
        return round(time.monotonic() - self._start, 3)

    def _begin(self) -> None:
        with self._lock:
            reset_peak_rss()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            if self.spans and self.spans[-1].phase == self._phases[-1]:
                return  # the same phase goes on
            if len(self.spans) >= _MOST_SPANS:
                self._thin_spans()
            now = rss()
            self.spans.append(Span(self._phases[-1], self.step, self._seconds(), self._seconds(), now))

    def _end(self) -> None:
        with self._lock:
            self._observe()
            self.spans[-1].stop_s = self._seconds()
            if self._device.type == "cuda":
                phase, peak = self._phases[-1], torch.cuda.max_memory_allocated(self._device)
                self.device_peaks[phase] = max(self.device_peaks.get(phase, 0), peak)
                reserved = torch.cuda.max_memory_reserved(self._device)
                self.device_reserved_peak = max(self.device_reserved_peak, reserved)

    def _thin_spans(self) -> None:
        """Drop every second span of each phase, but not the highest."""
        highest = {span.phase: span for span in sorted(self.spans, key=lambda span: span.peak_bytes)}
        number, kept = dict.fromkeys(highest, 0), []
        for span in self.spans:
            number[span.phase] += 1
            if number[span.phase] % 2 or span is highest[span.phase]:
                kept.append(span)
        self.spans = kept

    def _observe(self) -> None:
        """Record the peak of the current span, and the step in which it rose."""
        span, now = self.spans[-1], max(peak_rss(), rss())
        if now > span.peak_bytes:
            span.peak_bytes, span.step = now, self.step

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval):
            with self._lock:
                self._observe()
                self.samples.append((self._seconds(), rss()))
                if len(self.samples) >= _MOST_SAMPLES:
                    del self.samples[::2]
                    self._interval *= 2


def process_memory(device: torch.device, timeline: Timeline) -> dict[str, Any]:
    """Return the memory of this process, of Arrow in it, and of the GPU if there is one: now and at the peak."""
    on_gpu, now = device.type == "cuda", rss()
    peaks = timeline.device_peaks.values()
    return {
        "rss_bytes": now,
        "peak_rss_bytes": max(timeline.peak().peak_bytes, now),
        "pss_bytes": process_bytes("smaps_rollup", "Pss"),  # a page of several processes is divided among them
        "locked_bytes": process_bytes("status", "VmLck"),
        "arrow_bytes": pa.default_memory_pool().bytes_allocated(),
        "arrow_peak_bytes": pa.default_memory_pool().max_memory(),
        "device_peak_allocated_bytes": max(peaks, default=0) if on_gpu else None,
        "device_peak_reserved_bytes": timeline.device_reserved_peak if on_gpu else None,
        "process_id": os.getpid(),
    }


def allocator(device: torch.device) -> dict[str, Any] | None:
    """Return statistics of CUDA's caching allocator; None on CPU."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    active, reserved = stats["active_bytes.all.current"], stats["reserved_bytes.all.current"]
    return {
        "allocated_bytes": stats["allocated_bytes.all.current"],
        "active_bytes": active,
        "reserved_bytes": reserved,
        "inactive_split_bytes": stats["inactive_split_bytes.all.current"],
        "fragmentation": (reserved - active) / reserved if reserved else 0.0,
        "retries": stats["num_alloc_retries"],
        "out_of_memory_errors": stats["num_ooms"],
    }
