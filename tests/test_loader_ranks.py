"""The loader on any number of ranks, one after the other, and its tail and its memory."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
from rows import build, numbers, read, rows, threads, write

from recsys.data.order import Position
from recsys.data.parquet import Dataset
from recsys.errors import UserError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    """101 rows in five row groups of three files."""
    return write(tmp_path_factory.mktemp("data"), [[40, 0, 13], [1], [30, 17]])


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()


# Any number of ranks


@pytest.mark.parametrize("world_size", [3, 5, 7, 16])
def test_ranks_that_do_not_divide_the_streams(dataset, world_size):
    size = 50
    ranks = [read(dataset, size, epochs=2, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(each) for each in ranks} == {len(ranks[0])}
    assert {len(batch.weights) for each in ranks for batch in each} == {len(ranks[0][0].weights)}
    assert max(sum(share.num_rows for share in shares) for shares in zip(*ranks, strict=True)) == size
    half = len(ranks[0]) // 2
    for epoch in (slice(0, half), slice(half, None)):
        assert sorted(n for each in ranks for batch in each[epoch] for n in numbers(batch)) == list(range(101))


def test_any_chain_of_world_sizes_trains_every_row_once(tmp_path):
    generator = np.random.default_rng(7)
    for case in range(25):
        files = [generator.integers(0, 40, generator.integers(1, 4)).tolist() for _ in range(generator.integers(1, 5))]
        if not sum(map(sum, files)):
            continue
        dataset = write(tmp_path / str(case), files)
        settings = {
            "num_streams": int(generator.integers(1, 9)),
            "window_bytes": int(generator.integers(1, 2000)),
            "shuffle": bool(generator.integers(2)),
        }
        size = int(generator.integers(16, 70))
        position: Position | None = None
        seen: list[list[int]] = [[], []]
        for _ in range(100):
            world_size = int(generator.integers(1, 9))
            loaders = [build(dataset, size, rank, world_size, **settings) for rank in range(world_size)]
            at = loaders[0].resume(position) if position else loaders[0].start()
            steps = int(generator.integers(1, 6))
            ranks = [list(islice(loader.batches(at, 2), steps)) for loader in loaders]
            assert {len(each) for each in ranks} == {min(steps, loaders[0].steps_left(at, 2))}
            for shares in zip(*ranks, strict=True):
                assert {share.position for share in shares} == {shares[0].position}
                seen[at.epoch] += [n for share in shares for n in numbers(share)]
                position = at = shares[0].position
            if not loaders[0].steps_left(at, 2):
                break
        assert [sorted(each) for each in seen] == [list(range(dataset.num_rows))] * 2, (files, settings, size)


def test_back_on_a_world_size_that_divides_the_next_epoch_is_canonical(dataset):
    alone = read(dataset, 24, epochs=2)
    half = len(alone) // 2
    three = build(dataset, 24, 0, 3)
    position = three.resume(alone[1].position)
    assert len(position.cuts) == 2
    batches = list(islice(three.batches(position, 2), 2))
    rest = list(build(dataset, 24).batches(build(dataset, 24).resume(batches[-1].position), 2))
    assert [rows(batch) for batch in rest[-half:]] == [rows(batch) for batch in alone[half:]]


def test_position_of_the_same_streams_is_resumed_as_it_is(dataset):
    position = read(dataset, 16)[2].position
    for world_size in (1, 2, 4, 8):
        assert build(dataset, 16, 0, world_size).resume(position) is position
    assert build(dataset, 32).resume(position) is position, "another batch size takes the rows in the same order"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drop_last_leaves_out_what_fills_no_batch(dataset, world_size):
    ranks = [
        read(dataset, 24, epochs=2, rank=rank, world_size=world_size, drop_last=True) for rank in range(world_size)
    ]
    loader = build(dataset, 24, 0, world_size, drop_last=True)
    assert {len(each) for each in ranks} == {2 * (101 // 24)} == {loader.steps_left(loader.start(), 2)}
    seen = [[n for share in shares for n in numbers(share)] for shares in zip(*ranks, strict=True)]
    assert {len(each) for each in seen} == {24}
    assert len({n for each in seen[:4] for n in each}) == 4 * 24
    assert ranks[0][-1].position.num_rows == 2 * 4 * 24, "dropped rows are not counted"
    assert loader.steps_left(ranks[0][-1].position, 2) == 0
    assert not list(build(dataset, 104, drop_last=True).batches(num_epochs=2))


def test_fewer_rows_in_a_step_than_streams(dataset):
    with pytest.raises(UserError, match="a step of 4 rows cannot take one of each of 8 streams; use at least 8"):
        build(dataset, 4)


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
