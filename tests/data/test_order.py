"""The canonical order: every row once, evenly over the streams, the same wherever it is computed."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from recsys.data.order import (
    EpochOrder,
    Position,
    RowGroups,
    Window,
    shares,
    slice_bounds,
    stream_bounds,
)

Row = tuple[str, int, int]  # file, row group, row


def row_groups(sizes: list[list[int]], folder: str = "/logs") -> RowGroups:
    """One list of row-group sizes a file; a row has 8 bytes."""
    table = [(f, i, rows) for f, file_sizes in enumerate(sizes) for i, rows in enumerate(file_sizes)]
    file, index, num_rows = np.array(table, np.int64).reshape(-1, 3).T
    paths = tuple(f"{folder}/part-{f}.parquet" for f in range(len(sizes)))
    return RowGroups(paths, file.astype(np.int32), index.astype(np.int32), num_rows, num_rows * 8)


def epoch_order(sizes: list[list[int]], num_streams: int = 4, **changes) -> EpochOrder:
    slots = slice_bounds(num_streams, num_streams)
    order = EpochOrder(row_groups(sizes), seed=1, epoch=0, shuffle=True, slots=slots, window_bytes=400)
    return replace(order, **changes)


def num_streams_of(order: EpochOrder) -> int:
    return len(order.slots) - 1


def windows_of(order: EpochOrder, v: int) -> list[Window]:
    return list(order.windows(v))


def window_rows(window: Window) -> list[Row]:
    rows = [(s.path, s.row_group, row) for s in window.segments for row in range(s.start, s.stop)]
    permutation = window.permutation()
    return rows if permutation is None else [rows[i] for i in permutation]


def stream(order: EpochOrder, v: int) -> list[Row]:
    return [row for window in order.windows(v) for row in window_rows(window)]


def streams(order: EpochOrder) -> list[list[Row]]:
    return [stream(order, v) for v in range(num_streams_of(order))]


def all_rows(order: EpochOrder) -> list[Row]:
    groups = order.row_groups
    return [
        (s.path, s.row_group, row) for i in range(len(groups)) for s in [groups.segment(i)] for row in range(s.stop)
    ]


def layouts() -> list[tuple[list[list[int]], int, int]]:
    """(row-group sizes, streams, window bytes): corner cases, and some at random."""
    cases = [
        ([[1]], 1, 1),
        ([[1]], 8, 100),  # more streams than rows
        ([[1], [1], [1]], 2, 1),
        ([[0, 3, 0], [0], [2]], 3, 8),
        ([[7]], 7, 1 << 30),
        ([[100, 1, 50]], 8, 10_000),
    ]
    generator = np.random.default_rng(0)
    for _ in range(40):
        sizes = [generator.integers(0, 40, generator.integers(1, 5)).tolist() for _ in range(generator.integers(1, 6))]
        cases.append((sizes, int(generator.integers(1, 12)), int(generator.integers(1, 600))))
    return cases


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_in_one_stream_once(shuffle):
    for sizes, num_streams, window_bytes in layouts():
        order = epoch_order(sizes, shuffle=shuffle, num_streams=num_streams, window_bytes=window_bytes)
        rows = [row for each in streams(order) for row in each]
        assert sorted(rows) == sorted(all_rows(order))


def test_streams_are_equal_within_one_row():
    for sizes, num_streams, window_bytes in layouts():
        order = epoch_order(sizes, num_streams=num_streams, window_bytes=window_bytes)
        lengths = [len(each) for each in streams(order)]
        assert max(lengths) - min(lengths) <= 1


def test_windows_follow_each_other_within_their_bytes():
    for sizes, num_streams, window_bytes in layouts():
        order = epoch_order(sizes, num_streams=num_streams, window_bytes=window_bytes)
        for v in range(num_streams):
            for window in windows_of(order, v):
                assert all(segment.num_rows for segment in window.segments)
                assert len(window.segments) == 1 or window.num_rows * 8 <= window_bytes


def test_windows_of_many_small_row_groups_are_bounded_by_their_number():
    windows = windows_of(epoch_order([[1]] * 100, num_streams=1, window_bytes=1 << 20), 0)
    assert [len(window.segments) for window in windows] == [4, 16, 16, 16, 16, 16, 16]


def test_windows_are_not_cut_without_need(monkeypatch):
    windows = windows_of(epoch_order([[10] * 40], num_streams=1, window_bytes=800), 0)
    assert [window.num_rows for window in windows] == [10, 10, 20, 50, 100, 100, 100, 10], "the first ones double"
    # A piece of a row group counts with its share of the bytes.
    monkeypatch.setattr("recsys.data.order.FIRST_WINDOW", 1)
    order = epoch_order([[30] * 4], num_streams=3, window_bytes=320)
    assert [len(windows_of(order, v)) for v in range(3)] == [1, 1, 1]


def test_without_shuffle_the_streams_joined_are_the_files():
    order = epoch_order([[5, 0, 9], [1], [30]], shuffle=False)
    assert [row for each in streams(order) for row in each] == all_rows(order)


def test_shuffle_moves_row_groups_and_rows():
    order = epoch_order([[10] * 30])
    first = [segment.row_group for window in windows_of(order, 0) for segment in window.segments]
    assert first != sorted(first)
    rows = window_rows(windows_of(order, 0)[-1])
    inside = [rows.index(row) for row in sorted(rows)]
    assert inside != sorted(inside)
    assert len({group for _, group, _ in rows[:10]}) > 1, "row groups are mixed within a window"


def test_order_is_a_function_of_seed_epoch_and_footers():
    order = epoch_order([[10] * 30, [7] * 5])
    assert streams(order) == streams(epoch_order([[10] * 30, [7] * 5]))
    moved = replace(order, row_groups=row_groups([[10] * 30, [7] * 5], folder="/mnt"))
    assert streams(moved) == [[(path.replace("/logs", "/mnt"), i, row) for path, i, row in s] for s in streams(order)]


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 1}])
def test_seed_and_epoch_change_row_groups_and_rows(change):
    order = epoch_order([[10] * 30])
    other = replace(order, **change)
    groups = [
        [s.row_group for v in range(4) for w in windows_of(each, v) for s in w.segments] for each in (order, other)
    ]
    assert groups[0] != groups[1]
    one = epoch_order([[100]], num_streams=1)
    assert stream(one, 0) != stream(replace(one, **change), 0)


def test_seed_and_epoch_do_not_stand_for_each_other():
    order = epoch_order([[200]], num_streams=1)
    keys = [(1, 2), (2, 1), (0, 3), (3, 0), (1, 0), (0, 1), (1 << 32, 0), (0, 0)]
    orders = [stream(replace(order, seed=seed, epoch=epoch), 0) for seed, epoch in keys]
    assert len({tuple(each) for each in orders}) == len(keys)


def test_streams_and_windows_have_permutations_of_their_own():
    order = epoch_order([[50] * 8], num_streams=4, window_bytes=400)
    permutations = [tuple(np.array(w.permutation()).tolist()) for v in range(4) for w in windows_of(order, v)]
    assert len(permutations) == 8
    assert len(set(permutations)) == 8


def test_order_is_that_of_earlier_versions():
    # A run may be resumed under another version of NumPy or of this package; the rows left must be the same.
    content = repr(streams(epoch_order([[10, 3], [25], [0, 12]], epoch=3, seed=7)))
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == "c2c6e241e3e76a59"


def test_limited_row_groups_are_trained_from_their_beginning():
    order = replace(epoch_order([], num_streams=3), row_groups=row_groups([[100], [30]]))
    expected = [(f"/logs/part-{f}.parquet", 0, i) for f, rows in ((0, 100), (1, 30)) for i in range(rows)]
    assert sorted(row for each in streams(order) for row in each) == expected


@pytest.mark.parametrize(("size", "num_streams"), [(16, 4), (10, 3), (7, 7), (1024, 9)])
def test_slices_of_a_step_differ_by_one_row_at_most(size, num_streams):
    slots = slice_bounds(size, num_streams)
    slices = np.diff(slots)
    assert slots[0] == 0 and slots[-1] == size and len(slices) == num_streams
    assert slices.max() - slices.min() == (size % num_streams > 0)


@pytest.mark.parametrize("world_size", range(1, 65))
def test_ranks_share_the_slots_of_a_step(world_size):
    for size, num_streams in ((64, 8), (250, 8), (101, 6), (97, 1), (70, 64)):
        slots = slice_bounds(size, num_streams)
        ranks = [shares(slots, rank, world_size) for rank in range(world_size)]
        rows = [[slots[s.stream] + i for s in each for i in range(s.start, s.stop)] for each in ranks]
        assert [slot for each in rows for slot in each] == list(range(size))
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
        for each in ranks:
            ends = np.cumsum([0, *(s.stop - s.start for s in each)]).tolist()
            assert [s.at for s in each] == ends[:-1], "a rank's rows lie one after the other"
        if num_streams % world_size == 0:
            assert all(len(each) == num_streams // world_size for each in ranks), "whole streams"


def test_streams_are_as_long_as_their_slices_want():
    slots = slice_bounds(10, 8)
    bounds = [stream_bounds(slots, v, 101) for v in range(8)]
    assert bounds[0][0] == 0 and bounds[-1][1] == 101 and [b for _, b in bounds[:-1]] == [a for a, _ in bounds[1:]]
    assert [stop - start for start, stop in bounds] == [10, 10, 10, 20, 10, 10, 10, 21]
    assert stream_bounds((0, 1, 3, 4), 1, 1 << 62) == (1 << 60, 3 << 60), "in whole numbers, past 64 bits"


def test_position_counts_rows_of_all_epochs():
    assert Position().num_rows == 0
    assert Position(2, 10, rows_before=100).num_rows == 110
