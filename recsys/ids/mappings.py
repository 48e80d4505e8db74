"""Raw ids to table rows, whole columns at a time, and statistics of the ids: how many, and how many distinct.

Distinct ids are counted by their 64-bit hashes. While these are few, all are kept, and the count is exact. Beyond that,
only those below a limit are kept, which are a uniform sample of the distinct ids: n of them below the limit L make
n * 2**64 / L in all (Bar-Yossef et al. 2002, doi:10.1007/3-540-45726-7_1; Beyer et al. 2007,
doi:10.1145/1247480.1247504, whose (k - 1) / U_k this is, L being the k-th smallest hash U_k and n = k - 1).
"""

import threading
from math import expm1, isqrt
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.errors import UserError
from recsys.ids.hashing import IdKeys, increment, is_text, read_keys, remix
from recsys.runtime.loops import (
    CHUNK,
    NO_SAMPLE,
    Sample,
    are_compiled,
    modulo,
    pick_unseen,
    second_place,
    take_rows,
    write_remainders,
    write_rows,
    write_sum,
)

NULL_ROW = 0
_RANGE = 2**64
_FEWEST_PLACES = 1 << 10
_FEW_UNSEEN = 1 << 8
_COUNTS = ("num_rows", "num_ids", "num_nulls", "num_out_of_vocabulary")


def statistics_bytes(num_distinct: float, size: int = 16384) -> int:
    """Return about what an `IdStatistics` takes once it has seen so many distinct ids."""
    num_kept = int(min(size, num_distinct))
    return 8 * (_num_places(num_kept) + 2 * num_kept)


class IdStatistics:
    """Counts of a feature's ids, and a sample of the distinct ones; safe to update from several threads.

    Args:
        size: up to so many distinct ids, all are kept and their number is exact.
        passes_on: keeps for `take_state` what is new.

    Attributes:
        num_rows: rows of data, however many ids they have.
        num_ids: ids mapped, without nulls.
        num_nulls: nulls, which a mapping does not get to see.
        num_out_of_vocabulary: ids mapped that have no row of their own in a vocabulary.
    """

    def __init__(self, size: int = 16384, passes_on: bool = False) -> None:
        self.num_rows = self.num_ids = self.num_nulls = self.num_out_of_vocabulary = 0
        self._size = size
        self._limit = _RANGE
        self._hashes = np.zeros(0, np.uint64)  # ascending, all below the limit
        self._new: list[np.ndarray] = []  # not yet among `_hashes`; a few of them several times
        self._num_new = 0
        self._not_passed_on: list[np.ndarray] | None = [] if passes_on else None
        # Most of `_hashes`, each in one of two places by its bits: an id that has been seen costs a look or two.
        self._seen = np.zeros(_FEWEST_PLACES, np.uint64)
        self._lock = threading.Lock()

    def add(self, rows: int = 0, ids: int = 0, nulls: int = 0, out_of_vocabulary: int = 0) -> None:
        """Count rows of data, ids whose hashes go to `add_hashes`, nulls, and ids that a vocabulary does not have."""
        with self._lock:
            for name, count in zip(_COUNTS, (rows, ids, nulls, out_of_vocabulary), strict=True):
                setattr(self, name, getattr(self, name) + count)

    def add_hashes(self, chunk: np.ndarray) -> None:
        """Take in hashes of ids, each distinct one at least once.

        Args:
            chunk: uint64 [3, n]: the hashes, and two rows that are overwritten.
        """
        self.add_unseen(pick_unseen(chunk, self.sample))

    @property
    def sample(self) -> Sample:
        """The hashes that have been taken in, to be looked at without the lock: none stands there that has not been."""
        return Sample(self._limit - 1, self._seen)

    def add_unseen(self, unseen: np.ndarray) -> None:
        """Take in hashes, uint64 [n], that a `sample` lacked."""
        if len(unseen):
            with self._lock:
                # Sorting asks for Python's lock several times, and of few, few are there several times.
                unseen = np.unique(unseen) if len(unseen) > _FEW_UNSEEN else unseen.copy()
                if self._not_passed_on is not None:
                    self._not_passed_on.append(unseen)
                self._take_in(unseen)

    def take_state(self) -> np.ndarray:
        """Return what has been counted since the last call, as `state`; of what was made with `passes_on`."""
        with self._lock:
            assert self._not_passed_on is not None
            counts = [getattr(self, name) for name in _COUNTS]
            self.num_rows = self.num_ids = self.num_nulls = self.num_out_of_vocabulary = 0
            new, self._not_passed_on = self._not_passed_on, []
            return np.concatenate([np.array([*counts, self._limit - 1], np.uint64), *new])

    def state(self) -> np.ndarray:
        """Return what has been counted, for `add_state`: uint64 [5 + distinct ids kept], up to 512 KiB."""
        with self._lock:
            self._merge()
            counts = [getattr(self, name) for name in _COUNTS]
            return np.concatenate([np.array([*counts, self._limit - 1], np.uint64), self._hashes])

    def add_state(self, state: np.ndarray) -> None:
        """Add what another has counted, by mappings with one and the same seed; each distinct id counts once."""
        *counts, last = state[: len(_COUNTS) + 1].tolist()
        self.add(*counts)
        with self._lock:
            self._limit = min(self._limit, last + 1)
            self._take_in(state[len(_COUNTS) + 1 :].copy())  # which keeps no more of the memory that the state lies in

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
        with self._lock:
            self._merge()
        weight = _RANGE / self._limit
        occupancy, collision_rate = mapping.usage(self._hashes, weight)
        share = 1.0 if num_rows is None else min(1.0, num_rows / max(1, self.num_rows))
        return {
            "ids": round(share * self.num_ids),
            "nulls": round(share * self.num_nulls),
            "distinct_ids": round(len(self._hashes) * weight),
            "exact": self._limit == _RANGE,
            "rows": mapping.num_rows,
            "occupancy": occupancy,
            "collision_rate": collision_rate,
            "out_of_vocabulary_share": self.num_out_of_vocabulary / max(1, self.num_ids),
        }

    def _take_in(self, hashes: np.ndarray) -> None:
        """Keep new hashes, and merge where they are more than the others; called with the lock held."""
        self._new.append(hashes)
        self._num_new += len(hashes)
        if self._num_new > len(self._hashes):
            self._merge()

    def _merge(self) -> None:
        """Take in what is new; called with the lock held."""
        hashes = np.unique(np.concatenate([self._hashes, *self._new]))
        hashes = hashes[hashes <= np.uint64(self._limit - 1)]
        while len(hashes) > self._size:
            self._limit //= 2
            hashes = hashes[: np.searchsorted(hashes, np.uint64(self._limit))]
        seen = np.zeros(_num_places(len(hashes)), np.uint64)
        first = (hashes & np.uint64(len(seen) - 1)).view(np.int64)
        seen[first] = hashes
        second = hashes[seen[first] != hashes]
        seen[second_place(second, seen)] = second
        self._hashes, self._new, self._num_new, self._seen = hashes, [], 0, seen


def _num_places(num_hashes: int) -> int:
    return max(_FEWEST_PLACES, 1 << (4 * num_hashes - 1).bit_length())


class IdMapping:
    """Maps a column of raw ids to rows of a table.

    Attributes:
        rows_per_id: how many rows each id becomes.
        num_rows: rows of the table; every row is less.
    """

    rows_per_id = 1

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        self.num_rows, self._seed = num_rows, seed

    def map(self, ids: pa.Array, out: np.ndarray, statistics: IdStatistics | None = None) -> None:
        """Write the rows of ids.

        Args:
            ids: without nulls, of any type that `read_keys` takes.
            out: int32 or int64 [len(ids) * rows_per_id], contiguous; the rows of id i begin at i * rows_per_id. Must
                hold numbers up to num_rows.
            statistics: counts the ids.

        Raises:
            UserError, TypeError: ids that the mapping does not take.
        """
        k, most = self.rows_per_id, self.num_rows - 1
        if out.shape != (len(ids) * k,) or out.dtype not in (np.int32, np.int64) or most > np.iinfo(out.dtype).max:
            raise ValueError(f"out is {out.dtype} {out.shape}; it must be {(len(ids) * k,)}, and hold rows to {most}")
        keys = read_keys(ids)
        self._check(keys, ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type)
        rows = out if keys.indices is None else np.empty(len(keys) * k, out.dtype)
        self._write_all(keys, rows, statistics)
        if keys.indices is not None:
            take_rows(rows.reshape(-1, k), keys.indices, out.reshape(-1, k))
        if statistics is not None:
            statistics.add(ids=len(ids), out_of_vocabulary=self._num_out_of_vocabulary(out))

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        """Return which share of the rows some ids use, and which share of them has its rows in common with another.

        Args:
            hashes: as statistics got them, of different ids, uint64 [n].
            weight: how many ids each stands for; with 1 the result is exact, else an expectation.
        """
        raise NotImplementedError

    def _check(self, keys: IdKeys, kind: pa.DataType) -> None:
        """Raise UserError for ids that the mapping does not take; of a dictionary, `kind` is that of its values."""

    def _write_all(self, keys: IdKeys, out: np.ndarray, statistics: IdStatistics | None) -> None:
        """Write the rows of all keys, and count them."""
        k = self.rows_per_id
        for start, chunk in keys.hash_chunks(self._seed):
            if statistics is not None:
                statistics.add_hashes(chunk)
            self._write(keys, start, chunk, out[start * k : (start + chunk.shape[1]) * k])

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        """Write the rows of a chunk of keys, as `hash_chunks` yields it from `start` on, which may be overwritten."""
        raise NotImplementedError

    def _num_out_of_vocabulary(self, rows: np.ndarray) -> int:
        return 0

    def _exact_usage(self, hashes: np.ndarray) -> tuple[float, float]:
        rows = np.empty(len(hashes) * self.rows_per_id, np.int64)
        self._write(IdKeys(hashes), 0, np.stack([hashes, hashes, hashes]), rows)
        return len(np.unique(rows)) / (self.num_rows - 1), share_of_collisions(rows.reshape(-1, self.rows_per_id))


class HashMapping(IdMapping):
    """Any id to rows 1 … num_embeddings - 1 by `num_hashes` hashes; row 0 stays for null.

    With several hashes, the vector of an id is the sum of its rows, which two ids seldom have all in common (Svenstrup
    et al. 2017, arXiv:1709.03933). The first row is the same for any number of hashes.
    """

    def __init__(self, num_embeddings: int, seed: int, num_hashes: int = 1) -> None:
        super().__init__(num_embeddings, seed)
        self.rows_per_id = num_hashes

    def _write_all(self, keys: IdKeys, out: np.ndarray, statistics: IdStatistics | None) -> None:
        if self.rows_per_id > 1 or len(keys.texts) or not are_compiled():
            return super()._write_all(keys, out, statistics)
        how = increment(self._seed), self.num_rows - 1
        start, unseen = 0, np.empty(min(CHUNK, len(out)), np.uint64)
        while start < len(out):
            sample = NO_SAMPLE if statistics is None else statistics.sample
            written, found = write_rows(keys.numbers[start:], *how, out[start:], sample, unseen)
            if statistics is not None:
                statistics.add_unseen(unseen[:found])
            start += written

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        k, num_buckets = self.rows_per_id, self.num_rows - 1
        # Further hashes are hashes of the first: a text is read but once.
        for j in range(k - 1, 0, -1):
            remix(chunk[0], j, chunk[2], chunk[1])
            write_remainders(chunk[2], num_buckets, out[j::k], chunk[1])
        write_remainders(chunk[0], num_buckets, out[::k], chunk[1])

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        if weight == 1:
            return self._exact_usage(hashes)
        n, k, m = weight * len(hashes), self.rows_per_id, self.num_rows - 1
        return expected_share(n * k, m), expected_share(n, m**k)


class IdentityMapping(IdMapping):
    """Integer id i to row i."""

    def _check(self, keys: IdKeys, kind: pa.DataType) -> None:
        if len(keys.texts) or is_text(kind) or pa.types.is_temporal(kind):
            raise UserError(f"mapping: identity takes integers, found {kind}; use mapping: hash")
        rows = keys.numbers
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_rows):
            outside = rows[(rows < 0) | (rows >= self.num_rows)]
            advice = "use mapping: hash" if outside[0] < 0 else "raise num_embeddings, or use mapping: hash"
            raise UserError(
                f"id {outside[0]} is outside 0 … {self.num_rows - 1} (mapping: identity); {advice}; for a run that "
                f"has been trained, leave such rows out (data.filter)"
            )

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        out[:] = keys.numbers[start : start + len(out)]

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        return weight * len(hashes) / self.num_rows, 0.0


class QuotientRemainderMapping(IdMapping):
    """Any id, hashed to `num_ids` numbers, to two rows: one by quotient, one by remainder (Shi et al. 2020,
    arXiv:1909.02107).

    For m remainders, number h has the rows 1 + h // m and 1 + ceil(num_ids / m) + h % m, so that different numbers have
    different pairs. m is as great as num_embeddings allows.
    """

    rows_per_id = 2

    def __init__(self, num_embeddings: int, num_ids: int, seed: int) -> None:
        super().__init__(num_embeddings, seed)
        self._num_ids = num_ids
        self._num_quotients = _num_quotients(num_embeddings - 1, num_ids)
        self._num_remainders = num_embeddings - 1 - self._num_quotients

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        number, quotient = chunk[0], chunk[1]
        modulo(number, self._num_ids, quotient)
        np.floor_divide(number, np.uint64(self._num_remainders), out=quotient)
        write_sum(quotient, 1, out[::2])
        np.multiply(quotient, np.uint64(self._num_remainders), out=quotient)
        np.subtract(number, quotient, out=number)
        write_sum(number, 1 + self._num_quotients, out[1::2])

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        if weight == 1:
            return self._exact_usage(hashes)
        n, sizes = weight * len(hashes), (self._num_quotients, self._num_remainders)
        used = sum(size * expected_share(n, size) for size in sizes)
        return used / (self.num_rows - 1), expected_share(n, self._num_ids)


def _num_quotients(num_rows: int, num_ids: int) -> int:
    """Return the least q with q * (num_rows - q) >= num_ids, where num_rows**2 >= 4 * num_ids."""
    q = (num_rows - isqrt(num_rows**2 - 4 * num_ids)) // 2  # the root of the equation, or less than 1 below
    return q if q * (num_rows - q) >= num_ids else q + 1


def share_of_collisions(rows: np.ndarray) -> float:
    """Return the share of ids, rows int64 [ids, rows_per_id], whose rows are all another's too."""
    _, counts = np.unique(rows, axis=None if rows.shape[1] == 1 else 0, return_counts=True)
    return float(counts[counts > 1].sum()) / max(1, len(rows))


def expected_share(num_ids: float, num_rows: float) -> float:
    """Return which share of some rows so many ids at random use, in the mean, which is also which share of the ids has
    a row in common with another."""
    return -expm1(-num_ids / num_rows)
