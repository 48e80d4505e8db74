"""The canonical order: every row once, evenly over the streams, the same wherever it is computed."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from recsys.data.order import EpochOrder, Position, RowGroup, Window, fingerprint, limit_rows

Row = tuple[str, int, int]  # file, row group, row


def row_groups(sizes: list[list[int]], bytes_per_row: int = 8) -> list[RowGroup]:
    """One list of row-group sizes a file."""
    return [
        RowGroup(f"/logs/part-{f}.parquet", i, rows, rows * bytes_per_row)
        for f, file_sizes in enumerate(sizes)
        for i, rows in enumerate(file_sizes)
    ]


def epoch_order(sizes: list[list[int]], **changes) -> EpochOrder:
    order = EpochOrder(row_groups(sizes), seed=1, epoch=0, shuffle=True, num_streams=4, window_bytes=400)
    return replace(order, **changes)


def window_rows(window: Window) -> list[Row]:
    rows = [(s.path, s.row_group, row) for s in window.segments for row in range(s.start, s.stop)]
    permutation = window.permutation()
    return rows if permutation is None else [rows[i] for i in permutation]


def stream(order: EpochOrder, v: int) -> list[Row]:
    return [row for window in order.windows(v) for row in window_rows(window)]


def streams(order: EpochOrder) -> list[list[Row]]:
    return [stream(order, v) for v in range(order.num_streams)]


def all_rows(order: EpochOrder) -> list[Row]:
    return [(group.path, group.index, row) for group in order.row_groups for row in range(group.num_rows)]


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
        assert lengths == order.stream_rows()
        assert max(lengths) - min(lengths) <= 1


def test_windows_follow_each_other_within_their_bytes():
    for sizes, num_streams, window_bytes in layouts():
        order = epoch_order(sizes, num_streams=num_streams, window_bytes=window_bytes)
        for v in range(num_streams):
            start = 0
            for window in order.windows(v):
                assert window.start == start
                assert all(segment.num_rows for segment in window.segments)
                assert len(window.segments) == 1 or window.num_rows * 8 <= window_bytes
                start += window.num_rows


def test_windows_are_not_cut_without_need():
    windows = epoch_order([[10] * 20], num_streams=1, window_bytes=400).windows(0)
    assert [window.num_rows for window in windows] == [50] * 4
    # A piece of a row group counts with its share of the bytes.
    order = epoch_order([[30] * 4], num_streams=3, window_bytes=320)
    assert [len(order.windows(v)) for v in range(3)] == [1, 1, 1]


def test_without_shuffle_the_streams_joined_are_the_files():
    order = epoch_order([[5, 0, 9], [1], [30]], shuffle=False)
    assert [row for each in streams(order) for row in each] == all_rows(order)


def test_shuffle_moves_row_groups_and_rows():
    order = epoch_order([[10] * 30])
    first = [segment.row_group for window in order.windows(0) for segment in window.segments]
    assert first != sorted(first)
    rows = window_rows(order.windows(0)[0])
    inside = [rows.index(row) for row in sorted(rows)]
    assert inside != sorted(inside)
    assert len({group for _, group, _ in rows[:10]}) > 1, "row groups are mixed within a window"


def test_order_is_a_function_of_seed_epoch_and_footers():
    order = epoch_order([[10] * 30, [7] * 5])
    assert streams(order) == streams(epoch_order([[10] * 30, [7] * 5]))
    moved = replace(order, row_groups=[replace(g, path=g.path.replace("/logs", "/mnt")) for g in order.row_groups])
    assert streams(moved) == [[(path.replace("/logs", "/mnt"), i, row) for path, i, row in s] for s in streams(order)]


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 1}])
def test_seed_and_epoch_change_row_groups_and_rows(change):
    order = epoch_order([[10] * 30])
    other = replace(order, **change)
    groups = [[s.row_group for v in range(4) for w in each.windows(v) for s in w.segments] for each in (order, other)]
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
    permutations = [tuple(np.array(w.permutation()).tolist()) for v in range(4) for w in order.windows(v)]
    assert len(permutations) == 8
    assert len(set(permutations)) == 8


def test_order_is_that_of_earlier_versions():
    # A run may be resumed under another version of NumPy or of this package; the rows left must be the same.
    content = repr(streams(epoch_order([[10, 3], [25], [0, 12]], epoch=3, seed=7)))
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == "9e30e3944de07355"


@pytest.mark.parametrize("max_rows", [1, 4, 5, 6, 13, 14, 100, None])
def test_limit_rows_keeps_the_first_rows(max_rows):
    groups = row_groups([[5, 0, 8], [1]], bytes_per_row=10)
    kept = limit_rows(groups, max_rows)
    everything = all_rows(replace(epoch_order([]), row_groups=groups))
    assert all_rows(replace(epoch_order([]), row_groups=kept)) == everything[:max_rows]
    assert all(group.num_bytes == 10 * group.num_rows for group in kept)


def test_limited_row_groups_are_trained_from_their_beginning():
    order = replace(epoch_order([]), row_groups=limit_rows(row_groups([[100], [100]]), 130), num_streams=3)
    expected = [(f"/logs/part-{f}.parquet", 0, i) for f, rows in ((0, 100), (1, 30)) for i in range(rows)]
    assert sorted(row for each in streams(order) for row in each) == expected


def test_fingerprint_knows_files_by_name_and_rows():
    groups = row_groups([[5, 8], [1]])
    assert fingerprint(groups) == fingerprint([replace(g, path=g.path.replace("/logs", "/mnt/x")) for g in groups])
    others = [
        row_groups([[5, 9], [1]]),
        row_groups([[8, 5], [1]]),
        row_groups([[5], [8, 1]]),
        row_groups([[5, 8]]),
        [replace(g, path=g.path.replace("part-1", "part-2")) for g in groups],
    ]
    assert len({fingerprint(each) for each in [groups, *others]}) == 6


def test_position_counts_rows_of_all_epochs():
    assert Position(0, (0, 0)).num_rows == 0
    assert Position(2, (3, 4), rows_before=100).num_rows == 107
