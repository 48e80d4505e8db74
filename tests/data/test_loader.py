"""The loader: every row once, the same global batches for any ranks and threads, resume anywhere."""

from contextlib import closing
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from parquet_files import open_columns
from rows import SPEC, STARTS, Row, build, numbers, read, rows, write

from recsys.data.loader import Loader
from recsys.data.order import Position
from recsys.data.window import Columns

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


LAYOUTS = [
    ([[1]], 8, 8, 400),  # row-group sizes of each file, streams, batch size, window bytes
    ([[1], [1], [1]], 8, 16, 1),
    ([[0], [5], [0, 0, 2]], 4, 4, 1),
    ([[17]], 1, 1, 100),
    ([[40, 13], [1], [30, 17]], 4, 64, 1 << 30),
    ([[20, 20], [23]], 3, 6, 300),
    ([[3]], 5, 500, 50),
]


@pytest.mark.parametrize(("sizes", "num_streams", "size", "window_bytes"), LAYOUTS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_of_an_epoch_once(tmp_path, sizes, num_streams, size, window_bytes, shuffle):
    dataset = write(tmp_path, sizes)
    total = sum(map(sum, sizes))
    changes = {"num_streams": num_streams, "window_bytes": window_bytes, "shuffle": shuffle}
    seen: dict[int, list[int]] = {0: [], 1: []}
    epoch = 0
    for batch in read(dataset, size, epochs=2, **changes):
        assert len(batch.weights) == size
        seen[epoch] += numbers(batch)
        epoch = batch.position.epoch
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(total))


def test_rows_keep_together(dataset):
    for batch in read(dataset, 16):
        for row in filter(None, rows(batch)):
            n = row.number
            assert row == Row(n, tuple(range(n, n + n % 4)), n / 2, n % 2)


def test_rows_come_in_the_canonical_order(dataset):
    loader = build(dataset, 16)
    groups = [dataset.row_groups.segment(i) for i in range(len(dataset.row_groups))]
    first = {(group.path, group.row_group): start for group, start in zip(groups, STARTS, strict=True)}
    streams: list[list[int]] = []
    for v in range(8):
        streams.append([])
        for window in loader._order(0).windows(v):
            found = [first[s.path, s.row_group] + row for s in window.segments for row in range(s.start, s.stop)]
            streams[v] += [found[i] for i in np.array(window.permutation())]
    for step, batch in enumerate(loader.batches()):
        assert numbers(batch) == [number for each in streams for number in each[2 * step : 2 * step + 2]]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_share_the_global_batches_of_one_rank(dataset, world_size):
    alone = read(dataset, 16, epochs=2)
    ranks = [read(dataset, 16, epochs=2, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step, whole in enumerate(alone):
        shares = [ranks[rank][step] for rank in range(world_size)]
        assert [len(share.weights) for share in shares] == [16 // world_size] * world_size
        assert [row for share in shares for row in rows(share)] == rows(whole)
        assert {share.position for share in shares} == {whole.position}
    assert {len(each) for each in ranks} == {len(alone)}


def test_threads_change_nothing(dataset):
    reference = read(dataset, 16, epochs=2)
    for num_threads, prefetch in [(1, 0), (1, 1), (2, 4), (8, 100)]:
        found = read(dataset, 16, epochs=2, num_threads=num_threads, prefetch_batches=prefetch)
        assert [rows(batch) for batch in found] == [rows(batch) for batch in reference]
        assert [batch.position for batch in found] == [batch.position for batch in reference]


def test_every_batch_takes_an_equal_slice_of_every_stream(dataset):
    batches = read(dataset, 16, shuffle=False)
    bounds = [dataset.num_rows * v // 8 for v in range(9)]
    for step, batch in enumerate(batches[:-1]):
        expected = [bounds[v] + 2 * step + i for v in range(8) for i in range(2)]
        assert numbers(batch) == expected


def test_epochs_and_seeds_have_orders_of_their_own(dataset):
    def order(**changes: Any) -> list[list[int]]:
        return [numbers(batch) for batch in read(dataset, 16, epochs=2, **changes)]

    first = order()
    half = len(first) // 2
    assert first[:half] != first[half:]
    assert first == order()
    assert not {tuple(each) for each in first} & {tuple(each) for each in order(seed=2)}


@pytest.mark.parametrize("num_threads", [0, 2])
def test_resume_from_every_position(dataset, num_threads):
    loader = build(dataset, 16)
    whole = list(loader.batches(num_epochs=3))
    for step in range(len(whole)):
        again = build(dataset, 16, num_threads=num_threads)
        with closing(again.batches(whole[step].position, num_epochs=3)) as batches:
            expected = whole[step + 1 :] if num_threads == 0 else whole[step + 1 : step + 3]
            for batch, found in zip(expected, batches, strict=num_threads == 0):
                assert rows(found) == rows(batch)
                assert found.position == batch.position


def test_resume_on_other_ranks(dataset):
    whole = read(dataset, 16, epochs=2)
    position = whole[3].position
    ranks = [list(build(dataset, 16, rank, 4).batches(position, 2)) for rank in range(4)]
    assert [[row for share in shares for row in rows(share)] for shares in zip(*ranks, strict=True)] == [
        rows(batch) for batch in whole[4:]
    ]


def test_resume_decodes_only_the_windows_it_stands_in(dataset, monkeypatch):
    loader = build(dataset, 8, window_bytes=1)
    positions = [batch.position for batch in loader.batches()][:-1]
    order = loader._order(0)
    windows = []  # with the rows of the stream up to their ends
    for v in range(8):
        ends = accumulate(window.num_rows for window in order.windows(v))
        windows += zip(order.windows(v), ends, strict=True)
    read_windows = []
    original = Loader._read

    def count(self: Loader, placed: Any) -> Columns:
        read_windows.append(placed.window)
        return original(self, placed)

    monkeypatch.setattr(Loader, "_read", count)
    for position in positions:
        read_windows.clear()
        list(loader.batches(position))
        left = [window for window, end in windows if end > position.rows // 8]
        assert sorted(map(repr, read_windows)) == sorted(map(repr, left))
    assert len(left) < len(windows)


@pytest.mark.parametrize("size", [8, 16, 104, 800])
@pytest.mark.parametrize("world_size", [1, 4])
def test_steps_left_are_those_that_come(dataset, size, world_size):
    loader = build(dataset, size, 0, world_size)
    batches = list(loader.batches(num_epochs=3))
    assert loader.steps_left(Position(), 3) == len(batches)
    for step, batch in enumerate(batches):
        assert loader.steps_left(batch.position, 3) == len(batches) - step - 1
        assert loader.steps_left(batch.position, 1) == max(0, len(batches) // 3 - step - 1)
    assert not list(loader.batches(batches[-1].position, 3))


def test_position_counts_trained_rows_only(dataset):
    loader = build(dataset, 16, num_threads=2, prefetch_batches=8)
    trained = 0
    with closing(loader.batches(num_epochs=2)) as batches:
        for batch in batches:
            trained += batch.num_rows
            assert batch.position.num_rows == trained
    assert trained == 2 * dataset.num_rows
    assert batch.position == Position(2, 0, rows_before=202)


def test_tail_is_fill(dataset):
    last = read(dataset, 16)[-1]
    assert 0 < last.num_rows == 101 - 16 * 6
    assert rows(last).count(None) == 16 - last.num_rows
    assert last.weights.tolist() == [float(row is not None) for row in rows(last)]


def test_a_rank_without_rows_takes_as_many_steps(tmp_path):
    dataset = write(tmp_path, [[3]])
    ranks = [read(dataset, 8, epochs=2, rank=rank, world_size=8) for rank in range(8)]
    assert {len(each) for each in ranks} == {2}
    assert sorted(sum(batch.num_rows for batch in each) for each in ranks) == [0] * 5 + [2] * 3


def test_max_rows(tmp_path):
    write(tmp_path, [[10], [10]])
    dataset = open_columns(tmp_path, *SPEC.columns(), max_rows=13)
    assert sorted(n for batch in read(dataset, 8) for n in numbers(batch)) == list(range(13))
