"""What ids a feature had: how many, how many distinct, and how well its table holds them.

Distinct ids are counted by their 64-bit hashes. While these are few, all are kept, and the count is exact. Beyond that,
only those below a limit are kept, which are a uniform sample of the distinct ids: n of them below the limit L make
n * 2**64 / L in all (Bar-Yossef et al. 2002, doi:10.1007/3-540-45726-7_1; Beyer et al. 2007,
doi:10.1145/1247480.1247504, whose (k - 1) / U_k this is, L being the k-th smallest hash U_k and n = k - 1).
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from recsys.ids.mappings import IdMapping

_RANGE = 2**64
_LATE_SHARE = 64  # one of so many hash values is looked at later on: 0.6 ns an id, in place of 2 to 5
_SIFTED_AT_ONCE = 16384  # since a call of NumPy takes as long as a thousand hashes
_FIRST_PLACES = 1 << 10


@dataclass(frozen=True)
class Sketch:
    """All distinct hashes below a limit that some hashes had.

    Attributes:
        hashes: uint64 [n], ascending.
        limit: 1 … 2**64; at 2**64 it holds all.
    """

    hashes: np.ndarray
    limit: int = _RANGE

    @property
    def weight(self) -> float:
        """How many distinct hashes each one in the sketch stands for."""
        return _RANGE / self.limit

    def below(self, limit: int) -> "Sketch":
        """Return the sketch with a limit that is at most this one."""
        if limit >= self.limit:
            return self
        return Sketch(self.hashes[: np.searchsorted(self.hashes, np.uint64(limit))], limit)

    def joined(self, hashes: np.ndarray, size: int) -> "Sketch":
        """Return the sketch with more hashes below its limit, uint64 in any order; lower it to keep at most `size`."""
        merged = np.concatenate([self.hashes, hashes])
        merged.sort()
        first = np.ones(len(merged), bool)
        np.not_equal(merged[1:], merged[:-1], out=first[1:])
        joined = Sketch(merged[first], self.limit)
        return joined if len(joined.hashes) <= size else joined.below(int(joined.hashes[size]))


@dataclass(frozen=True)
class IdState:
    """What an `IdStatistics` has counted, to be sent to another process or kept, and merged there; up to 1 MiB."""

    num_rows: int
    num_ids: int
    num_nulls: int
    num_out_of_vocabulary: int
    early: Sketch
    late: Sketch | None
    size: int

    def pack(self) -> np.ndarray:
        """Return it as numbers, uint64 [n]."""
        sketches = [self.early] if self.late is None else [self.early, self.late]
        counts = [self.num_rows, self.num_ids, self.num_nulls, self.num_out_of_vocabulary, self.size]
        limits = [number for sketch in sketches for number in (sketch.limit - 1, len(sketch.hashes))]
        return np.concatenate([np.array([*counts, len(sketches), *limits], np.uint64), *(s.hashes for s in sketches)])

    @staticmethod
    def unpack(numbers: np.ndarray) -> "IdState":
        """Return what `pack` was given."""
        num_rows, num_ids, num_nulls, unknown, size, num_sketches = numbers[:6].tolist()
        limits, at, sketches = numbers[6 : 6 + 2 * num_sketches].tolist(), 6 + 2 * num_sketches, []
        for limit, count in zip(limits[::2], limits[1::2], strict=True):
            sketches.append(Sketch(numbers[at : at + count], limit + 1))
            at += count
        late = sketches[1] if num_sketches > 1 else None
        return IdState(num_rows, num_ids, num_nulls, unknown, sketches[0], late, size)


def statistics_bytes(num_distinct: float, size: int = 65536) -> int:
    """Return about what an `IdStatistics` takes once it has seen so many distinct ids: places and two sketches."""
    known = int(min(size, num_distinct))
    return 8 * (_num_places(known) + 2 * known)


class IdStatistics:
    """Counts of a feature's ids, and a sketch of the distinct ones; safe to update from several threads.

    The first `exact_ids` ids are all looked at, and the distinct among them counted exactly, as long as these are at
    most `size`. After that a 64th of all hash values is looked at, and ids seen then for the first time are counted by
    those, 64-fold: without bias, and at little cost.

    Attributes:
        num_rows: as told by `add_rows`.
        num_ids: ids mapped, without nulls.
        num_nulls: as told by `add_nulls`.
        num_out_of_vocabulary: ids mapped that have no row of their own in a vocabulary.
        earlier: what was counted before these, which `state` adds.
    """

    def __init__(self, size: int = 65536, exact_ids: int = 1 << 22) -> None:
        self.num_rows = self.num_ids = self.num_nulls = self.num_out_of_vocabulary = 0
        self.earlier: IdState | None = None
        self._size, self._exact_ids = size, exact_ids
        self._num_hashed = self._num_taken = 0
        self._early = Sketch(np.zeros(0, np.uint64))
        self._late: Sketch | None = None  # of the later hashes that are not in `_early`
        self._limit: np.uint64 | None = None  # of `_late`
        self._seen = _SeenHashes(_num_places(0))
        self._unsifted = _Pending()  # below the limit, perhaps seen
        self._new = _Pending()  # in `_seen`, not yet in a sketch; a few of them several times
        self._lock = threading.Lock()

    def add_rows(self, count: int) -> None:
        """Count rows of data, however many ids they have."""
        with self._lock:
            self.num_rows += count

    def add_nulls(self, count: int) -> None:
        """Count nulls, which a mapping does not get to see."""
        with self._lock:
            self.num_nulls += count

    def add_ids(self, count: int, out_of_vocabulary: int = 0) -> None:
        """Count mapped ids, whose hashes go to `add_hashes`."""
        with self._lock:
            self.num_ids += count
            self.num_out_of_vocabulary += out_of_vocabulary

    def add_hashes(self, chunk: np.ndarray) -> None:
        """Take in hashes of ids, each distinct one at least once.

        Args:
            chunk: uint64 [3, n]: the hashes, and two rows that are overwritten.
        """
        limit = self._limit
        if limit is None:
            # Without the lock: `_seen` never holds a hash that has not been taken in.
            found = self._seen.unseen(*chunk)
        else:
            below = np.less(chunk[0], limit, out=chunk[1].view(bool)[: chunk.shape[1]])
            found = chunk[0].take(below.nonzero()[0])
        with self._lock:
            self._num_hashed += chunk.shape[1]
            if limit is None:
                self._take(found)
            else:
                self._unsifted.append(found)
                if self._unsifted.count >= _SIFTED_AT_ONCE:
                    self._sift()
            if self._late is None and self._num_hashed >= self._exact_ids:
                self._begin_late()

    def state(self) -> IdState:
        """Return what has been counted so far."""
        with self._lock:
            self._sift()
            self._merge()
            counts = (self.num_rows, self.num_ids, self.num_nulls, self.num_out_of_vocabulary)
            state = IdState(*counts, self._early, self._late, self._size)
        return state if self.earlier is None else IdStatistics.merged([self.earlier, state]).state()

    @staticmethod
    def merged(states: Sequence[IdState]) -> "IdStatistics":
        """Return the statistics of all ids together that several have counted, by mappings with one and the same seed.

        Each distinct id is counted once; the result is not meant to be added to.
        """
        total = IdStatistics(min(state.size for state in states))
        total.num_rows = sum(state.num_rows for state in states)
        total.num_ids = sum(state.num_ids for state in states)
        total.num_nulls = sum(state.num_nulls for state in states)
        total.num_out_of_vocabulary = sum(state.num_out_of_vocabulary for state in states)
        total._early = _union([state.early for state in states], total._size)
        lates = [state.late.below(total._early.limit) for state in states if state.late is not None]
        if lates:
            late = _union(lates, total._size)
            total._late = Sketch(_without(late.hashes, total._early.hashes), late.limit)
        return total

    def summary(self, mapping: "IdMapping", num_rows: int | None = None) -> dict[str, Any]:
        """Describe the ids, and the rows that `mapping`, by which they were mapped, gives them.

        Args:
            num_rows: that were trained. Data are read ahead, and again where a run goes on: where more rows were
                counted than that, the numbers of ids and nulls are lowered in proportion.

        Returns:
            ids, nulls: how many; distinct_ids: how many of the ids, and exact: whether that is counted or estimated;
            rows: of the table; occupancy: share of them used (row 0 of null apart); collision_rate: share of the
            distinct ids whose row, or rows, another one has too; out_of_vocabulary_share: of the ids (0 without one).
            The two rates are expectations where only a sample of the distinct ids is kept.
        """
        state = self.state()
        sketches = [state.early] if state.late is None else [state.early, state.late]
        hashes = np.concatenate([sketch.hashes for sketch in sketches])
        weights = np.concatenate([np.full(len(sketch.hashes), sketch.weight) for sketch in sketches])
        occupancy, collision_rate = mapping.usage(hashes, weights)
        share = 1.0 if num_rows is None else min(1.0, num_rows / max(1, state.num_rows))
        return {
            "ids": round(share * state.num_ids),
            "nulls": round(share * state.num_nulls),
            "distinct_ids": round(weights.sum()),
            "exact": state.late is None and state.early.limit == _RANGE,
            "rows": mapping.num_rows,
            "occupancy": occupancy,
            "collision_rate": collision_rate,
            "out_of_vocabulary_share": state.num_out_of_vocabulary / max(1, state.num_ids),
        }

    # The methods below are called with the lock held.

    def _sift(self) -> None:
        hashes = self._unsifted.flush()
        self._take(self._seen.unseen(hashes, np.empty_like(hashes), np.empty_like(hashes)))

    def _take(self, hashes: np.ndarray) -> None:
        if self._limit is not None:
            hashes = hashes[hashes < self._limit]  # it may have fallen since they were found
        hashes = np.unique(hashes)  # few ids are to take little
        while self._seen.num_places < _num_places(min(self._size, self._num_taken + len(hashes))):
            self._seen = self._seen.doubled()
        self._num_taken += len(hashes)
        self._seen.add(hashes)
        self._new.append(hashes)
        if self._new.count >= self._size:
            self._merge()

    def _merge(self) -> None:
        if not self._new.count:
            return
        new = self._new.flush()
        if self._late is None:
            self._early = self._early.joined(new, self._size)
            if self._early.limit < _RANGE:
                self._begin_late()
        else:
            self._late = self._late.joined(_without(new, self._early.hashes), self._size)
            self._limit = np.uint64(self._late.limit)

    def _begin_late(self) -> None:
        self._merge()
        if self._late is None:
            limit = min(_RANGE // _LATE_SHARE, self._early.limit)
            self._late = Sketch(np.zeros(0, np.uint64), limit)
            self._limit = np.uint64(limit)


def _num_places(num_hashes: int) -> int:
    return max(_FIRST_PLACES, 1 << (2 * num_hashes - 1).bit_length())


def _union(sketches: Sequence[Sketch], size: int) -> Sketch:
    limit = min(sketch.limit for sketch in sketches)
    hashes = [sketch.below(limit).hashes for sketch in sketches]
    return Sketch(np.zeros(0, np.uint64), limit).joined(np.concatenate(hashes), size)


def _without(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the hashes that are not among `others`, which ascend."""
    if not len(others):
        return hashes
    places = np.minimum(np.searchsorted(others, hashes), len(others) - 1)
    return hashes[others[places] != hashes]


class _Pending:
    """Arrays of hashes to be worked on together."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[np.ndarray] = []

    def append(self, hashes: np.ndarray) -> None:
        if len(hashes):
            self.count += len(hashes)
            self._parts.append(hashes)

    def flush(self) -> np.ndarray:
        parts, self._parts, self.count = self._parts, [], 0
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


class _SeenHashes:
    """Most of the hashes added: one has two places by its bits, and is forgotten when another takes its second."""

    def __init__(self, num_places: int) -> None:
        """Take a number of places, a power of two."""
        self._mask = np.uint64(num_places - 1)
        self._hashes = self._empty(np.arange(num_places, dtype=np.uint64))

    @property
    def num_places(self) -> int:
        return len(self._hashes)

    def doubled(self) -> "_SeenHashes":
        """Return twice the places with the same hashes."""
        doubled = _SeenHashes(2 * self.num_places)
        doubled.add(self._hashes[self._hashes != self._empty(np.arange(self.num_places, dtype=np.uint64))])
        return doubled

    @staticmethod
    def _empty(places: np.ndarray) -> np.ndarray:
        # What stands in an empty place is a number whose own two places are others, so that it is never found.
        other = places ^ np.uint64(1)
        return other | other << np.uint64(32)

    def unseen(self, hashes: np.ndarray, places: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Return the hashes that are not there; `places` and `found` are overwritten. All are uint64 [n]."""
        np.bitwise_and(hashes, self._mask, out=places)
        np.take(self._hashes, places.view(np.int64), out=found, mode="clip")
        rest = hashes.take((found != hashes).nonzero()[0])
        return rest[self._hashes[self._second(rest)] != rest] if len(rest) else rest

    def add(self, hashes: np.ndarray) -> None:
        """Remember hashes, uint64 [n]."""
        first = hashes & self._mask
        free = self._hashes[first] == self._empty(first)
        self._hashes[first[free]] = hashes[free]
        rest = hashes[~free]
        self._hashes[self._second(rest)] = rest

    def _second(self, hashes: np.ndarray) -> np.ndarray:
        return hashes >> np.uint64(32) & self._mask
