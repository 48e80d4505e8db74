"""Numbers of ids in a list of distinct ids, by a hash table that is built once and looked up in whole columns."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import UserError
from recsys.ids.hashing import IdKeys, read_keys

_MAX_MOVES = 200  # 10 are enough for 10 million ids, unless three of them want the same two places


def index_bytes(num_ids: int, id_bytes: int) -> int:
    """Return the bytes of an `IdIndex` of so many ids, whose own take `id_bytes` together: they, hashes and places."""
    place = 4 if num_ids + 1 < 2**31 else 8
    return id_bytes + 8 * (1 + num_ids) + place * _num_places(num_ids)


class IdIndex:
    """Finds ids in a list, exactly: the first of the list is number 1, and an id that is not in it has number 0.

    Cuckoo hashing (Pagh & Rodler 2004, doi:10.1016/j.jalgor.2003.12.002): each id has two places by its hash and stands
    in one of them, so that two looks, taken for whole columns at a time, find it. Integers have distinct hashes (see
    `hash_integers`), so the hash stands for the integer. A text that a hash finds is compared itself.
    """

    def __init__(self, ids: pa.Array, seed: int) -> None:
        """Take a list of ids without nulls.

        Args:
            ids: numbers or texts, each once.
            seed: of the hashes by which they will be looked up.

        Raises:
            UserError: an id is there twice, or decimals do not fit int64.
            TypeError: the type is none of ids.
        """
        self._kind = ids.type
        self._keys = _in_order(ids)
        self._hashes = np.append(np.uint64(0), self._keys.hashes(seed))  # by number
        self._hidden: dict[bytes, int] = {}  # texts whose hash another text of the list has
        # By place, the number of the id there; 0 where it is empty.
        self._numbers = self._fill(self._distinct())

    def __len__(self) -> int:
        return len(self._keys)

    def check(self, keys: IdKeys, kind: pa.DataType) -> None:
        """Refuse to look for texts among integers, or for integers among texts.

        Raises:
            UserError: names the two types.
        """
        if (len(keys.texts) and len(self._keys.numbers)) or (len(keys.numbers) and len(self._keys.texts)):
            raise UserError(
                f"ids of type {kind} do not compare with ids of type {self._kind}; write both with one type"
            )

    def find(self, keys: IdKeys, start: int, chunk: np.ndarray) -> np.ndarray:
        """Return the numbers of the keys from `start` on, int32 or int64 [n].

        Args:
            keys: which `check` has passed.
            start: of the keys that are looked for.
            chunk: uint64 [3, n]: their hashes by the seed of the list, and two rows that are overwritten.
        """
        numbers = self.find_hashes(*chunk)
        if start >= len(keys.numbers):
            self._compare_texts(keys.texts.slice(start - len(keys.numbers), len(numbers)), numbers)
        elif keys.numbers.dtype.kind != self._keys.numbers.dtype.kind:
            # -1 and 2**64 - 1 have the same 64 bits.
            part = keys.numbers[start : start + len(numbers)]
            numbers[(part < 0) | (part > np.iinfo(np.int64).max)] = 0
        return numbers

    def find_hashes(self, hashes: np.ndarray, places: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Return the numbers of hashes as `find` does, but of a text also where only the hash is in the list.

        Args:
            hashes: uint64 [n].
            places, found: uint64 [n], overwritten.
        """
        np.bitwise_and(hashes, np.uint64(len(self._numbers) - 1), out=places)
        numbers = self._numbers.take(places.view(np.int64))
        np.take(self._hashes, numbers, out=found, mode="clip")
        other = (found != hashes).nonzero()[0]
        # None is in its second place while the first is empty.
        other = other.take(numbers.take(other).nonzero()[0])
        if len(other):
            hashes = hashes.take(other)
            second = self._numbers.take(_places(hashes, len(self._numbers), 1))
            numbers[other] = np.where(self._hashes.take(second) == hashes, second, 0)
        return numbers

    def _distinct(self) -> np.ndarray:
        """Return the numbers of the list, int32 or int64 [n], but those whose hash has a smaller number too."""
        kind = np.int32 if len(self._hashes) < 2**31 else np.int64
        numbers = np.arange(1, len(self._hashes), dtype=kind)
        ordered = np.sort(self._hashes[1:])
        if not (ordered[1:] == ordered[:-1]).any():
            return numbers
        order = np.argsort(self._hashes[1:], kind="stable")
        ordered = self._hashes[1:][order]
        for place in (ordered[1:] == ordered[:-1]).nonzero()[0].tolist():
            self._hide(int(order[place + 1]) + 1, int(order[np.searchsorted(ordered, ordered[place])]) + 1)
        hidden = np.array(sorted(self._hidden.values()))
        return np.delete(numbers, hidden - 1)

    def _hide(self, number: int, first: int) -> None:
        """Keep an id apart that has the hash of another."""
        if len(self._keys.numbers):
            raise _twice(self._keys.numbers[number - 1])
        text = self._keys.texts[number - 1].as_py()
        if text in self._hidden or text == self._keys.texts[first - 1].as_py():
            raise _twice(text.decode(errors="replace"))
        self._hidden[text] = number

    def _fill(self, distinct: np.ndarray) -> np.ndarray:
        """Return a table of places, at most a quarter full, with each number in one of its two places."""
        num_places = _num_places(len(distinct))
        while (table := self._try_to_fill(distinct, num_places)) is None:
            num_places *= 2
        return table

    def _try_to_fill(self, distinct: np.ndarray, num_places: int) -> np.ndarray | None:
        table = np.zeros(num_places, distinct.dtype)
        rest, side = distinct, np.zeros(len(distinct), np.int64)
        for _ in range(_MAX_MOVES):
            places = _places(self._hashes[rest], num_places, side)
            before = table[places]
            table[places] = rest  # one of those that want the same place
            lost = table[places] != rest
            # Whoever stood there goes to its other place, and so do those that lost; of `before` each counts once.
            moved = before[~lost & (before != 0)]
            from_first = _places(self._hashes[moved], num_places, 0) == places[~lost & (before != 0)]
            rest = np.concatenate([rest[lost], moved])
            if not len(rest):
                return table
            side = np.concatenate([1 - side[lost], from_first.astype(np.int64)])
        return None

    def _compare_texts(self, texts: pa.Array, numbers: np.ndarray) -> None:
        """Correct the numbers, in place, of texts that are another than the one with their hash."""
        found = numbers.nonzero()[0]
        same = pc.equal(texts.take(pa.array(found)), self._keys.texts.take(pa.array(numbers[found] - 1)))
        for i in found[~same.to_numpy(zero_copy_only=False)].tolist():
            numbers[i] = self._hidden.get(texts[i].as_py(), 0)


def _in_order(ids: pa.Array) -> IdKeys:
    """Return the keys of ids in the order of the ids."""
    keys = read_keys(ids)
    if len(keys.numbers) and len(keys.texts):
        raise UserError(f"ids of type {ids.type} are not all whole numbers within 64 bits; write them as strings")
    if keys.indices is None:
        return keys
    if len(keys.numbers):
        return IdKeys(keys.numbers[keys.indices])
    return IdKeys(keys.numbers, keys.texts.take(pa.array(keys.indices)))


def _twice(shown: object) -> UserError:
    return UserError(f"id {shown} is there twice in a list of distinct ids; list it once")


def _num_places(num_ids: int) -> int:
    """Return how many places so many ids have, as a rule."""
    return 4 << num_ids.bit_length()


def _places(hashes: np.ndarray, num_places: int, side: np.ndarray | int) -> np.ndarray:
    """Return the first (side 0) or second (side 1) places of hashes among a power of two, int64 [n]."""
    first = (hashes & np.uint64(num_places - 1)).view(np.int64)
    second = (hashes >> np.uint64(32) & np.uint64(num_places - 1)).view(np.int64)
    return np.where(side, np.where(first == second, second ^ 1, second), first)
