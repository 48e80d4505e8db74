"""Mappings of raw ids to table rows, whole columns at a time."""

from math import expm1, isqrt

import numpy as np
import pyarrow as pa

from recsys.errors import UserError
from recsys.ids.hashing import IdKeys, increment, is_text, read_keys, remix
from recsys.ids.statistics import IdStatistics
from recsys.runtime.loops import (
    CHUNK,
    NO_SAMPLE,
    are_compiled,
    distinct,
    modulo,
    take_rows,
    write_remainders,
    write_rows,
    write_sum,
)

NULL_ROW = 0


class IdMapping:
    """Maps a column of raw ids to rows of a table.

    Attributes:
        rows_per_id: how many rows each id has.
        num_rows: rows of the table; the number of every row is less.
    """

    rows_per_id = 1

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        self.num_rows, self._seed = num_rows, seed

    def map(self, ids: pa.Array, out: np.ndarray, statistics: IdStatistics | None = None) -> None:
        """Write the rows of ids.

        Args:
            ids: without nulls, of any type that `read_keys` accepts.
            out: int32 or int64 [len(ids) * rows_per_id], contiguous; the rows of id i begin at i * rows_per_id. Its
                type must hold numbers up to num_rows.
            statistics: counts the ids.

        Raises:
            UserError, TypeError: the mapping does not accept the ids.
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

    def rows(self, ids: pa.Array) -> np.ndarray:
        """Return the rows of ids, int64 [len(ids) * rows_per_id]; see `map`."""
        rows = np.empty(len(ids) * self.rows_per_id, np.int64)
        self.map(ids, rows)
        return rows

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        """Return the share of rows that ids use, and the share of ids that have all rows in common with another id.

        Args:
            hashes: of distinct ids, as passed to the statistics, uint64 [n].
            weight: number of ids that each hash stands for; with 1 the result is exact, else an expectation.
        """
        raise NotImplementedError

    def _check(self, keys: IdKeys, dtype: pa.DataType) -> None:
        """Raise a UserError for ids that the mapping does not accept; for a dictionary, `dtype` is its value type."""

    def _write_all(self, keys: IdKeys, out: np.ndarray, statistics: IdStatistics | None) -> None:
        """Write the rows of all keys, and count them."""
        k = self.rows_per_id
        for start, chunk in keys.hash_chunks(self._seed):
            if statistics is not None:
                statistics.add_hashes(chunk)
            self._write(keys, start, chunk, out[start * k : (start + chunk.shape[1]) * k])

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        """Write the rows of a chunk from `hash_chunks` that begins at key `start`; the chunk may be overwritten."""
        raise NotImplementedError

    def _num_out_of_vocabulary(self, rows: np.ndarray) -> int:
        return 0

    def _exact_usage(self, hashes: np.ndarray) -> tuple[float, float]:
        rows = np.empty(len(hashes) * self.rows_per_id, np.int64)
        self._write(IdKeys(hashes), 0, np.stack([hashes, hashes, hashes]), rows)
        return len(distinct(rows)) / (self.num_rows - 1), share_of_collisions(rows.reshape(-1, self.rows_per_id))


class HashMapping(IdMapping):
    """Maps any id to rows 1 … num_embeddings - 1 by `num_hashes` hashes; row 0 is for null.

    With several hashes, the vector of an id is the sum of its rows; two ids seldom have all of them in common
    (Svenstrup et al. 2017, arXiv:1709.03933). The first row is the same for any number of hashes.
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
        # Further hashes are hashes of the first, so that a text is read only once.
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
    """Maps integer id i to row i."""

    def _check(self, keys: IdKeys, dtype: pa.DataType) -> None:
        if len(keys.texts) or is_text(dtype) or pa.types.is_temporal(dtype):
            raise UserError(f"mapping: identity takes integers, found {dtype}; use mapping: hash")
        rows = keys.numbers
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_rows):
            outside = rows[(rows < 0) | (rows >= self.num_rows)]
            advice = "use mapping: hash" if outside[0] < 0 else "raise num_embeddings, or use mapping: hash"
            raise UserError(
                f"id {outside[0]} is outside 0 … {self.num_rows - 1} (mapping: identity); {advice}; for a run that "
                f"is already trained, leave such rows out (data.filter)"
            )

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        out[:] = keys.numbers[start : start + len(out)]

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        return weight * len(hashes) / self.num_rows, 0.0


class QuotientRemainderMapping(IdMapping):
    """Hashes any id to one of `num_ids` numbers, and maps that to two rows: one by its quotient, one by its remainder
    (Shi et al. 2020, arXiv:1909.02107).

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
    """Return the least q with q * (num_rows - q) >= num_ids; num_rows**2 >= 4 * num_ids is required."""
    q = (num_rows - isqrt(num_rows**2 - 4 * num_ids)) // 2  # the root of the equation, or less than 1 below
    return q if q * (num_rows - q) >= num_ids else q + 1


def share_of_collisions(rows: np.ndarray) -> float:
    """Return the share of ids that have all rows in common with some other id; `rows` is int64 [ids, rows_per_id]."""
    _, counts = np.unique(rows, axis=None if rows.shape[1] == 1 else 0, return_counts=True)
    return float(counts[counts > 1].sum()) / max(1, len(rows))


def expected_share(num_ids: float, num_rows: float) -> float:
    """Return the expected share of rows that `num_ids` random ids use; about this share of the ids also has a row in
    common with another id."""
    return -expm1(-num_ids / num_rows)
