"""Raw ids to table rows, whole columns at a time."""

from collections.abc import Callable
from math import expm1, isqrt
from typing import Protocol

import numpy as np
import pyarrow as pa

from recsys.config import IdMappingType, TableConfig
from recsys.errors import UserError
from recsys.ids.hashing import CHUNK, IdKeys, is_text, modulo, read_keys, remix
from recsys.ids.index import IdIndex
from recsys.ids.statistics import IdStatistics

NULL_ROW = 0


class IdMapping(Protocol):
    """Maps a column of raw ids to rows of a table.

    Attributes:
        rows_per_id: how many rows each id becomes.
        num_rows: rows of the table; every row is less.
    """

    rows_per_id: int
    num_rows: int

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

    def usage(self, hashes: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
        """Return which share of the rows some ids use, and which share of them has its rows in common with another.

        Args:
            hashes: as statistics got them, of different ids, uint64 [n].
            weights: how many ids each stands for, float64 [n]; with all 1 the result is exact, else an expectation.
        """


class HashMapping:
    """Any id to rows 1 … num_embeddings - 1 by `num_hashes` hashes; row 0 stays for null.

    With several hashes, the vector of an id is the sum of its rows, which two ids seldom have all in common (Svenstrup
    et al. 2017, arXiv:1709.03933). The first row is the same for any number of hashes.
    """

    def __init__(self, num_embeddings: int, seed: int, num_hashes: int = 1) -> None:
        self.num_rows, self.rows_per_id = num_embeddings, num_hashes
        self._num_buckets = num_embeddings - 1
        self._seed = seed

    def map(self, ids: pa.Array, out: np.ndarray, statistics: IdStatistics | None = None) -> None:
        _check_out(self, ids, out)
        _map_hashes(read_keys(ids), self._seed, self.rows_per_id, self._write, out, statistics)
        if statistics is not None:
            statistics.add_ids(len(ids))

    def _write(self, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        k = self.rows_per_id
        # Further hashes are hashes of the first: a text is read but once.
        for j in range(k - 1, 0, -1):
            remix(chunk[0], j, chunk[2], chunk[1])
            modulo(chunk[2], self._num_buckets, chunk[1])
            _write_sum(chunk[2], 1, out[j::k])
        modulo(chunk[0], self._num_buckets, chunk[1])
        _write_sum(chunk[0], 1, out[::k])

    def usage(self, hashes: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
        n, k, m = float(weights.sum()), self.rows_per_id, self._num_buckets
        if _is_exact(weights):
            rows = _rows_of_hashes(self._write, hashes, k)
            return len(np.unique(rows)) / m, _shared(rows)
        return _expected_used(n * k, m) / m, _expected_shared(n, m**k)


class IdentityMapping:
    """Integer id i to row i."""

    rows_per_id = 1

    def __init__(self, num_embeddings: int) -> None:
        self.num_rows = num_embeddings

    def map(self, ids: pa.Array, out: np.ndarray, statistics: IdStatistics | None = None) -> None:
        _check_out(self, ids, out)
        keys = read_keys(ids)
        kind = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
        if len(keys.texts) or is_text(kind) or pa.types.is_temporal(kind):
            raise UserError(f"mapping: identity takes integers, found {kind}; use mapping: hash")
        rows = keys.numbers
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_rows):
            outside = rows[(rows < 0) | (rows >= self.num_rows)]
            raise UserError(
                f"id {outside[0]} is outside 0 … {self.num_rows - 1} (mapping: identity); "
                f"raise num_embeddings, or use mapping: hash"
            )
        if statistics is not None:
            statistics.add_ids(len(ids))
            for _, chunk in keys.hash_chunks(0):
                statistics.add_hashes(chunk)
        if keys.indices is None:
            out[:] = rows
        else:
            _spread(rows.astype(out.dtype), keys.indices, out, 1)

    def usage(self, hashes: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
        return float(weights.sum()) / self.num_rows, 0.0


class IndexMapping:
    """A raw id to its position in a list of distinct ids, -1 where it is not in it."""

    rows_per_id = 1

    def __init__(self, ids: pa.Array) -> None:
        """Take the list, of numbers or texts; raises UserError for an id that is there twice."""
        self._index = IdIndex(ids, 0)
        self.num_rows = len(ids)

    def map(self, ids: pa.Array, out: np.ndarray, statistics: IdStatistics | None = None) -> None:
        keys = read_keys(ids)
        self._index.check(keys, ids.type)

        def write(start: int, chunk: np.ndarray, out: np.ndarray) -> None:
            np.subtract(self._index.find(keys, start, chunk), 1, out=out)

        _check_out(self, ids, out)
        _map_hashes(keys, 0, 1, write, out, statistics)
        if statistics is not None:
            statistics.add_ids(len(ids), int(np.count_nonzero(out < 0)))

    def usage(self, hashes: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
        known = weights[_find_hashes(self._index, hashes) > 0].sum()
        return float(known) / max(1, self.num_rows), 0.0


class VocabularyMapping:
    """The i-th id of a vocabulary to row 1 + i, any other by hash to one of the `num_buckets` rows after these."""

    rows_per_id = 1

    def __init__(self, vocabulary: pa.Array, num_buckets: int, seed: int) -> None:
        self._index = IdIndex(vocabulary, seed)
        self._num_buckets, self._seed = num_buckets, seed
        self.num_rows = 1 + len(vocabulary) + num_buckets

    def map(self, ids: pa.Array, out: np.ndarray, statistics: IdStatistics | None = None) -> None:
        keys = read_keys(ids)
        self._index.check(keys, ids.type)

        def write(start: int, chunk: np.ndarray, out: np.ndarray) -> None:
            out[:] = self._index.find(keys, start, chunk)
            absent = (out == 0).nonzero()[0]
            if len(absent):
                out[absent] = (self._first_bucket + self._bucket(chunk[0].take(absent))).astype(out.dtype)  # else slow

        _check_out(self, ids, out)
        _map_hashes(keys, self._seed, 1, write, out, statistics)
        if statistics is not None:
            statistics.add_ids(len(ids), int(np.count_nonzero(out >= self._first_bucket)))

    def usage(self, hashes: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
        absent = _find_hashes(self._index, hashes) == 0
        known, unknown = float(weights[~absent].sum()), float(weights[absent].sum())
        if _is_exact(weights):
            buckets = self._bucket(hashes[absent])[:, None]
            used, shared = float(len(np.unique(buckets))), _shared(buckets)
        else:
            used, shared = _expected_used(unknown, self._num_buckets), _expected_shared(unknown, self._num_buckets)
        return (known + used) / (self.num_rows - 1), unknown * shared / max(1.0, known + unknown)

    @property
    def _first_bucket(self) -> int:
        return 1 + len(self._index)

    def _bucket(self, hashes: np.ndarray) -> np.ndarray:
        buckets = hashes.copy()
        modulo(buckets, self._num_buckets, np.empty_like(buckets))
        return buckets.view(np.int64)


class QuotientRemainderMapping:
    """Any id, hashed to `num_ids` numbers, to two rows: one by quotient, one by remainder (Shi et al. 2020,
    arXiv:1909.02107).

    For m remainders, number h has the rows 1 + h // m and 1 + ceil(num_ids / m) + h % m, so that different numbers have
    different pairs. m is as great as num_embeddings allows.
    """

    rows_per_id = 2

    def __init__(self, num_embeddings: int, num_ids: int, seed: int) -> None:
        self.num_rows = num_embeddings
        self._num_ids, self._seed = num_ids, seed
        self._num_quotients = _num_quotients(num_embeddings - 1, num_ids)
        self._num_remainders = num_embeddings - 1 - self._num_quotients

    def map(self, ids: pa.Array, out: np.ndarray, statistics: IdStatistics | None = None) -> None:
        _check_out(self, ids, out)
        _map_hashes(read_keys(ids), self._seed, 2, self._write, out, statistics)
        if statistics is not None:
            statistics.add_ids(len(ids))

    def _write(self, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        number, quotient = chunk[0], chunk[1]
        modulo(number, self._num_ids, quotient)
        np.floor_divide(number, np.uint64(self._num_remainders), out=quotient)
        _write_sum(quotient, 1, out[::2])
        np.multiply(quotient, np.uint64(self._num_remainders), out=quotient)
        np.subtract(number, quotient, out=number)
        _write_sum(number, 1 + self._num_quotients, out[1::2])

    def usage(self, hashes: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
        if _is_exact(weights):
            rows = _rows_of_hashes(self._write, hashes, 2)
            return len(np.unique(rows)) / (self.num_rows - 1), _shared(rows)
        n = float(weights.sum())
        used = _expected_used(n, self._num_quotients) + _expected_used(n, self._num_remainders)
        return used / (self.num_rows - 1), _expected_shared(n, self._num_ids)


def build_mapping(table: TableConfig, vocabulary: pa.Array | None = None) -> IdMapping:
    """Return the mapping that a table's config asks for.

    Args:
        vocabulary: the ids with rows of their own, in the order of these; needed by mapping: vocabulary.

    Raises:
        UserError: num_embeddings is too small.
    """
    if table.mapping is IdMappingType.identity:
        return IdentityMapping(table.num_embeddings)
    if table.mapping is IdMappingType.quotient_remainder:
        if table.num_ids is None:
            raise UserError(
                "mapping: quotient_remainder takes num_ids, which is not set; set it to how many ids there are"
            )
        return QuotientRemainderMapping(table.num_embeddings, table.num_ids, table.hash_seed)
    if table.mapping is IdMappingType.vocabulary:
        if vocabulary is None:
            raise ValueError("mapping: vocabulary is built with a vocabulary")
        mapping = VocabularyMapping(vocabulary, table.num_buckets, table.hash_seed)
        if mapping.num_rows > table.num_embeddings:
            raise UserError(
                f"a vocabulary of {len(vocabulary)} ids with num_buckets: {table.num_buckets} takes {mapping.num_rows} "
                f"rows, and num_embeddings: {table.num_embeddings} is less; raise num_embeddings"
            )
        return mapping
    return HashMapping(table.num_embeddings, table.hash_seed, table.num_hashes)


Write = Callable[[int, np.ndarray, np.ndarray], None]


def _map_hashes(
    keys: IdKeys, seed: int, rows_per_id: int, write: Write, out: np.ndarray, statistics: IdStatistics | None
) -> None:
    """Let `write` turn chunks of hashes into rows, each key's once, and copy these to the ids that have the key.

    Args:
        write: gets the position of a chunk's first key, the chunk as `hash_chunks` yields it, and where the rows go.
    """
    rows = out if keys.indices is None else np.empty(len(keys) * rows_per_id, out.dtype)
    for start, chunk in keys.hash_chunks(seed):
        if statistics is not None:
            statistics.add_hashes(chunk)
        write(start, chunk, rows[start * rows_per_id : (start + chunk.shape[1]) * rows_per_id])
    if keys.indices is not None:
        _spread(rows, keys.indices, out, rows_per_id)


def _spread(rows: np.ndarray, indices: np.ndarray, out: np.ndarray, rows_per_id: int) -> None:
    by_key, by_id = rows.reshape(-1, rows_per_id), out.reshape(-1, rows_per_id)
    for start in range(0, len(indices), CHUNK):  # of the indices NumPy makes an int64 copy
        part = indices[start : start + CHUNK]
        np.take(by_key, part, axis=0, out=by_id[start : start + CHUNK], mode="clip")


def _write_sum(values: np.ndarray, addend: int, out: np.ndarray) -> None:
    """Write uint64 `values` + addend to int32 or int64 `out`, in the fewest passes over memory."""
    if out.dtype == np.int64:
        np.add(values, np.uint64(addend), out=out.view(np.uint64))
    else:
        np.copyto(out.view(np.uint32), values, casting="unsafe")
        np.add(out, np.int32(addend), out=out)


def _check_out(mapping: IdMapping, ids: pa.Array, out: np.ndarray) -> None:
    shape = (len(ids) * mapping.rows_per_id,)
    if out.shape != shape or out.dtype not in (np.int32, np.int64) or mapping.num_rows - 1 > np.iinfo(out.dtype).max:
        raise ValueError(f"out is {out.dtype} {out.shape}; it must be {shape}, and hold rows to {mapping.num_rows - 1}")


def _num_quotients(num_rows: int, num_ids: int) -> int:
    """Return the least q with q * (num_rows - q) >= num_ids, where num_rows**2 >= 4 * num_ids."""
    q = (num_rows - isqrt(num_rows**2 - 4 * num_ids)) // 2  # the root of the equation, or less than 1 below
    return q if q * (num_rows - q) >= num_ids else q + 1


def _find_hashes(index: IdIndex, hashes: np.ndarray) -> np.ndarray:
    return index.find_hashes(hashes, np.empty_like(hashes), np.empty_like(hashes))


def _rows_of_hashes(write: Write, hashes: np.ndarray, rows_per_id: int) -> np.ndarray:
    chunk = np.stack([hashes, hashes, hashes])
    rows = np.empty(len(hashes) * rows_per_id, np.int64)
    write(0, chunk, rows)
    return rows.reshape(-1, rows_per_id)


def _shared(rows: np.ndarray) -> float:
    """Return the share of ids, rows int64 [ids, rows_per_id], whose rows are all another's too."""
    _, counts = np.unique(rows, axis=0, return_counts=True)
    return float(counts[counts > 1].sum()) / max(1, len(rows))


def _is_exact(weights: np.ndarray) -> bool:
    return bool((weights == 1).all())


def _expected_used(num_ids: float, num_rows: float) -> float:
    """Return how many of some rows are used by so many ids at random, in the mean."""
    return -num_rows * expm1(-num_ids / num_rows)


def _expected_shared(num_ids: float, num_rows: float) -> float:
    """Return the probability that an id's row of so many is another id's too, with so many ids at random."""
    return -expm1(-num_ids / num_rows)
