"""Statistics of the ids of a feature: how many there are, and how many distinct ones.

Distinct ids are counted by their 64-bit hashes. While these are few, all are kept, and the count is exact. Beyond that,
only hashes below a limit are kept, which are a uniform sample of the distinct ids: n hashes below the limit L mean
n * 2**64 / L distinct ids (Bar-Yossef et al. 2002, doi:10.1007/3-540-45726-7_1; Beyer et al. 2007,
doi:10.1145/1247480.1247504: it is their (k - 1) / U_k, if L is the k-th smallest hash U_k and n = k - 1).
"""

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.runtime.loops import Sample, distinct, pick_unseen, second_place

if TYPE_CHECKING:
    from recsys.ids.mappings import IdMapping

_RANGE = 2**64
_FEWEST_PLACES = 1 << 10
_MOST_KEPT = 1 << 14  # distinct ids, by default
_FEW_UNSEEN = 1 << 8


def statistics_bytes(num_distinct: float) -> int:
    """Return the approximate bytes of an `IdStatistics` that has seen `num_distinct` distinct ids."""
    num_kept = int(min(_MOST_KEPT, num_distinct))
    return 8 * (_num_places(num_kept) + 2 * num_kept)


class IdStatistics:
    """Counts of a feature's ids, and a sample of the distinct ones; safe to update from several threads.

    Args:
        size: up to this many distinct ids, all hashes are kept and the number is exact.
        passes_on: also keep what is new since the last `take_state`.

    Attributes:
        num_rows: rows of data, however many ids they have.
        num_ids: mapped ids, without nulls.
        num_nulls: nulls, which are not passed to mappings.
        num_out_of_vocabulary: mapped ids without a row of their own in the vocabulary.
    """

    def __init__(self, size: int = _MOST_KEPT, passes_on: bool = False) -> None:
        self.num_rows = self.num_ids = self.num_nulls = self.num_out_of_vocabulary = 0
        self._size = size
        self._limit = _RANGE
        self._hashes = np.zeros(0, np.uint64)  # ascending, all below the limit
        self._new: list[np.ndarray] = []  # not yet merged into `_hashes`; some may occur several times
        self._num_new = 0
        self._not_passed_on: list[np.ndarray] | None = [] if passes_on else None
        # Most of `_hashes`, each in one of two places that its bits select: one or two looks find a known id.
        self._seen = np.zeros(_FEWEST_PLACES, np.uint64)
        self._lock = threading.Lock()

    def add(self, rows: int = 0, ids: int = 0, nulls: int = 0, out_of_vocabulary: int = 0) -> None:
        """Count rows of data, ids (hashes go to `add_hashes`), nulls, and ids that the vocabulary lacks."""
        with self._lock:
            self.num_rows += rows
            self.num_ids += ids
            self.num_nulls += nulls
            self.num_out_of_vocabulary += out_of_vocabulary

    def add_hashes(self, chunk: np.ndarray) -> None:
        """Add hashes of ids, each distinct one at least once.

        Args:
            chunk: uint64 [3, n]: the hashes, and two rows that are overwritten.
        """
        self.add_unseen(pick_unseen(chunk, self.sample))

    @property
    def sample(self) -> Sample:
        """All or most of the hashes that were added, for reading without the lock."""
        return Sample(self._limit - 1, self._seen)

    def add_unseen(self, unseen: np.ndarray) -> None:
        """Add hashes, uint64 [n], that a `sample` lacked."""
        if len(unseen):
            with self._lock:
                # Few hashes have hardly any duplicates, and sorting would take Python's lock several times.
                unseen = distinct(unseen) if len(unseen) > _FEW_UNSEEN else unseen.copy()
                if self._not_passed_on is not None:
                    self._not_passed_on.append(unseen)
                self._take_in(unseen)

    def take_state(self) -> np.ndarray:
        """Return a state of the counts and hashes since the last call, like `state`; needs `passes_on`."""
        with self._lock:
            assert self._not_passed_on is not None
            state, self._not_passed_on = self._state(self._not_passed_on, self._limit), []
            self.num_rows = self.num_ids = self.num_nulls = self.num_out_of_vocabulary = 0
            return state

    def kept(self) -> tuple[np.ndarray, int]:
        """Return the sample: ascending hashes, uint64, and the limit that they are below (2**64: it has all ids)."""
        with self._lock:
            return self._merged()

    def state(self) -> np.ndarray:
        """Return counts and hashes for `add_state`: uint64 [5 + distinct ids in the sample], up to 512 KiB."""
        with self._lock:
            hashes, limit = self._merged()
            return self._state([hashes], limit)

    def _state(self, hashes: list[np.ndarray], limit: int) -> np.ndarray:
        """Return the four counts and the last hash below the limit, then the hashes; called with the lock held."""
        counts = [self.num_rows, self.num_ids, self.num_nulls, self.num_out_of_vocabulary]
        return np.concatenate([np.array([*counts, limit - 1], np.uint64), *hashes])

    def add_state(self, state: np.ndarray) -> None:
        """Add the state of other statistics, whose hashes have the same seed; each distinct id counts once."""
        *counts, last = state[:5].tolist()
        self.add(*counts)
        with self._lock:
            self._limit = min(self._limit, last + 1)
            self._take_in(state[5:].copy())  # a copy, so that the memory of the state can be freed

    def summary(self, mapping: "IdMapping", num_rows: int | None = None) -> dict[str, Any]:
        """Describe the ids, and the rows that they have by `mapping`, which has mapped them.

        Args:
            num_rows: how many rows were trained. More may have been counted, because data are read ahead, and again
                when a run resumes; the numbers of ids and nulls are then lowered in proportion.

        Returns:
            ids, nulls: how many. distinct_ids: how many of the ids are distinct. exact: whether that is exact or
            estimated. rows: of the table. occupancy: share of these rows that are used (without row 0 of null).
            collision_rate: share of the distinct ids whose rows another id has too. out_of_vocabulary_share: of the
            ids (0 without a vocabulary). The two rates are expectations if only a sample of the distinct ids is kept.
        """
        hashes, limit = self.kept()
        weight = _RANGE / limit
        occupancy, collision_rate = mapping.usage(hashes, weight)
        share = 1.0 if num_rows is None else min(1.0, num_rows / max(1, self.num_rows))
        return {
            "ids": round(share * self.num_ids),
            "nulls": round(share * self.num_nulls),
            "distinct_ids": round(len(hashes) * weight),
            "exact": limit == _RANGE,
            "rows": mapping.num_rows,
            "occupancy": occupancy,
            "collision_rate": collision_rate,
            "out_of_vocabulary_share": self.num_out_of_vocabulary / max(1, self.num_ids),
        }

    def _take_in(self, hashes: np.ndarray) -> None:
        """Store new hashes, and merge them once they outnumber the others; called with the lock held."""
        if len(hashes):
            self._new.append(hashes)
            self._num_new += len(hashes)
        if self._num_new > len(self._hashes):
            self._merge()

    def _merged(self) -> tuple[np.ndarray, int]:
        """Return what `kept` returns; called with the lock held.

        Nothing is replaced: a thread that saves has a heap of its own, where new blocks would be beside the holes that
        old ones leave in the heaps of decoding threads. For 400 columns of 2,750 ids these took 57 MiB.
        """
        hashes, limit = distinct(np.concatenate([self._hashes, *self._new])), self._limit
        hashes = hashes[hashes <= np.uint64(limit - 1)]
        while len(hashes) > self._size:
            limit //= 2
            hashes = hashes[: np.searchsorted(hashes, np.uint64(limit))]
        return hashes, limit

    def _merge(self) -> None:
        """Merge the new hashes into the sample; called with the lock held."""
        hashes, limit = self._merged()
        seen = np.zeros(_num_places(len(hashes)), np.uint64)
        first = (hashes & np.uint64(len(seen) - 1)).view(np.int64)
        seen[first] = hashes
        second = hashes[seen[first] != hashes]
        seen[second_place(second, seen)] = second
        self._hashes, self._limit, self._new, self._num_new, self._seen = hashes, limit, [], 0, seen


def _num_places(num_hashes: int) -> int:
    return max(_FEWEST_PLACES, 1 << (4 * num_hashes - 1).bit_length())
