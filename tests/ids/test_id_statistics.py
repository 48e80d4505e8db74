"""Counting ids and distinct ids, exactly and by samples, in threads and over ranks; and what they make of a table."""

import math
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from launch import ROOT

from recsys.ids import (
    HashMapping,
    IdentityMapping,
    IdMapping,
    IdStatistics,
    IndexMapping,
    QuotientRemainderMapping,
    VocabularyMapping,
    hash_integers,
    statistics_bytes,
)
from recsys.ids.hashing import numpy_type


def count(mapping: IdMapping, *columns: np.ndarray, statistics: IdStatistics | None = None) -> IdStatistics:
    statistics = statistics or IdStatistics()
    for column in columns:
        mapping.map(pa.array(column), np.empty(len(column) * mapping.rows_per_id, np.int64), statistics)
    return statistics


def merged(states: list[np.ndarray]) -> IdStatistics:
    total = IdStatistics()
    for state in states:
        total.add_state(state)
    return total


def test_summary_of_few_ids():
    mapping = HashMapping(5, 0)
    ids = [10, 20, 30, 40, 10, 10]
    rows = 1 + hash_integers(np.array([10, 20, 30, 40])) % np.uint64(4)
    assert sorted(rows.tolist()) == [1, 3, 3, 3]  # so that one id is alone, three share a row, two rows are unused
    statistics = count(mapping, np.array(ids))
    statistics.add(nulls=7)
    assert statistics.summary(mapping) == {
        "ids": 6,
        "nulls": 7,
        "distinct_ids": 4,
        "exact": True,
        "rows": 5,
        "occupancy": 2 / 4,
        "collision_rate": 3 / 4,
        "out_of_vocabulary_share": 0,
    }


MAPPINGS = [
    HashMapping(10, 0),
    HashMapping(10, 0, 2),
    IdentityMapping(10),
    IndexMapping(pa.array([1, 2])),
    VocabularyMapping(pa.array([1, 2]), 5, 0),
    QuotientRemainderMapping(10, 20, 0),
]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: f"{type(mapping).__name__}-{mapping.rows_per_id}")
def test_summary_of_no_ids(mapping):
    summary = count(mapping, np.zeros(0, np.int64)).summary(mapping)
    shares = [summary[name] for name in ("occupancy", "collision_rate", "out_of_vocabulary_share")]
    assert shares == [0, 0, 0]
    assert (summary["ids"], summary["distinct_ids"], summary["exact"]) == (0, 0, True)


def test_occupancy_and_collisions_of_each_mapping():
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 2**40, 3000)

    def rates(mapping: IdMapping, ids: np.ndarray) -> tuple[float, float]:
        summary = count(mapping, ids, ids).summary(mapping)
        assert summary["distinct_ids"] == len(np.unique(ids))
        return summary["occupancy"], summary["collision_rate"]

    for mapping in (HashMapping(40, 3, 2), QuotientRemainderMapping(200, 5000, 3)):
        out = mapping.rows(pa.array(ids))
        _, counts = np.unique(out.reshape(-1, 2), axis=0, return_counts=True)
        expected = len(np.unique(out)) / (mapping.num_rows - 1), counts[counts > 1].sum() / 3000
        assert rates(mapping, ids) == expected
        assert 0 < expected[1] < 1
    assert rates(IdentityMapping(50), np.array([3, 4, 3, 49])) == (3 / 50, 0)
    assert rates(IndexMapping(pa.array([3, 5, 7, 9])), np.array([3, 4, 9, 3])) == (2 / 4, 0)
    mapping = VocabularyMapping(pa.array([3, 5, 7]), 4, 0)
    buckets = hash_integers(np.array([10, 20, 30])) % np.uint64(4)
    assert buckets.tolist() == [2, 0, 2]
    summary = count(mapping, np.array([10, 20, 30, 3, 5, 10])).summary(mapping)
    assert summary["occupancy"] == 4 / 7
    assert summary["collision_rate"] == 2 / 5
    assert summary["out_of_vocabulary_share"] == 4 / 6


@pytest.mark.parametrize("kind", ["numbers", "dictionary", "text"])
def test_count_is_exact_up_to_the_size(kind):
    values = np.random.default_rng(0).permutation(200_000) % 5000
    columns = {"numbers": pa.array(values), "text": pa.array(values.astype(str))}
    columns["dictionary"] = columns["numbers"].dictionary_encode()
    for size, exact in ((5000, True), (4999, False)):
        statistics, mapping = IdStatistics(size=size), HashMapping(1000, 0)
        for start in range(0, 200_000, 30_000):
            column = columns[kind].slice(start, 30_000)
            mapping.map(column, np.empty(len(column), np.int32), statistics)
        summary = statistics.summary(mapping)
        assert summary["exact"] == exact
        assert summary["ids"] == 200_000
        assert (summary["distinct_ids"] == 5000) == exact


@pytest.mark.parametrize("distinct", [3000, 20_000, 300_000, 2_000_000])
def test_estimate_beyond_the_size(distinct):
    # A sketch of 1024 is off by 1/32 in standard deviation; the fixed ids make the test certain.
    columns = np.array_split(np.arange(distinct) * 7, 10)
    mapping = HashMapping(1000, 0)
    summary = count(mapping, *columns, *columns[:3], statistics=IdStatistics(size=1024)).summary(mapping)
    assert not summary["exact"]
    assert summary["distinct_ids"] == pytest.approx(distinct, rel=0.12)
    assert summary["occupancy"] == pytest.approx(1, abs=0.07)


def test_rates_of_samples_are_expectations():
    n, size = 200_000, 4096
    columns = np.array_split(np.arange(n), 5)
    rows = {
        HashMapping(100_001, 0): (1 - math.exp(-2), 1 - math.exp(-2)),
        HashMapping(1001, 0, 2): (1, 1 - math.exp(-n / 1000**2)),
        QuotientRemainderMapping(2001, 10**6, 0): (1, 1 - math.exp(-n / 10**6)),
        IdentityMapping(400_000): (0.5, 0),
        VocabularyMapping(pa.array(np.arange(0, n, 4)), 50_000, 0): (0, 0),
    }
    for mapping, (occupancy, collision_rate) in rows.items():
        summary = count(mapping, *columns, statistics=IdStatistics(size)).summary(mapping)
        if isinstance(mapping, VocabularyMapping):  # a quarter is known, three ids a bucket are not
            occupancy = (50_000 + 50_000 * (1 - math.exp(-3))) / 100_000
            collision_rate = 0.75 * (1 - math.exp(-3))
            assert summary["out_of_vocabulary_share"] == 0.75
        # and the truth, which is near
        out = mapping.rows(pa.array(np.arange(n)))
        least = 0 if isinstance(mapping, IdentityMapping) else 1
        true_rows = len(np.unique(out)) / (mapping.num_rows - least)
        assert summary["occupancy"] == pytest.approx(occupancy, rel=0.05) == pytest.approx(true_rows, rel=0.05)
        assert summary["collision_rate"] == pytest.approx(collision_rate, rel=0.05)


@pytest.mark.parametrize("distinct", [3000, 50_000, 600_000])
def test_threads_count_as_one(distinct):
    mapping = HashMapping(1000, 0)
    ids = np.random.default_rng(distinct).integers(0, distinct, 1_000_000)
    parts = np.array_split(ids, 40)
    statistics = IdStatistics(size=8192)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda part: count(mapping, part, statistics=statistics), parts))
    summary = statistics.summary(mapping)
    true = len(np.unique(ids))
    assert summary["ids"] == 1_000_000
    assert summary["distinct_ids"] == pytest.approx(true, rel=0.15)  # which threads are first is chance
    if distinct == 3000:
        assert (summary["distinct_ids"], summary["exact"]) == (true, True)


def test_ranks_merge_to_what_one_would_count():
    mapping = HashMapping(20_000, 0)
    ids = np.random.default_rng(0).integers(0, 9000, 40_000)
    ranks = [count(mapping, part) for part in np.array_split(ids, 3)]
    for rank in ranks:
        rank.add(nulls=5)
    total = merged([rank.state() for rank in ranks]).summary(mapping)
    assert total == {**count(mapping, ids).summary(mapping), "nulls": 15}
    assert total["exact"]


@pytest.mark.parametrize("size", [1024, 16384])
def test_ranks_merge_samples(size):
    # Two ranks have more than they can hold, the other has not.
    mapping = HashMapping(20_000, 0)
    first = count(mapping, np.arange(500), 5000 + np.arange(200_000), statistics=IdStatistics(size))
    second = count(mapping, 300 + np.arange(600), statistics=IdStatistics(size))
    third = count(mapping, *np.array_split(100_000 + np.arange(300_000), 9), statistics=IdStatistics(size))
    states = [pickle.loads(pickle.dumps(each.state())) for each in (first, second, third)]
    for some, distinct in ((states[:2], 200_900), (states[1:], 300_600), (states, 395_900)):
        for order in (some, some[::-1]):
            summary = merged(order).summary(mapping)
            assert summary["distinct_ids"] == pytest.approx(distinct, rel=0.1)
            assert not summary["exact"]
    assert max(len(pickle.dumps(state)) for state in states) < 8 * size + 1000


def test_known_ids_change_nothing():
    mapping, ids = HashMapping(20_000, 0), np.arange(16_000)
    statistics = count(mapping, ids, statistics=IdStatistics(16))
    first = statistics.summary(mapping)["distinct_ids"]
    assert first == pytest.approx(16_000, rel=0.6)
    assert count(mapping, ids, ids, statistics=statistics).summary(mapping)["distinct_ids"] == first


@pytest.mark.parametrize("num_distinct", [24, 3000, 16_000])
def test_counts_take_memory_by_distinct_ids(num_distinct: int) -> None:
    tracemalloc.start()
    try:
        statistics, mapping = IdStatistics(), HashMapping(1000, 0)
        for _ in range(4):
            count(mapping, np.arange(400_000) % num_distinct, statistics=statistics)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert statistics.summary(mapping)["distinct_ids"] == num_distinct
    assert taken < statistics_bytes(num_distinct) + (64 << 10)


@pytest.mark.parametrize("number", [0, 1, 900, 5000])
def test_states_are_kept_as_numbers(number):
    statistics = IdStatistics(size=1000)
    mapping = HashMapping(100, 0)
    for start in range(0, number, 500):
        ids = pa.array(range(start, min(number, start + 500)))
        mapping.map(ids, np.empty(len(ids), np.int64), statistics)
        statistics.add(rows=len(ids))
    statistics.add(nulls=3)
    again = merged([statistics.state().view(np.int64).view(np.uint64)])
    assert again.num_rows == again.num_ids == number and again.num_nulls == 3
    assert again.summary(mapping) == statistics.summary(mapping)


def test_states_leave_what_is_counted_where_it_is():
    """What a thread that saves makes anew is in its own heap, beside the holes that it leaves in others."""
    statistics, mapping = IdStatistics(), HashMapping(1000, 0)
    count(mapping, np.arange(3000), np.arange(2500, 4000), statistics=statistics)
    seen = statistics.sample.seen
    assert statistics.summary(mapping)["distinct_ids"] == len(statistics.state()) - 5 == 4000
    assert statistics.sample.seen is seen


def test_what_was_counted_earlier_counts():
    whole, first, second = (IdStatistics() for _ in range(3))
    mapping = HashMapping(100, 0)
    for part, ids in ((first, range(40)), (second, range(30, 90))):
        for statistics in (whole, part):
            mapping.map(pa.array(ids), np.empty(len(ids), np.int64), statistics)
            statistics.add(rows=len(ids))
    second.add_state(first.state())
    assert second.summary(mapping) == whole.summary(mapping)
    # Ten rows were read again: as many ids as rows were trained.
    assert second.summary(mapping, 90)["ids"] == second.summary(mapping, 90)["distinct_ids"] == 90
    assert second.summary(mapping, 1000)["ids"] == 100


def test_states_without_anything_new_take_no_memory():
    passing, total = IdStatistics(passes_on=True), IdStatistics()
    mapping, ids = HashMapping(100, 0), pa.array(range(5))
    for _ in range(200):
        mapping.map(ids, np.empty(5, np.int32), passing)
        total.add_state(passing.take_state())
    assert len(total._new) <= 5 and total.num_ids == 200 * 5
    assert total.state().tolist()[5:] == passing.state().tolist()[5:]


def test_types_of_numpy_are_found_without_pandas() -> None:
    """pyarrow 25, the last one for Python 3.10, imports it in `to_pandas_dtype`, whatever the type."""
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        assert numpy_type(pa.type_for_alias(name)) == name
    assert [numpy_type(dtype) for dtype in (pa.float16(), pa.float32(), pa.float64())] == ["f2", "f4", "f8"]
    assert not [path for path in (ROOT / "recsys").rglob("*.py") if ".to_pandas" in path.read_text()]
