"""Several rows per id, weights of ids, and boundaries, against plain Python over the rows."""

import datetime
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conversion import (
    EMPTY,
    LISTS,
    REFUSE,
    RESERVED,
    Counts,
    Numbered,
    convert,
    cut,
    expected,
    part,
    refusal,
    rows_of,
    some_lists,
)

from recsys.config import Keep
from recsys.data.convert import convert_ids

# Several rows per id


def test_rows_per_id():
    pair = Numbered(2)
    assert convert(pa.array([5, 6]), mapping=pair) == [[10, 11], [12, 13]]
    assert convert(pa.array([5, None]), mapping=pair) == [[10, 11], [0, 0]]
    assert convert(pa.array([5, None]), mapping=pair, null=EMPTY) == [[10, 11], []]
    # max_length counts ids.
    lists = pa.array([[1, 2, 3], None, [None, 4]])
    assert convert(lists, mapping=pair, max_length=2) == [[4, 5, 6, 7], [], [0, 0, 8, 9]]
    assert convert(lists, mapping=pair, null=EMPTY) == [[2, 3, 4, 5, 6, 7], [], [8, 9]]
    out = np.full(2, 9, np.int32)
    found = convert_ids(pa.array([5, 6]), part(pair), out.dtype, out)
    assert rows_of(found, 2, np.int32) == [[10, 11], [12, 13]] and out.tolist() == [9, 9]


# Weights


def weighted(ids: pa.Array, weights: pa.Array, **settings: Any) -> list[list[tuple[int, float]]]:
    """(table row, weight) of each row of data."""
    found = convert_ids(ids, part(weights="w", **settings), np.dtype(np.int64), weights=weights)
    rows = rows_of(found, len(ids))
    assert found.weights is not None and found.weights.dtype == np.float32
    each = cut(found.weights, np.array([len(row) for row in rows], np.int64))
    return [list(zip(*pair, strict=True)) for pair in zip(rows, each, strict=True)]


@pytest.mark.parametrize("kind", [*LISTS[:2], pa.list_(pa.float64()), pa.list_(pa.float16())], ids=str)
@pytest.mark.parametrize("null", [RESERVED, EMPTY])
@pytest.mark.parametrize(("max_length", "keep"), [(None, Keep.last), (3, Keep.last), (3, Keep.first)])
def test_weights_follow_their_ids(kind, null, max_length, keep):
    rows = some_lists(100)
    # Each id weighs half of itself (a null: 0), so that a weight tells whose it is. A null list matches an empty one.
    halves = [[(id or 0) // 2 for id in row] if row else [] for row in rows]
    for start, stop in [(0, 100), (30, 90)]:
        ids = pa.array(rows)[start:stop]
        half = pa.types.is_float16(kind.value_type)
        weights = pa.array([[np.float16(w) if half else w for w in row] for row in halves], kind)
        found = weighted(ids, weights[start:stop], null=null, max_length=max_length, keep=keep)
        given = [row or [] for row in rows[start:stop]]
        assert found == [[(i, i // 2) for i in row] for row in expected(given, null, max_length, keep)]


def test_weights_of_one_id_a_row():
    ids, weights = pa.array([5, None, 7]), pa.array([0.5, -2.0, 1.5])
    assert weighted(ids, weights) == [[(5, 0.5)], [(0, -2)], [(7, 1.5)]]
    assert weighted(ids, weights, null=EMPTY) == [[(5, 0.5)], [], [(7, 1.5)]]
    assert weighted(ids, weights.dictionary_encode()) == [[(5, 0.5)], [(0, -2)], [(7, 1.5)]]
    assert weighted(ids.slice(1), weights.slice(1)) == [[(0, -2)], [(7, 1.5)]]


def test_weights_of_several_rows_per_id():
    assert weighted(pa.array([5, 6]), pa.array([2, 3]), mapping=Numbered(2)) == [[(10, 2), (11, 2)], [(12, 3), (13, 3)]]
    found = weighted(pa.array([[1, None], [2]]), pa.array([[4, 5], [6]]), mapping=Numbered(2), null=EMPTY)
    assert found == [[(2, 4), (3, 4)], [(4, 6), (5, 6)]]


@pytest.mark.parametrize(
    ("ids", "weights", "said"),
    [
        ([[1, 2], [3]], [[1], [2]], "row 0 has 2 ids, but 1 weight in column 'w'"),
        ([[1], [2], [3]], [[1], None, []], "row 1 has 1 id, but 0 weights in column 'w'"),
        # As many in all.
        ([[1], [], [3, 4]], [[1], [2], [3]], "row 1 has 0 ids, but 1 weight in column 'w'"),
        ([[1], [2]], [1, 2], "lists of ids need lists of weights, but column 'w' is int64"),
        ([1, 2], [[1], [2]], "one id a row needs one weight a row, but column 'w' is list<"),
        ([[1], [2]], [["a"], ["b"]], "column 'w' (weights of its ids) must hold numbers, found string"),
        ([1, 2], ["a", "b"], "column 'w' (weights of its ids) must hold numbers, found string"),
        ([[1], [2, 3]], [[1], [2, None]], "column 'w' (weights of its ids) holds 1 null, but none are allowed"),
        ([[1], [2]], [[1.0], [math.nan]], "column 'w' (weights of its ids) holds nan, but only finite numbers"),
        ([1, 2], [1.0, -math.inf], "column 'w' (weights of its ids) holds -inf, but only finite numbers"),
        ([1, 2], [1.0, 1e39], "column 'w' (weights of its ids) holds 1e+39, but only finite numbers"),
    ],
)
def test_weights_that_do_not_fit(ids, weights, said):
    message = refusal(lambda: weighted(pa.array(ids), pa.array(weights), max_length=1))
    assert message.startswith("column 'h' (feature 'history'): ") and said in message


def test_a_weight_that_goes_with_no_id_may_be_null():
    assert weighted(pa.array([[1, None]]), pa.array([[2, None]]), null=EMPTY) == [[(1, 2)]]
    assert weighted(pa.array([[1, 3]]), pa.array([[None, 4]]), max_length=1) == [[(3, 4)]]


# Boundaries


@pytest.mark.parametrize("count", [3, 64, 65, 1000])
@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.int32(), pa.uint8()], ids=str)
def test_boundaries(count, kind):
    generator = np.random.default_rng(count)
    boundaries = tuple(np.sort(generator.integers(-50, 250, count) / 2).tolist())
    numbers = generator.integers(0, 256, 300).tolist()
    column = pa.array(numbers, kind)
    buckets = [[sum(b <= x for b in boundaries)] for x in numbers]
    assert convert(column, boundaries=boundaries) == buckets
    assert convert(pa.array([numbers[:9], []], pa.list_(kind)), boundaries=boundaries) == [
        [bucket for [bucket] in buckets[:9]],
        [],
    ]


def test_boundaries_of_numbers_at_and_beyond_them():
    numbers = pa.array([-math.inf, 0.9, 1.0, 1.9, 2.0, math.inf])
    mapping = Numbered()
    assert convert(numbers, mapping=mapping, boundaries=(1.0, 2.0)) == [[0], [0], [1], [1], [2], [2]]
    assert mapping.ids == [0, 0, 1, 1, 2, 2]
    assert convert(pa.array([1]), boundaries=()) == [[0]]


@pytest.mark.parametrize("boundaries", [(-9.0, 1.0), (-9.0, *range(1, 100))], ids=["few", "many"])
def test_null_and_nan_are_null_to_boundaries(boundaries):
    column, lists = pa.array([0.5, None, math.nan, 1.5]), pa.array([[0.5, math.nan], None, [None, 1.5]])
    for null, rows in {RESERVED: [[1], [0], [0], [2]], EMPTY: [[1], [], [], [2]]}.items():
        counts = Counts()
        assert convert(column, boundaries=boundaries, null=null, statistics=counts) == rows
        assert (counts.mapped, counts.nulls) == (2, 2)
        pairs = [rows[0] + rows[1], [], rows[2] + rows[3]]
        assert convert(lists, boundaries=boundaries, null=null) == pairs
    assert "2 nulls found" in refusal(lambda: convert(column, boundaries=boundaries, null=REFUSE))


def test_boundaries_of_other_numbers():
    tenths = pa.array([Decimal("0.0"), Decimal("0.1"), Decimal("0.2"), None])
    for kind in (pa.decimal128(3, 1), pa.decimal128(38, 18), pa.decimal256(60, 3)):
        assert convert(tenths.cast(kind), boundaries=(0.1, 0.2)) == [[0], [1], [2], [0]]
    assert convert(tenths.dictionary_encode(), boundaries=(0.1, 0.2)) == [[0], [1], [2], [0]]
    hours = pa.array([datetime.time(5), datetime.time(12), datetime.time(23)])
    assert convert(hours, boundaries=(6 * 3600, 12 * 3600)) == [[0], [2], [2]]
    assert "boundaries need numbers, found string" in refusal(lambda: convert(pa.array(["1"]), boundaries=(1.0,)))
    assert "boundaries need numbers, found list" in refusal(lambda: convert(pa.array([[[1]]]), boundaries=(1.0,)))
