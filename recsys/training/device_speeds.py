"""Measured speeds of products, memory and exchanges of a device: one operator at a time, at many sizes."""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
import torch.distributed as dist

from recsys.memory.operators import dtype_name
from recsys.memory.speeds import BATCHED_SIDES, KINDS, MATMUL_SIDES, MOST_MATMUL_FLOPS, Curve
from recsys.runtime.live import Task
from recsys.runtime.uniform import kept
from recsys.runtime.world import World
from recsys.step.exchange import SumOverRanks

_BYTES = tuple(1 << power for power in (12, 16, 20, 23, 26))  # moved by operators
_SENT = tuple(1 << power for power in (10, 14, 18, 22, 25))  # sent by a rank
_TURNS_BYTES, _MOST_TURNS = 32 << 20, 64  # of tensors that are used in turn
_MEASURED_S = 0.004
_LONGEST_MATMUL_S = 0.1


def measure_operators(world: World) -> dict[str, Any]:
    """Return `matmul`, `batched`, `moved` and `exchanged` of `Speeds`, measured while all ranks compute."""
    dtypes = (torch.float32, torch.bfloat16)
    with Task("measuring products of matrices", is_shown=world.rank == 0):
        matmul = {dtype_name(dtype): _matmuls(dtype, world) for dtype in dtypes}
        batched = {dtype_name(dtype): _batched(dtype, world) for dtype in dtypes}
    with Task("measuring operators and exchanges", is_shown=world.rank == 0):
        moved = {kind: _moved(kind, world) for kind in KINDS}
        collectives = ("all_to_all", "all_reduce") if world.world_size > 1 else ()
        exchanged = {name: _exchanged(name, world) for name in collectives}
    return {"matmul": matmul, "batched": batched, "moved": moved, "exchanged": exchanged}


def _seconds(action: Callable[[torch.Tensor], Any], given: torch.Tensor, world: World) -> float:
    """Return the median seconds of an action on tensors like `given`, while all ranks do the same.

    In a step, most inputs of an operator are no longer in the cache of a core. Neither are these tensors, which are
    used in turn.
    """
    num_bytes = given.numel() * given.element_size()
    turns = cycle([given.clone() for _ in range(min(_MOST_TURNS, 1 + _TURNS_BYTES // num_bytes))])
    action(next(turns))
    times: list[float] = []
    until = time.monotonic() + _MEASURED_S
    while len(times) < 3 or (time.monotonic() < until and len(times) < 200):
        tensor = next(turns)
        start = time.perf_counter()
        action(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _matmuls(dtype: torch.dtype, world: World) -> dict[str, float]:
    rates = {}
    most_flops = MOST_MATMUL_FLOPS
    for rows, inner, columns in sorted(product(MATMUL_SIDES, repeat=3), key=math.prod):
        flops = 2 * rows * inner * columns
        if flops > most_flops:
            break
        a = torch.ones(rows, inner, dtype=dtype, device=world.device)
        b = torch.ones(inner, columns, dtype=dtype, device=world.device)
        seconds = _seconds(partial(torch.matmul, other=b), a, world)
        rates[f"{rows} {inner} {columns}"] = flops / seconds
        if seconds > _LONGEST_MATMUL_S:  # BF16 on processors without it: all sizes would take minutes
            most_flops = flops
    return rates


def _batched(dtype: torch.dtype, world: World) -> Curve:
    curve = []
    for side in BATCHED_SIDES:
        a = torch.ones(1 + (1 << 18) // side**2, side, side, dtype=dtype, device=world.device)
        seconds = _seconds(lambda matrices: torch.bmm(matrices, matrices.mT), a, world)
        curve.append((2.0 * side**3, 2.0 * side**3 * len(a) / seconds))
    return curve


def _operator(kind: str, size: int, device: torch.device) -> tuple[Callable[[torch.Tensor], Any], torch.Tensor]:
    """Return an operator of a kind, and a tensor for it, of which it reads and writes `size` bytes in all."""
    if kind == "plain":
        return lambda numbers: numbers * 2, torch.ones(size // 8, device=device)
    if kind == "costly":
        return torch.sigmoid, torch.ones(size // 8, device=device)
    if kind == "indexed":
        rows = max(1, size // (2 * 64))
        return partial(torch.index_select, dim=0, index=torch.randperm(rows, device=device)), torch.ones(
            rows, 16, device=device
        )
    columns = torch.arange(128, device=device)  # a byte of each, and eight of a row's number
    return lambda numbers: kept(1, numbers, columns, 0.5), torch.arange(max(1, size // 136), device=device)


def _moved(kind: str, world: World) -> Curve:
    """Return the time of an operator by bytes, without the time of a call, since calls are counted separately."""
    times = [(float(size), _seconds(*_operator(kind, size, world.device), world)) for size in (64, *_BYTES)]
    return [(size, max(seconds - times[0][1], 1e-9)) for size, seconds in times[1:]]


def _exchanged(name: str, world: World) -> Curve:
    curve = []
    for size in _SENT:
        count = size // 4 // world.world_size * world.world_size
        sent, received = torch.zeros(count, device=world.device), torch.zeros(count, device=world.device)

        def action(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            if name == "all_reduce":
                SumOverRanks(sent).wait()
            else:
                dist.all_to_all_single(received, sent)

        for _ in range(2):
            action()
        times = []
        for _ in range(8):  # as many on all ranks
            start = time.perf_counter()
            action()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        curve.append((float(size), statistics.median(times)))
    return curve
