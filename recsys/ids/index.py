"""A hash table of the places of ids in a list of distinct ids, and the mapping by a vocabulary."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import UserError
from recsys.ids.hashing import IdKeys, keys_in_order
from recsys.ids.mappings import IdMapping, expected_share, share_of_collisions
from recsys.runtime.loops import CHUNK, distinct, modulo

_PLACES_PER_ID = 4  # at least 2; with more places, fewer ids share one
_LAST = np.uint64(2**64 - 1)


def index_bytes(num_ids: int, id_bytes: int) -> int:
    """Return the bytes of an `IndexMapping`: those of the ids themselves (`id_bytes`), their hashes and places."""
    return id_bytes + (8 + _width(num_ids)) * (1 + num_ids) + _width(num_ids) * _num_places(num_ids)


class IndexMapping(IdMapping):
    """Maps a raw id to its position in a list of distinct ids, or -1 if it is not in the list.

    Internally, the first id of the list has number 1, and an id that is not in it has number 0.
    The hashes of the list are sorted. A table, indexed by the first bits of a hash, says where the hashes with these
    bits start. Most starts have one hash or none, so that two lookups, of whole columns at a time, find most ids; the
    others need more steps. Integers have distinct hashes (see `hash_integers`), so comparing hashes is enough. If the
    hashes of texts are equal, the texts are compared.
    """

    def __init__(self, ids: pa.Array, seed: int = 0) -> None:
        """Build the hash table of a list of ids without nulls.

        Args:
            ids: numbers or texts, each once.
            seed: of the hashes by which ids will be looked up.

        Raises:
            UserError: an id occurs twice, two texts have the same hash, or decimals do not fit int64.
            TypeError: the type is not one that ids may have.
        """
        super().__init__(len(ids), seed)
        self._dtype = ids.type
        self._keys = keys_in_order(ids)
        hashes = self._keys.hashes(seed)
        order = np.argsort(hashes, kind="stable")
        # _LAST ends every search, and has number 0. Of many ids, each temporary takes as much as the ids.
        self._hashes = np.full(len(ids) + 1, _LAST)
        np.take(hashes, order, out=self._hashes[:-1], mode="clip")
        del hashes
        self._numbers = np.zeros(len(ids) + 1, f"i{_width(len(ids))}")
        np.add(order, 1, out=self._numbers[:-1], casting="unsafe")
        del order
        for place in (self._hashes[1:-1] == self._hashes[:-2]).nonzero()[0][:1].tolist():
            first, second = (self._shown(number - 1) for number in self._numbers[place : place + 2].tolist())
            if first == second:
                raise UserError(f"id {first} occurs twice in a list of distinct ids; list it once")
            raise UserError(f"ids {first} and {second} have the same 64-bit hash; rename one of them")
        self._shift = np.uint64(65 - _num_places(len(ids)).bit_length())
        self._starts = self._starts_of_places()

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        np.subtract(self._find(keys, start, chunk), 1, out=out)

    def _num_out_of_vocabulary(self, rows: np.ndarray) -> int:
        return int(np.count_nonzero(rows < 0))

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        return weight * np.count_nonzero(self._find_hashes(hashes)) / max(1, self.num_rows), 0.0

    def _check(self, keys: IdKeys, dtype: pa.DataType) -> None:
        if (len(keys.texts) and len(self._keys.numbers)) or (len(keys.numbers) and len(self._keys.texts)):
            raise UserError(
                f"ids of type {dtype} cannot be compared with ids of type {self._dtype}; write both with the same type"
            )

    def _find(self, keys: IdKeys, start: int, chunk: np.ndarray) -> np.ndarray:
        """Return the numbers of the keys from `start` on, int32 or int64 [n]; arguments are those of `_write`."""
        numbers = self._find_hashes(*chunk)
        if start >= len(keys.numbers):
            self._compare_texts(keys.texts.slice(start - len(keys.numbers), len(numbers)), numbers)
        elif keys.numbers.dtype.kind != self._keys.numbers.dtype.kind:
            # -1 and 2**64 - 1 have the same 64 bits.
            values = keys.numbers[start : start + len(numbers)]
            numbers[(values < 0) | (values > np.iinfo(np.int64).max)] = 0
        return numbers

    def _find_hashes(
        self, hashes: np.ndarray, places: np.ndarray | None = None, candidates: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the numbers of hashes like `_find`, but without comparing texts.

        Args:
            hashes: uint64 [n].
            places, candidates: uint64 [n], overwritten.
        """
        if places is None or candidates is None:
            places, candidates = np.empty_like(hashes), np.empty_like(hashes)
        np.right_shift(hashes, self._shift, out=places)
        slots = self._starts.take(places.view(np.int64))
        np.take(self._hashes, slots, out=candidates, mode="clip")
        unfinished = (candidates < hashes).nonzero()[0]
        while len(unfinished):
            slots[unfinished] += 1
            candidates[unfinished] = self._hashes.take(slots.take(unfinished))
            unfinished = unfinished[candidates.take(unfinished) < hashes.take(unfinished)]
        numbers = self._numbers.take(slots)
        numbers[(candidates != hashes).nonzero()[0]] = 0
        return numbers

    def _starts_of_places(self) -> np.ndarray:
        """Return for each place the number of hashes before it, int32 or int64 [places]."""
        starts = np.zeros(_num_places(len(self._hashes) - 1) + 1, self._numbers.dtype)
        for start in range(0, len(self._hashes) - 1, CHUNK):
            places = (self._hashes[start : min(start + CHUNK, len(self._hashes) - 1)] >> self._shift).view(np.int64)
            starts[places[0] + 1 : places[-1] + 2] += np.bincount(places - places[0])
        np.cumsum(starts, out=starts)
        return starts[:-1]

    def _shown(self, i: int) -> object:
        if len(self._keys.numbers):
            return self._keys.numbers[i]
        return self._keys.texts[i].as_py().decode(errors="replace")

    def _compare_texts(self, texts: pa.Array, numbers: np.ndarray) -> None:
        """Set to 0, in place, the numbers of texts that differ from the listed text with the same hash."""
        places = numbers.nonzero()[0]
        same = pc.equal(texts.take(pa.array(places)), self._keys.texts.take(pa.array(numbers[places] - 1)))
        numbers[places[~same.to_numpy(zero_copy_only=False)]] = 0


class VocabularyMapping(IndexMapping):
    """Maps the i-th id of a vocabulary to row 1 + i, and others by hash to one of `num_buckets` rows after these."""

    def __init__(self, vocabulary: pa.Array, num_buckets: int, seed: int) -> None:
        super().__init__(vocabulary, seed)
        self._num_buckets, self._first_bucket = num_buckets, 1 + len(vocabulary)
        self.num_rows = self._first_bucket + num_buckets

    def has(self, ids: pa.Array) -> np.ndarray:
        """Return a mask, bool [len(ids)], of the ids that are in the vocabulary; `ids` has no nulls."""
        return self.rows(ids) < self._first_bucket

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._find(keys, start, chunk)
        absent = (out == 0).nonzero()[0]
        if len(absent):
            # Without the cast, assigning int64 to int32 would be slow.
            out[absent] = (self._first_bucket + self._bucket(chunk[0].take(absent))).astype(out.dtype)

    def _num_out_of_vocabulary(self, rows: np.ndarray) -> int:
        return int(np.count_nonzero(rows >= self._first_bucket))

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        absent = hashes[self._find_hashes(hashes) == 0]
        num_found, num_absent = weight * (len(hashes) - len(absent)), weight * len(absent)
        used = shared = expected_share(num_absent, self._num_buckets)
        if weight == 1:
            buckets = self._bucket(absent)[:, None]
            used, shared = len(distinct(buckets)) / self._num_buckets, share_of_collisions(buckets)
        share_used = (num_found + used * self._num_buckets) / (self.num_rows - 1)
        return share_used, num_absent * shared / max(1.0, num_found + num_absent)

    def _bucket(self, hashes: np.ndarray) -> np.ndarray:
        buckets = hashes.copy()
        modulo(buckets, self._num_buckets, np.empty_like(buckets))
        return buckets.view(np.int64)


def _num_places(num_ids: int) -> int:
    return _PLACES_PER_ID << max(1, num_ids.bit_length() - 1)


def _width(num_ids: int) -> int:
    """Return the bytes of an integer that can count `num_ids` ids."""
    return 4 if num_ids + 1 < 2**31 else 8
