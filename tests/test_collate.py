"""Arrow columns to arrays and arrays to batches, against plain Python over the rows."""

from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys.config import NullPolicy
from recsys.data.batch import Batch
from recsys.data.collate import BatchSpec, FloatColumn, IdColumn, Jagged, Piece, collate, convert
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.id_mapping import HashMapping, IdentityMapping, IdMapping, IndexMapping

IDENTITY = IdentityMapping(1000)
START = Position(0, (0,))
CONTAINERS = [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int16())]


def lists(jagged: Jagged) -> list[list[int]]:
    offsets = jagged.offsets.tolist()
    assert jagged.values.dtype == np.int64 and len(jagged.values) == offsets[-1]
    return [jagged.values[a:b].tolist() for a, b in pairwise(offsets)]


def convert_ids(column: Any, **settings: Any) -> list[list[int]]:
    """Convert one id column, an Arrow array or chunked array, to lists of rows."""
    mapping: IdMapping = settings.pop("mapping", IDENTITY)
    part = IdColumn("history", "h", mapping, **settings)
    return lists(convert(pa.table({"h": column}), BatchSpec([part], [])).ids[0])


def convert_floats(column: Any, fill: float | None = 0.0) -> list[float]:
    spec = BatchSpec([], [FloatColumn("price", "p", fill)])
    floats = convert(pa.table({"p": column}), spec).floats
    assert floats.dtype == np.float32 and floats.shape == (len(column), 1)
    return floats[:, 0].tolist()


def refusal(action: Any) -> str:
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def expected(rows: list[Any], null: NullPolicy, max_length: int | None = None) -> list[list[int]]:
    """What the rows of a column of ids or lists of ids become under the identity mapping."""
    result = []
    for row in rows:
        ids = row if isinstance(row, list) else [row]
        if row is None and null is NullPolicy.empty:
            ids = []
        ids = ids[max(0, len(ids) - max_length) :] if max_length else ids
        result.append([id or 0 for id in ids if not (id is None and null is NullPolicy.empty)])
    return result


# Ids


@pytest.mark.parametrize("null", [NullPolicy.reserved, NullPolicy.empty])
def test_null_scalars(null):
    rows = [5, None, 7, None]
    assert convert_ids(pa.array(rows), null=null) == expected(rows, null)
    assert convert_ids(pa.array([None, None], pa.int64()), null=null) == expected([None, None], null)


@pytest.mark.parametrize("kind", CONTAINERS, ids=str)
@pytest.mark.parametrize("null", [NullPolicy.reserved, NullPolicy.empty])
def test_null_lists_are_empty_and_nulls_inside_follow_the_policy(kind, null):
    rows = [[1, None, 2], None, [], [None], [3]]
    given = [row or [] for row in rows]
    assert convert_ids(pa.array(rows, kind), null=null) == expected(given, null)


def test_what_lies_under_a_null_list_is_left_out():
    offsets, values = pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5])
    hidden = pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))
    assert convert_ids(hidden) == [[1, 2], [], [5]]
    assert convert_ids(hidden, max_length=1) == [[2], [], [5]]


@pytest.mark.parametrize("max_length", [None, 1])
def test_fixed_size_lists(max_length):
    rows = [[1, 2], None, [3, None], [4, 5]]
    column = pa.array(rows, pa.list_(pa.int64(), 2))
    given = [row or [] for row in rows]
    for null in (NullPolicy.reserved, NullPolicy.empty):
        assert convert_ids(column, null=null, max_length=max_length) == expected(given, null, max_length)
        assert convert_ids(column[1:3], null=null, max_length=max_length) == expected(given[1:3], null, max_length)


@pytest.mark.parametrize("rows", [[5, None], [[1], [2, None]]], ids=["scalar", "list"])
def test_nulls_refused(rows):
    message = refusal(lambda: convert_ids(pa.array(rows), null=NullPolicy.refuse))
    assert message.startswith("column 'h' (feature 'history'): 1 nulls ") and "refuse" in message


def test_refuse_allows_what_has_no_null_among_its_ids():
    assert convert_ids(pa.array([4, 5]), null=NullPolicy.refuse) == [[4], [5]]
    assert convert_ids(pa.array([[1], None, []]), null=NullPolicy.refuse) == [[1], [], []]


@pytest.mark.parametrize("kind", CONTAINERS, ids=str)
@pytest.mark.parametrize("null", [NullPolicy.reserved, NullPolicy.empty])
@pytest.mark.parametrize("max_length", [None, 1, 3, 100])
def test_any_lists_in_any_slices(kind, null, max_length):
    generator = np.random.default_rng(0)
    rows: list[Any] = []
    for _ in range(200):
        ids = generator.integers(1, 1000, generator.integers(0, 8)).tolist()
        rows.append(None if generator.random() < 0.1 else [None if generator.random() < 0.2 else id for id in ids])
    given = [row or [] for row in rows]
    array = pa.array(rows, kind)
    for start, stop in [(0, 200), (0, 0), (17, 18), (13, 150), (199, 200)]:
        found = convert_ids(array[start:stop], null=null, max_length=max_length)
        assert found == expected(given[start:stop], null, max_length)
    order = generator.permutation(200)
    chunked = pa.chunked_array([array[:50], array[50:50], array[50:]])
    found = convert_ids(chunked.slice(20, 100), null=null, max_length=max_length)
    assert found == expected(given[20:120], null, max_length)
    found = convert_ids(chunked.take(pa.array(order)), null=null, max_length=max_length)
    assert found == expected([given[i] for i in order], null, max_length)


@pytest.mark.parametrize("null", [NullPolicy.reserved, NullPolicy.empty])
def test_slices_of_scalars(null):
    rows = [1, None, 2, None, None, 3, 4] * 3
    array = pa.array(rows)
    for start, stop in [(0, 21), (1, 2), (5, 17), (20, 21), (21, 21)]:
        assert convert_ids(array[start:stop], null=null) == expected(rows[start:stop], null)


def test_max_length_keeps_the_last():
    assert convert_ids(pa.array([[1, 2, 3], [4], []]), max_length=2) == [[2, 3], [4], []]


def test_null_row_is_kept_for_nulls_by_the_hash():
    mapping = HashMapping(50, 0)
    found = convert_ids(pa.array([["a", None], ["b"], None]), mapping=mapping)
    assert found[0][1] == 0 and found[0][0] > 0 and found[1][0] > 0 and found[2] == []
    assert convert_ids(pa.array([None, "a"]), mapping=mapping) == [[0], [found[0][0]]]


def test_text_lists_of_any_kind_hash_alike():
    rows = [["a", "b"], [], ["b"]]
    plain = convert_ids(pa.array(rows), mapping=HashMapping(1000, 0))
    encoded = pa.ListArray.from_arrays(
        pa.array([0, 2, 2, 3], pa.int32()), pa.array(["a", "b", "b"]).dictionary_encode()
    )
    large = pa.array(rows, pa.large_list(pa.large_string()))
    for column in (encoded, large):
        assert convert_ids(column, mapping=HashMapping(1000, 0)) == plain
        assert convert_ids(column[1:], mapping=HashMapping(1000, 0)) == plain[1:]


def test_columns_whose_type_was_lost():
    # pandas writes such for a file in which no row has a value.
    for mapping in (IDENTITY, HashMapping(50, 0), IndexMapping(pa.array(["a"]))):
        assert convert_ids(pa.nulls(2), mapping=mapping) == [[0], [0]]
        assert convert_ids(pa.nulls(2), mapping=mapping, null=NullPolicy.empty) == [[], []]
        assert convert_ids(pa.array([[], None, []], pa.list_(pa.null())), mapping=mapping) == [[], [], []]
    assert convert_floats(pa.nulls(2), fill=3.0) == [3.0, 3.0]
    assert "nulls" in refusal(lambda: convert_floats(pa.nulls(2), fill=None))


def test_no_rows():
    for kind in (pa.int64(), pa.string(), *CONTAINERS):
        assert convert_ids(pa.chunked_array([], kind), mapping=HashMapping(50, 0)) == []
    assert convert_floats(pa.chunked_array([], pa.int8())) == []


def test_feature_without_a_column_is_always_empty():
    columns = convert(pa.table({"h": [1, 2, 3]}), BatchSpec([IdColumn("other", None, IDENTITY)], []))
    assert lists(columns.ids[0]) == [[], [], []]


@pytest.mark.parametrize(
    ("column", "found"),
    [([1.5], "double"), ([[1.5]], "double"), ([{"a": 1}], "struct<a: int64>"), ([[[1]]], "list<item: int64>")],
)
def test_ids_of_a_wrong_type(column, found):
    message = refusal(lambda: convert_ids(pa.array(column), mapping=HashMapping(50, 0)))
    assert message == f"column 'h' (feature 'history'): ids must be integers or strings, found {found}"


def test_id_out_of_range_names_the_column():
    message = refusal(lambda: convert_ids(pa.array([[1], [1000]])))
    assert message.startswith("column 'h' (feature 'history'): id 1000 is outside 0 … 999")


# Numbers


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_numbers(kind):
    column = pa.array([np.float16(value) for value in (0, 1, 100)], pa.float16()).cast(kind)
    assert convert_floats(column) == [0, 1, 100]


def test_numbers_of_other_types():
    assert convert_floats(pa.array([True, False, None]), fill=0.5) == [1, 0, 0.5]
    assert convert_floats(pa.array([Decimal("1.25"), None, Decimal("-3.50")]), fill=9) == [1.25, 9, -3.5]
    assert convert_floats(pa.array([2**63, 2**24 + 1], pa.uint64())) == [2**63, 2**24]


def test_null_numbers_are_filled_in_slices_too():
    column = pa.array([1.0, None, 2.0, None, 3.0])
    assert convert_floats(column, fill=-1.0) == [1, -1, 2, -1, 3]
    assert convert_floats(column[1:4], fill=-1.0) == [-1, 2, -1]
    assert convert_floats(pa.chunked_array([column[:2], column[3:]]), fill=-1.0) == [1, -1, -1, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_numbers_that_are_not_finite(value):
    message = refusal(lambda: convert_floats(pa.array([1.0, value])))
    assert "column 'p' (price) holds" in message and "only finite numbers" in message


@pytest.mark.parametrize("column", [["1.5"], [[1.5]], [b"1"]], ids=["string", "list", "binary"])
def test_numbers_of_a_wrong_type(column):
    assert "column 'p' (price) must hold numbers, found " in refusal(lambda: convert_floats(pa.array(column)))


def label_and_weight(**columns: Any) -> tuple[list[float], list[float]]:
    parts = {name: FloatColumn(name, name, None) for name in columns}
    table = pa.table({"rows": [0, 0, 0], **columns})
    converted = convert(table, BatchSpec([], [], parts.get("label"), parts.get("weight")))
    return converted.labels.tolist(), converted.weights.tolist()


def test_labels_and_weights():
    assert label_and_weight() == ([0, 0, 0], [1, 1, 1])
    labels = pa.array([True, False, True])
    assert label_and_weight(label=labels, weight=[0.5, 0.0, 2.0]) == ([1, 0, 1], [0.5, 0, 2])


def test_null_labels_and_weights_are_refused():
    assert "column 'label' (label) holds 1 nulls" in refusal(lambda: label_and_weight(label=[1, None, 0]))
    assert "column 'weight' (weight) holds 2 nulls" in refusal(lambda: label_and_weight(weight=[1, None, None]))


def test_negative_weights_are_refused():
    message = refusal(lambda: label_and_weight(weight=[1.0, -0.5, 2.0]))
    assert message == "column 'weight' (weight) holds -0.5, and a weight is 0 or more"


@pytest.mark.parametrize("label", [[1, 2, 0], [0.5, 1.0, 1.0], [-1, 1, 0]], ids=["2", "half", "minus"])
def test_binary_labels(label):
    table, part = pa.table({"l": label}), FloatColumn("label", "l", None, binary=True)
    other = next(value for value in label if value not in (0, 1))
    message = refusal(lambda: convert(table, BatchSpec([], [], label=part)))
    assert f"column 'l' (label) holds {other}" in message and "0 or 1" in message
    assert convert(pa.table({"l": [1, 0]}), BatchSpec([], [], label=part)).labels.tolist() == [1, 0]
    assert convert(table, BatchSpec([], [], label=FloatColumn("label", "l", None))).labels.tolist() == label


# Batches

SPEC = BatchSpec(
    ids=[
        IdColumn("user", "user", IDENTITY),
        IdColumn("history", "history", IDENTITY),
        IdColumn("none", None, IDENTITY),
    ],
    floats=[FloatColumn("price", "price"), FloatColumn("seven", None, 7.0)],
    label=FloatColumn("label", "label"),
    weight=FloatColumn("weight", "weight"),
    lists=[IdColumn("targets", "targets", IndexMapping(pa.array([8, 9])))],
)


def some_rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "user": numbers,
            "history": pa.array([list(range(n % 4)) for n in numbers], pa.list_(pa.int64())),
            "price": [n / 2 for n in numbers],
            "label": [n % 2 for n in numbers],
            "weight": [1.0 + n for n in numbers],
            "targets": pa.array([[9, n] for n in numbers], pa.list_(pa.int64())),
        }
    )


def keyed(batch_lists: Any, key: str) -> list[list[int]]:
    return [row.tolist() for row in batch_lists[key].to_dense()]


def check_row(batch: Batch, at: int, n: int) -> None:
    assert keyed(batch.ids, "user")[at] == [n]
    assert keyed(batch.ids, "history")[at] == list(range(n % 4))
    assert keyed(batch.ids, "none")[at] == []
    assert batch.floats[at].tolist() == [n / 2, 7.0]
    assert (batch.labels[at], batch.weights[at]) == (n % 2, 1 + n)
    assert batch.lists is not None
    assert keyed(batch.lists, "targets")[at] == [1, {8: 0, 9: 1}.get(n, -1)]


def test_pieces_are_joined_at_their_places_and_the_rest_is_fill():
    first, second = convert(some_rows(0, 10), SPEC), convert(some_rows(100, 5), SPEC)
    batch = collate([Piece(first, 3, 6, 0), Piece(second, 0, 2, 3), Piece(first, 9, 10, 7)], 9, SPEC, START)
    for at, n in {0: 3, 1: 4, 2: 5, 3: 100, 4: 101, 7: 9}.items():
        check_row(batch, at, n)
    assert batch.ids.keys() == ["user", "history", "none"]
    assert batch.num_rows == 6
    for at in (5, 6, 8):
        assert [keyed(batch.ids, key)[at] for key in batch.ids.keys()] == [[], [], []]  # noqa: SIM118
        assert batch.floats[at].tolist() == [0, 0]
        assert (batch.labels[at], batch.weights[at]) == (0, 0)
        assert batch.lists is not None and keyed(batch.lists, "targets")[at] == []


def test_batch_without_any_row():
    batch = collate([], 4, SPEC, START)
    assert batch.weights.tolist() == [0] * 4
    assert batch.ids.lengths().tolist() == [0] * 12
    assert batch.ids.values().numel() == batch.num_rows == 0


def test_types_of_a_batch():
    batch = collate([Piece(convert(some_rows(0, 4), SPEC), 0, 4, 0)], 4, SPEC, Position(1, (2,), 3))
    assert batch.ids.values().dtype == torch.int64
    assert batch.ids.lengths().dtype == torch.int32
    assert {t.dtype for t in (batch.floats, batch.labels, batch.weights)} == {torch.float32}
    assert batch.position == Position(1, (2,), 3)
    without = BatchSpec(SPEC.ids, SPEC.floats)
    assert collate([], 4, without, START).lists is None


def test_a_batch_does_not_share_memory_with_the_next():
    columns = convert(some_rows(0, 4), SPEC)
    one, other = (collate([Piece(columns, 0, 4, 0)], 4, SPEC, START) for _ in range(2))
    for tensor in (one.floats, one.labels, one.weights, one.ids.values()):
        tensor.zero_()
    check_row(other, 3, 3)


def test_moving_a_batch_keeps_everything():
    batch = collate([Piece(convert(some_rows(0, 4), SPEC), 0, 4, 0)], 4, SPEC, Position(1, (2,), 3))
    moved = batch.to(torch.device("meta"))
    tensors = [moved.ids.values(), moved.floats, moved.labels, moved.weights]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.lists is not None and moved.lists.values().device.type == "meta"
    assert (moved.num_rows, moved.position) == (4, Position(1, (2,), 3))
    check_row(batch.to(torch.device("cpu")), 3, 3)


def test_spec_names_each_column_once():
    spec = BatchSpec(
        ids=[IdColumn("a", "x", IDENTITY), IdColumn("b", "x", IDENTITY), IdColumn("c", None, IDENTITY)],
        floats=[FloatColumn("d", "y"), FloatColumn("e", None)],
        label=FloatColumn("label", "l"),
        weight=FloatColumn("weight", "y"),
        lists=[IdColumn("t", "z", IDENTITY)],
    )
    assert sorted(spec.columns()) == ["l", "x", "y", "z"]
