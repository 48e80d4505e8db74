"""Time and memory of attention on jagged lists, in buckets of similar lengths, and on lists padded to the longest.

See `benchmark.py attention --help`. Lists have a mean of 20 items and at most 200. It compares attention alone, and a
whole layer of SASRec, forward and backward, on one thread.
"""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys.config.choices import SequenceLayer
from recsys.models.jagged import Lists, PaddedLists
from recsys.models.sequence_layers import Block
from recsys.runtime.versions import installed_versions

NUM_LISTS, MEAN, LONGEST, DIM, HEADS = 512, 20, 200, 64, 2
Pass = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # returns the result, and the gradient of the input


def draw_lengths() -> np.ndarray:
    """Return lengths from a geometric distribution, one of them the greatest allowed."""
    lengths = np.random.default_rng(0).geometric(1 / MEAN, NUM_LISTS).clip(max=LONGEST)
    lengths[0] = LONGEST
    return lengths


def attention(lengths: np.ndarray, x: torch.Tensor, is_padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with queries, keys and values of each item, [items, 3 * dim]."""
    x = x.clone().requires_grad_()
    lists: Lists | PaddedLists = Lists.of(lengths, x.device)
    if is_padded:
        lists = PaddedLists(torch.from_numpy(lengths), len(x), LONGEST)
    result = lists.attend(x, HEADS)
    result.backward(torch.ones_like(result))
    assert x.grad is not None
    return result.detach(), x.grad


def layer(block: Block, lengths: np.ndarray, x: torch.Tensor, is_padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a layer of SASRec on vectors of items, [items, dim]; if padded, on all places of all lists."""
    x, lists = x.clone().requires_grad_(), Lists.of(lengths, x.device)
    of_block, places = x, torch.arange(len(x))
    if is_padded:
        places = lists.row * LONGEST + torch.from_numpy(lengths)[lists.row] - 1 - lists.from_end
        of_block = x.new_zeros(len(lengths) * LONGEST, DIM).index_copy(0, places, x)
        lists = Lists.of(np.full(len(lengths), LONGEST), x.device)
    result = block(of_block, lists)[places]
    result.backward(torch.ones_like(result))
    assert x.grad is not None
    return result.detach(), x.grad


def peak_bytes(run: Pass) -> int:
    """Return by how many bytes a pass raises the memory of a process, which is forked for it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with open("/proc/self/statm") as file:
            before = int(file.read().split()[1]) * resource.getpagesize()
        run()
        os.write(writer, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reader, 100))


def compare(passes: dict[str, Pass], repeats: int) -> dict[str, Any]:
    """Return seconds and bytes of the jagged and the padded pass, and how much their results differ."""
    results = {name: run() for name, run in passes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, run in passes.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peaks = {name: peak_bytes(run) for name, run in passes.items()}
    apart = [float((a - b).abs().max()) for a, b in zip(*results.values(), strict=True)]
    return {
        "seconds": medians,
        "peak_bytes": peaks,
        "of_padded": {"time": medians["jagged"] / medians["padded"], "memory": peaks["jagged"] / peaks["padded"]},
        "largest_difference": {"result": apart[0], "gradient": apart[1]},
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py attention`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = draw_lengths()
    block = Block(SequenceLayer.sasrec, DIM, HEADS, None, 0.0)
    qkv, x = torch.randn(lengths.sum(), 3 * DIM), torch.randn(lengths.sum(), DIM)
    cases = {"attention": partial(attention, lengths, qkv), "layer": partial(layer, block, lengths, x)}
    comparisons = {}
    for name, case in cases.items():
        passes: dict[str, Pass] = {"jagged": partial(case, False), "padded": partial(case, True)}
        comparisons[name] = compare(passes, arguments.repeats)
        print(name, comparisons[name], flush=True)
    shape = {"lists": NUM_LISTS, "mean": float(lengths.mean()), "longest": LONGEST, "dim": DIM, "heads": HEADS}
    return {**shape, **comparisons, "versions": installed_versions()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py attention`."""
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON file to write")
