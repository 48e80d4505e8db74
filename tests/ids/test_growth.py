"""Vocabularies that grow from run to run, in which ids that come no more give their places to new ones."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.errors import UserError
from recsys.ids import grow, read_unseen_runs, read_vocabulary, write_vocabulary

NEVER_SEEN = np.zeros(0, np.int32)


def counts_of(counts: dict[Any, int], kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"id": pa.array(list(counts), kind), "count": pa.array(list(counts.values()), pa.int64())})


def test_new_ids_take_the_places_of_those_longest_unseen() -> None:
    known, unseen = pa.array([10, 11, 12, 13, 14]), np.array([2, 0, 5, 1, 2], np.int32)
    today = counts_of({11: 1, 20: 3, 21: 9, 22: 3, 23: 1})
    grown = grow(known, unseen, today, min_count=2, max_size=6, evict_after=3)
    # 12 has not been seen for six runs, 10 and 14 for three, 13 for two. The most frequent goes first: 21, 20, 22.
    assert grown.ids.to_pylist() == [21, 11, 20, 13, 22]
    assert grown.kept.num_ids == 5 and grown.kept.evicted.tolist() == [0, 2, 4]
    assert grown.kept.num_left_out == 0
    assert grown.unseen_runs.tolist() == [0, 0, 0, 2, 0] and grown.unseen_runs.dtype == np.int32
    # One new id alone: the one longest unseen goes, and the others stay, though it is as long ago.
    one = grow(known, unseen, counts_of({11: 1, 21: 9}), 2, 6, 3)
    assert one.ids.to_pylist() == [10, 11, 21, 13, 14] and one.unseen_runs.tolist() == [3, 0, 0, 2, 3]
    # More than there are places: what is left goes behind, as far as there is room, and the rarest nowhere.
    many = grow(known, unseen, counts_of(dict.fromkeys(range(30, 40), 5) | {99: 6}), 2, 6, 3)
    assert many.ids.to_pylist() == [99, 11, 30, 13, 31, 32] and many.kept.evicted.tolist() == [0, 2, 4]
    assert many.kept.num_left_out == 11 - 4  # those shown as often as asked for
    # Nothing is evicted without being asked, and times unseen are counted all the same.
    kept = grow(known, unseen, today, 2, 6, None)
    assert kept.ids.to_pylist() == [10, 11, 12, 13, 14, 21] and kept.unseen_runs.tolist() == [3, 0, 6, 2, 3, 0]
    assert not len(kept.kept.evicted)


def test_a_first_vocabulary_and_one_of_an_earlier_version() -> None:
    first = grow(None, NEVER_SEEN, counts_of({1: 5, 2: 1, 3: 7}), 2, 10, 1)
    assert first.ids.to_pylist() == [3, 1] and first.unseen_runs.tolist() == [0, 0] and first.kept.num_ids == 0
    grown = grow(pa.array([1, 2, 3]), NEVER_SEEN, counts_of({2: 1}), 1, 10, 2)
    assert grown.ids.to_pylist() == [1, 2, 3] and grown.unseen_runs.tolist() == [1, 0, 1]
    empty = grow(pa.array([], pa.int64()), NEVER_SEEN, counts_of({"a": 1}), 1, 10, 2)
    assert empty.ids.to_pylist() == ["a"]


@pytest.mark.parametrize("kind", ["numbers", "beyond 2**63", "texts", "bytes"])
@pytest.mark.parametrize("seed", range(3))
def test_many_days_are_as_by_a_plain_loop(seed: int, kind: str, tmp_path: Path) -> None:
    """Through the file of each day, as runs pass it on."""
    dice = np.random.default_rng(seed)
    make = {
        "numbers": lambda i: i - 20,
        "beyond 2**63": lambda i: 2**64 - 1 - i if i % 2 else i,
        "texts": lambda i: f"id {i}",
        "bytes": lambda i: bytes([255, i]),
    }[kind]
    max_size, min_count, after = 30, int(dice.integers(1, 4)), int(dice.integers(1, 5))
    places: list[Any] = []  # the plain loop's
    unseen: dict[Any, int] = {}
    path = tmp_path / "v.parquet"
    for day in range(12):
        shown = Counter(make(int(i)) for i in dice.integers(3 * day, 3 * day + 25, 60))
        table = counts_of(dict(shown), pa.uint64() if kind == "beyond 2**63" else None)
        known = read_vocabulary(path) if day else None
        grown = grow(known, read_unseen_runs(path) if day else NEVER_SEEN, table, min_count, max_size, after)
        write_vocabulary(path, grown.ids, grown.unseen_runs)
        for each in places:
            unseen[each] = 0 if each in shown else unseen[each] + 1
        new = sorted((-count, each) for each, count in shown.items() if count >= min_count and each not in places)
        stale = sorted((-unseen[each], place) for place, each in enumerate(places) if unseen[each] >= after and day)
        new = new[: len(stale) + max_size - len(places)]
        taken = sorted(place for _, place in stale[: len(new)])
        for _, each in new:
            place = taken.pop(0) if taken else len(places)
            places[place : place + 1] = [each]
            unseen[each] = 0
        assert read_vocabulary(path).to_pylist() == places
        assert read_unseen_runs(path).tolist() == [unseen[each] for each in places]
    assert len(places) <= max_size and make(0) not in places


def test_a_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    pq.write_table(pa.table({"id": [1, 2]}), path)
    assert not len(read_unseen_runs(path))
    for unseen in (["a", "b"], [0.5, 1.0], pa.array([1, None], pa.int32())):
        pq.write_table(pa.table({"id": [1, 2], "unseen_runs": unseen}), path)
        with pytest.raises(UserError, match="unseen_runs, which must be"):
            read_unseen_runs(path)
