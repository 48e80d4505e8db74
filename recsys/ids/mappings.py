"""Raw ids to table rows, whole columns at a time."""

from math import expm1, isqrt

import numpy as np
import pyarrow as pa

from recsys.config import IdMappingType, TableConfig
from recsys.errors import UserError
from recsys.ids.hashing import CHUNK, IdKeys, is_text, modulo, read_keys, remix
from recsys.ids.index import IdIndex
from recsys.ids.statistics import IdStatistics

NULL_ROW = 0


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
        self._check(keys, ids.type)
        rows = out if keys.indices is None else np.empty(len(keys) * k, out.dtype)
        for start, chunk in keys.hash_chunks(self._seed):
            if statistics is not None:
                statistics.add_hashes(chunk)
            self._write(keys, start, chunk, rows[start * k : (start + chunk.shape[1]) * k])
        if keys.indices is not None:
            by_key, by_id = rows.reshape(-1, k), out.reshape(-1, k)
            for start in range(0, len(keys.indices), CHUNK):  # of the indices NumPy makes an int64 copy
                part = keys.indices[start : start + CHUNK]
                np.take(by_key, part, axis=0, out=by_id[start : start + CHUNK], mode="clip")
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
        """Raise UserError for ids that the mapping does not take."""

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        """Write the rows of a chunk of keys, as `hash_chunks` yields it from `start` on, which may be overwritten."""
        raise NotImplementedError

    def _num_out_of_vocabulary(self, rows: np.ndarray) -> int:
        return 0

    def _exact_usage(self, hashes: np.ndarray) -> tuple[float, float]:
        rows = np.empty(len(hashes) * self.rows_per_id, np.int64)
        self._write(IdKeys(hashes), 0, np.stack([hashes, hashes, hashes]), rows)
        return len(np.unique(rows)) / (self.num_rows - 1), _shared(rows.reshape(-1, self.rows_per_id))


class HashMapping(IdMapping):
    """Any id to rows 1 … num_embeddings - 1 by `num_hashes` hashes; row 0 stays for null.

    With several hashes, the vector of an id is the sum of its rows, which two ids seldom have all in common (Svenstrup
    et al. 2017, arXiv:1709.03933). The first row is the same for any number of hashes.
    """

    def __init__(self, num_embeddings: int, seed: int, num_hashes: int = 1) -> None:
        super().__init__(num_embeddings, seed)
        self.rows_per_id = num_hashes

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        k, num_buckets = self.rows_per_id, self.num_rows - 1
        # Further hashes are hashes of the first: a text is read but once.
        for j in range(k - 1, 0, -1):
            remix(chunk[0], j, chunk[2], chunk[1])
            modulo(chunk[2], num_buckets, chunk[1])
            _write_sum(chunk[2], 1, out[j::k])
        modulo(chunk[0], num_buckets, chunk[1])
        _write_sum(chunk[0], 1, out[::k])

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        if weight == 1:
            return self._exact_usage(hashes)
        n, k, m = weight * len(hashes), self.rows_per_id, self.num_rows - 1
        return _expected_share(n * k, m), _expected_share(n, m**k)


class IdentityMapping(IdMapping):
    """Integer id i to row i."""

    def _check(self, keys: IdKeys, kind: pa.DataType) -> None:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if len(keys.texts) or is_text(kind) or pa.types.is_temporal(kind):
            raise UserError(f"mapping: identity takes integers, found {kind}; use mapping: hash")
        rows = keys.numbers
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_rows):
            outside = rows[(rows < 0) | (rows >= self.num_rows)]
            raise UserError(
                f"id {outside[0]} is outside 0 … {self.num_rows - 1} (mapping: identity); "
                f"raise num_embeddings, or use mapping: hash"
            )

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        out[:] = keys.numbers[start : start + len(out)]

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        return weight * len(hashes) / self.num_rows, 0.0


class IndexMapping(IdMapping):
    """A raw id to its position in a list of distinct ids, -1 where it is not in it."""

    def __init__(self, ids: pa.Array, seed: int = 0) -> None:
        """Take the list, of numbers or texts; raises UserError for an id that is there twice."""
        super().__init__(len(ids), seed)
        self._index = IdIndex(ids, seed)

    def _check(self, keys: IdKeys, kind: pa.DataType) -> None:
        self._index.check(keys, kind)

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        np.subtract(self._index.find(keys, start, chunk), 1, out=out)

    def _num_out_of_vocabulary(self, rows: np.ndarray) -> int:
        return int(np.count_nonzero(rows < 0))

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        return weight * np.count_nonzero(self._index.find_hashes(hashes)) / max(1, self.num_rows), 0.0


class VocabularyMapping(IndexMapping):
    """The i-th id of a vocabulary to row 1 + i, any other by hash to one of the `num_buckets` rows after these."""

    def __init__(self, vocabulary: pa.Array, num_buckets: int, seed: int) -> None:
        super().__init__(vocabulary, seed)
        self._num_buckets, self._first_bucket = num_buckets, 1 + len(vocabulary)
        self.num_rows = self._first_bucket + num_buckets

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._index.find(keys, start, chunk)
        absent = (out == 0).nonzero()[0]
        if len(absent):
            out[absent] = (self._first_bucket + self._bucket(chunk[0].take(absent))).astype(out.dtype)  # else slow

    def _num_out_of_vocabulary(self, rows: np.ndarray) -> int:
        return int(np.count_nonzero(rows >= self._first_bucket))

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        absent = hashes[self._index.find_hashes(hashes) == 0]
        known, unknown = weight * (len(hashes) - len(absent)), weight * len(absent)
        used = shared = _expected_share(unknown, self._num_buckets)
        if weight == 1:
            buckets = self._bucket(absent)[:, None]
            used, shared = len(np.unique(buckets)) / self._num_buckets, _shared(buckets)
        return (known + used * self._num_buckets) / (self.num_rows - 1), unknown * shared / max(1.0, known + unknown)

    def _bucket(self, hashes: np.ndarray) -> np.ndarray:
        buckets = hashes.copy()
        modulo(buckets, self._num_buckets, np.empty_like(buckets))
        return buckets.view(np.int64)


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
        _write_sum(quotient, 1, out[::2])
        np.multiply(quotient, np.uint64(self._num_remainders), out=quotient)
        np.subtract(number, quotient, out=number)
        _write_sum(number, 1 + self._num_quotients, out[1::2])

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        if weight == 1:
            return self._exact_usage(hashes)
        n, sizes = weight * len(hashes), (self._num_quotients, self._num_remainders)
        used = sum(size * _expected_share(n, size) for size in sizes)
        return used / (self.num_rows - 1), _expected_share(n, self._num_ids)


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


def _write_sum(values: np.ndarray, addend: int, out: np.ndarray) -> None:
    """Write uint64 `values` + addend to int32 or int64 `out`, in the fewest passes over memory."""
    if out.dtype == np.int64:
        np.add(values, np.uint64(addend), out=out.view(np.uint64))
    else:
        np.copyto(out.view(np.uint32), values, casting="unsafe")
        np.add(out, np.int32(addend), out=out)


def _num_quotients(num_rows: int, num_ids: int) -> int:
    """Return the least q with q * (num_rows - q) >= num_ids, where num_rows**2 >= 4 * num_ids."""
    q = (num_rows - isqrt(num_rows**2 - 4 * num_ids)) // 2  # the root of the equation, or less than 1 below
    return q if q * (num_rows - q) >= num_ids else q + 1


def _shared(rows: np.ndarray) -> float:
    """Return the share of ids, rows int64 [ids, rows_per_id], whose rows are all another's too."""
    _, counts = np.unique(rows, axis=0, return_counts=True)
    return float(counts[counts > 1].sum()) / max(1, len(rows))


def _expected_share(num_ids: float, num_rows: float) -> float:
    """Return which share of some rows so many ids at random use, in the mean, which is also which share of the ids has
    a row in common with another."""
    return -expm1(-num_ids / num_rows)
