"""How far apart neighbouring rows of a file are trained; see `benchmark.py shuffle --help`."""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from recsys.data.order import EpochOrder, RowGroups, Window, slice_bounds


def training_places(num_groups: int, group_rows: int, num_streams: int, groups_in_window: int) -> np.ndarray:
    """Return when each row of the files is trained, int64 [rows], as its place in its stream."""
    zeros = np.zeros(num_groups, np.int32)
    rows = np.full(num_groups, group_rows, np.int64)
    groups = RowGroups(("file",), zeros, np.arange(num_groups, dtype=np.int32), rows, rows)
    slots = slice_bounds(num_streams, num_streams)
    order = EpochOrder(groups, 1, 0, True, slots, groups_in_window * group_rows)
    places = np.empty(num_groups * group_rows, np.int64)
    for v in range(num_streams):
        trained = np.concatenate([_rows(window, group_rows) for window in order.windows(v)])
        places[trained] = np.arange(len(trained))
    return places


def _rows(window: Window, group_rows: int) -> np.ndarray:
    pieces = [np.arange(s.start, s.stop) + s.row_group * group_rows for s in window.segments]
    return np.concatenate(pieces)[window.permutation()]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py shuffle`: return for each setting the distances of neighbouring rows of the file."""
    results = []
    steps = arguments.groups * arguments.group_rows // arguments.batch_size
    print("| num_streams | row groups in a window | median distance, of the epoch | in the same batch, times chance |")
    print("| --- | --- | ---: | ---: |")
    for num_streams, in_window in product((1, 8, 64), (1, 4, 16)):
        places = training_places(arguments.groups, arguments.group_rows, num_streams, in_window)
        step = places * num_streams // arguments.batch_size
        distance = float(np.median(np.abs(np.diff(places)))) * num_streams / len(places)
        together = float(np.mean(np.diff(step) == 0)) * steps
        print(f"| {num_streams} | {in_window} | {distance:.2%} | {together:.1f} |", flush=True)
        results.append(
            {
                "num_streams": num_streams,
                "row_groups_in_window": in_window,
                "median_distance_of_epoch": round(distance, 5),
                "same_batch_times_chance": round(together, 2),
            }
        )
    sizes = {
        "row_groups": arguments.groups,
        "rows_in_a_group": arguments.group_rows,
        "batch_size": arguments.batch_size,
    }
    return {**sizes, "settings": results, "full_shuffle": {"median_distance_of_epoch": 0.2929}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py shuffle`."""
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--group-rows", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="JSON file to write")
