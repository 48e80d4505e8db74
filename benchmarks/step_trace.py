"""What a GPU and its host do in a few steps, according to torch's profiler."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

TRACED_STEPS = 5
NUM_SHOWN = 16  # longest operations of the host that are listed


def traced(step: Callable[[], Any], path: Path | None) -> dict[str, Any]:
    """Trace a few steps; return the share of time in which the GPU ran no kernel, and what the host did."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        start = time.perf_counter()
        for _ in range(TRACED_STEPS):
            step()
        seconds = time.perf_counter() - start
        if on_gpu:
            torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    return {"idle_share": idle_share(profiler), "host_ms_a_step": host_times(profiler, seconds)}


def host_times(profiler: Any, seconds: float) -> list[dict[str, float]]:
    """Return how the training thread, and then that of autograd if there is one, spent the traced steps.

    Each entry has ms per step of the longest operations and CUDA calls, without those that they called, and `python`
    for the time outside of all.
    """
    threads: dict[int, dict[str, float]] = {}
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CPU:
            times = threads.setdefault(event.thread, {})
            times[event.name] = times.get(event.name, 0.0) + event.self_cpu_time_total / 1000
    # Threads of the loader call CUDA too, but have fewer different names than these two.
    both = sorted(threads.values(), key=len, reverse=True)[:2]
    shown = []
    for times in both:
        times["python"] = 1000 * seconds - sum(times.values())
        longest = sorted(times.items(), key=lambda each: -each[1])[:NUM_SHOWN]
        shown.append({name: round(ms / TRACED_STEPS, 3) for name, ms in longest})
    return shown


def idle_share(profiler: Any) -> float | None:
    """Return the share of a profile in which the GPU ran no kernel, or None if the profile has no kernel."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        # Ranges that the host marks are shown on the device too, from their first kernel to their last.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and not event.name.startswith("##")
    )
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for begin, stop in spans:
        busy, end = busy + max(0.0, stop - max(begin, end)), max(end, stop)
    return 1 - busy / (end - spans[0][0])
