"""Blocks of memory: used again once nobody views them, and never before."""

import gc

import numpy as np
import torch

from recsys.data.pool import BlockPool, padded


def filled(pool: BlockPool, value: int, size: int = 5000) -> np.ndarray:
    array = pool.take(size).array((size,), np.uint8)
    array[:] = value
    return array


def test_a_block_is_used_again_when_nothing_views_it():
    pool = BlockPool()
    address = filled(pool, 1).ctypes.data
    for _ in range(10):
        assert filled(pool, 2).ctypes.data == address
    assert pool.num_bytes == 8192


def test_arrays_slices_and_tensors_keep_a_block():
    pool = BlockPool()
    kept = [
        filled(pool, 0),
        filled(pool, 1)[100:200],
        torch.from_numpy(filled(pool, 2)),
        torch.from_numpy(filled(pool, 3))[5:9],
    ]
    kept.append(torch.from_numpy(pool.take(5000).array((10, 3), np.int64)).reshape(-1).fill_(4))
    for _ in range(20):
        filled(pool, 255)
    for value, view in enumerate(kept):
        assert set(view.tolist()) == {value}
    del kept, view
    gc.collect()
    before = pool.num_bytes
    parts = [filled(pool, 1) for _ in range(5)]
    assert pool.num_bytes == before, "all five are free again"
    del parts


def test_no_more_is_held_than_has_been_in_use_at_once():
    pool = BlockPool()
    kept = filled(pool, 1, 1 << 20)
    for size in (100, 5000, 100_000, 1 << 19):
        filled(pool, 1, size)
        assert pool.num_bytes <= (1 << 20) + max(size, 1 << 17)
    both = filled(pool, 1, 1 << 17), filled(pool, 1, 1 << 18)
    most = pool.num_bytes
    del kept, both
    for size in (100, 1 << 20, 5000, 1 << 18, 1 << 20, 100_000, 1 << 16):
        filled(pool, 1, size)
        assert pool.num_bytes <= most


def test_a_free_block_up_to_four_times_as_large_is_used():
    pool = BlockPool()
    large = filled(pool, 1, 1 << 18).ctypes.data
    assert filled(pool, 1, 1 << 17).ctypes.data == large
    assert filled(pool, 1, 1 << 16).ctypes.data == large
    assert filled(pool, 1, 1 << 15).ctypes.data != large


def test_arrays_of_a_block_do_not_overlap():
    block = BlockPool().take(padded(3 * 4) + padded(24) + padded(1))
    parts = [block.array((3,), np.float32), block.array((2, 3), np.int32), block.array((1,), np.uint8)]
    for value, part in enumerate(parts):
        part[:] = value
        assert part.ctypes.data % 64 == parts[0].ctypes.data % 64
    assert [set(part.flat) for part in parts] == [{0}, {1}, {2}]
