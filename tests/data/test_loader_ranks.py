"""The loader on any number of ranks, one after the other, and its tail and its memory."""

import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rows import OPTIONS, SPEC, Row, build, numbers, read, rows, write

from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.loader import Loader
from recsys.data.order import Position
from recsys.data.parquet import open_dataset
from recsys.ids import HashMapping, IdStatistics

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


# Any number of ranks


def steps(
    dataset: Dataset, size: int, world_size: int, position: Position | None = None, epochs: int = 2, **changes: Any
) -> Iterator[tuple[list[Row | None], Position]]:
    """The global batches of some ranks, None for fill, with the position after each."""
    loaders = [build(dataset, size, rank, world_size, **changes) for rank in range(world_size)]
    for batches in zip(*(loader.batches(position, epochs) for loader in loaders), strict=True):
        found: list[Row | None] = []
        for rank, batch in enumerate(batches):
            own = rows(batch)
            assert len(own) == loaders[0].batch_size == -(-size // world_size)
            assert batch.first_row == len(found) == size * rank // world_size
            found += own[: size * (rank + 1) // world_size - len(found)]
            assert len(own) - (len(found) - batch.first_row) <= 1 and batch.num_rows == sum(map(bool, found)) - sum(
                map(bool, found[: batch.first_row])
            ), "what makes ranks' batches equally long is fill"
        assert {batch.position for batch in batches} == {batches[0].position}
        yield found, batches[0].position


CASES = {
    "even": (96, {}),
    "odd batches": (101, {"num_streams": 7, "window_bytes": 150}),
    "more streams than ranks": (90, {"num_streams": 64, "shuffle": False}),
    "one stream": (67, {"num_streams": 1}),
    "drop last": (70, {"num_streams": 6, "drop_last": True, "window_bytes": 1}),
}


@pytest.mark.parametrize("world_sizes", [(2, 3, 17), pytest.param(range(2, 65), marks=pytest.mark.slow)])
@pytest.mark.parametrize("size, changes", CASES.values(), ids=CASES)
def test_any_number_of_ranks_trains_the_same_global_batches(tmp_path, size, changes, world_sizes):
    dataset = write(tmp_path, [[40, 0, 13], [1], [100, 17, 61]])
    alone = list(steps(dataset, size, 1, **changes))
    per_epoch = 232 // size if changes.get("drop_last") else -(-232 // size)
    assert len(alone) == 2 * per_epoch
    for epoch in (alone[:per_epoch], alone[per_epoch:]):
        seen = [row.number for found, _ in epoch for row in found if row]
        assert len(seen) == len(set(seen)) == (per_epoch * size if changes.get("drop_last") else 232)
    for world_size in world_sizes:
        assert list(steps(dataset, size, world_size, **changes)) == alone, world_size


def test_any_chain_of_world_sizes_trains_what_one_rank_does(tmp_path):
    generator = np.random.default_rng(7)
    for case in range(10):
        files = [generator.integers(0, 40, generator.integers(1, 4)).tolist() for _ in range(generator.integers(1, 5))]
        if not sum(map(sum, files)):
            continue
        dataset = write(tmp_path / str(case), files)
        settings = {
            "num_streams": int(generator.integers(1, 20)),
            "window_bytes": int(generator.integers(1, 2000)),
            "shuffle": bool(generator.integers(2)),
            "num_threads": int(generator.integers(2)),
            "drop_last": bool(generator.integers(2)),
        }
        size = int(generator.integers(16, 70))
        alone = list(steps(dataset, size, 1, **settings))
        found: list[tuple[list[Row | None], Position]] = []
        while len(found) < len(alone):
            world_size, count = int(generator.integers(1, 13)), int(generator.integers(1, 6))
            with closing(steps(dataset, size, world_size, found[-1][1] if found else None, **settings)) as following:
                found += islice(following, count)
        assert found == alone, (files, settings, size)


def test_ranks_read_filtered_and_limited_rows_alike(tmp_path):
    write(tmp_path, [[40, 0, 13], [1], [30, 17]])
    columns = dict.fromkeys(SPEC.columns(), "key")
    for limit, condition, expected in (
        (60, None, range(60)),
        (None, "row >= 20 and label == 0", range(20, 101, 2)),
        (30, "row >= 20 and label == 0", range(20, 80, 2)),
    ):
        dataset = open_dataset("data.train", str(tmp_path), columns, limit, condition)
        alone = list(steps(dataset, 11, 1, epochs=1))
        assert sorted(row.number for found, _ in alone for row in found if row) == list(expected)
        for world_size in (2, 3, 5, 7, 11):
            assert list(steps(dataset, 11, world_size, epochs=1)) == alone


def test_batches_of_another_size_go_on_with_the_rows_left(dataset):
    alone = list(steps(dataset, 16, 1, epochs=1))
    rest = list(steps(dataset, 24, 3, alone[1][1], epochs=1))
    assert sorted(row.number for found, _ in [*alone[:2], *rest] for row in found if row) == list(range(101))


def count_ids(dataset: Dataset, world_size: int, position: Position | None) -> int:
    """How many ids the ranks' statistics hold together after two epochs, from a position on."""
    statistics = IdStatistics()
    spec = replace(SPEC, ids=[replace(SPEC.ids[0], mapping=HashMapping(1000, 0), statistics=statistics)])
    for rank in range(world_size):
        options = replace(OPTIONS, num_streams=3, window_bytes=1)
        for _ in Loader(dataset, spec, options, 33, rank, world_size).batches(position, 2):
            pass
    return statistics.num_ids


def test_a_window_that_several_ranks_read_is_counted_once(dataset):
    assert count_ids(dataset, 1, None) == 2 * 101
    for world_size in (3, 7, 20):
        for position in (None, Position(0, 33)):
            assert count_ids(dataset, world_size, position) == count_ids(dataset, 1, position)


def test_windows_without_rows_of_a_rank_are_not_decoded(tmp_path, monkeypatch):
    dataset = write(tmp_path, [[1] * 64])
    decoded = []
    original = Loader._read

    def count(self: Loader, placed: Any) -> Any:
        decoded.append(placed.window.num_rows)
        return original(self, placed)

    monkeypatch.setattr(Loader, "_read", count)
    for rank in range(8):
        list(build(dataset, 16, rank, 8, num_streams=2, shuffle=False).batches())
    assert sum(decoded) == 64, "each row is read by one rank, though four share a stream"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drop_last_leaves_out_what_fills_no_batch(dataset, world_size):
    ranks = [
        read(dataset, 24, epochs=2, rank=rank, world_size=world_size, drop_last=True) for rank in range(world_size)
    ]
    loader = build(dataset, 24, 0, world_size, drop_last=True)
    assert {len(each) for each in ranks} == {2 * (101 // 24)} == {loader.steps_left(Position(), 2)}
    seen = [[n for share in shares for n in numbers(share)] for shares in zip(*ranks, strict=True)]
    assert {len(each) for each in seen} == {24}
    assert len({n for each in seen[:4] for n in each}) == 4 * 24
    assert ranks[0][-1].position.num_rows == 2 * 4 * 24, "dropped rows are not counted"
    assert loader.steps_left(ranks[0][-1].position, 2) == 0
    assert not list(build(dataset, 104, drop_last=True).batches(num_epochs=2))


# Memory


def test_batches_and_windows_are_used_again(dataset):
    loader = build(dataset, 8, num_threads=1, window_bytes=1)
    with closing(loader.batches(num_epochs=30)) as batches:
        for _ in range(20):
            next(batches)
        early = loader.host_bytes
        for _ in batches:
            pass
    for kind, num_bytes in loader.host_bytes.items():
        assert num_bytes <= 4 * early[kind], "of 400 batches, a few are alive at a time"


def test_batches_that_are_kept_stay_as_they_are(dataset):
    kept = read(dataset, 8, epochs=3, num_threads=2)
    assert [rows(batch) for batch in kept] == [
        found for batch in build(dataset, 8).batches(num_epochs=3) for found in [rows(batch)]
    ]


@pytest.mark.parametrize(
    ("groups", "streams", "window_bytes", "decoded", "alive"),
    [([10] * 5, 8, 1, 8, 2), ([10] * 8, 5, 1, 12, 0), ([10] * 8, 5, 1 << 20, 8, 2), ([90, *[2] * 9], 5, 1, 10, 1)],
    ids=["short streams", "long streams", "small row groups", "a large row group among small ones"],
)
def test_row_groups_are_kept_where_streams_are_short(
    tmp_path, monkeypatch, groups, streams, window_bytes, decoded, alive
):
    """A stream ends in the row group that the next one begins in, which long ones want again after an epoch."""
    tables: list[weakref.ref[pa.Table]] = []
    original = SegmentReader.row_group

    def row_group(self: SegmentReader, number: int) -> pa.Table:
        table = original(self, number)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(SegmentReader, "row_group", row_group)
    loader = build(write(tmp_path, [groups]), 2 * streams, num_streams=streams, window_bytes=window_bytes)
    batches = loader.batches()
    next(batches)
    assert sum(table() is not None for table in tables) == alive
    assert sum(1 for _ in batches) and len(tables) == decoded
