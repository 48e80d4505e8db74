"""Neighbours of items, which often occur together with them, as a list for each user, for the loss of UltraGCN."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from recsys.runtime.loops import distinct

_PAIRS_AT_ONCE = 1 << 22


def neighbour_lists(lists: pa.ListArray, most: int) -> tuple[pa.ListArray, pa.ListArray]:
    """Return, for each list of items, the neighbours of all its items, each once, and their summed weights, float32.

    Of G, how many lists each two items share, and its sums g by row, an item i has as neighbours the `most` items k of
    the greatest weights G(i, k) / (g(i) - G(i, i)) · sqrt(g(i) / g(k)) (Mao et al. 2021, arXiv:2110.15114).
    """
    encoded = lists.flatten().dictionary_encode()
    num_lists, num_items = len(lists), len(encoded.dictionary)
    of_list = np.repeat(np.arange(num_lists), np.diff(lists.offsets.to_numpy()))
    pairs = distinct(of_list * num_items + encoded.indices.to_numpy())  # a list has each item once
    row, item = np.divmod(pairs, num_items)
    neighbours, weights = _neighbours(row, item, num_lists, num_items, most)
    nothing = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    chunks = [nothing, *_of_lists(row, item, neighbours, weights, num_items)]
    rows, items, sums = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
    offsets = pa.array(np.searchsorted(rows, np.arange(num_lists + 1)), pa.int32())
    ids = encoded.dictionary.take(pa.array(items))
    return pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, pa.array(sums, pa.float32()))


def _neighbours(
    row: np.ndarray, item: np.ndarray, num_lists: int, num_items: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the neighbours of each item, filled up with -1, and their weights: [items, most]."""
    starts = np.searchsorted(row, np.arange(num_lists + 1))
    sums = np.bincount(item, np.diff(starts)[row], num_items)
    by_item = np.argsort(item, kind="stable")
    firsts = np.searchsorted(item[by_item], np.arange(num_items + 1))
    neighbours, weights = np.full((num_items, most), -1), np.zeros((num_items, most))
    for i in range(num_items):
        owners = row[by_item[firsts[i] : firsts[i + 1]]]
        together, counts = np.unique(
            np.concatenate([item[starts[owner] : starts[owner + 1]] for owner in owners]), return_counts=True
        )
        others, counts = together[together != i], counts[together != i]
        weight = counts / max(1, sums[i] - len(owners)) * np.sqrt(sums[i] / sums[others])
        best = np.lexsort((others, -weight))[:most]  # the first of equal ones
        neighbours[i, : len(best)], weights[i, : len(best)] = others[best], weight[best]
    return neighbours, weights


def _of_lists(
    row: np.ndarray, item: np.ndarray, neighbours: np.ndarray, weights: np.ndarray, num_items: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the rows, neighbours and summed weights of some lists at a time, in order."""
    start, step = 0, max(1, _PAIRS_AT_ONCE // neighbours.shape[1])
    while start < len(row):
        stop = int(np.searchsorted(row, row[min(start + step, len(row)) - 1], side="right"))  # whole lists
        near = neighbours[item[start:stop]]
        keys = row[start:stop, None] * num_items + near
        pairs, place = np.unique(keys[near >= 0], return_inverse=True)
        yield (
            pairs // num_items,
            pairs % num_items,
            np.bincount(place, weights[item[start:stop]][near >= 0], len(pairs)),
        )
        start = stop
