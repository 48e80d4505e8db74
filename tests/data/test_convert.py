"""Columns of ids, and of lists of ids, to table rows, against plain Python over the rows."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversion import (
    EMPTY,
    LISTS,
    REFUSE,
    RESERVED,
    Counts,
    Numbered,
    as_type,
    convert,
    expected,
    floats,
    number,
    part,
    refusal,
    rows_of,
    some_lists,
)

from recsys.config import Keep
from recsys.data.convert import convert_ids
from recsys.errors import UserError
from recsys.ids import HashMapping, IdentityMapping, IdStatistics

# Ids, one a row

DAY = datetime.date(2026, 11, 21)
SCALARS = {
    **{str(kind): pa.array([0, 5, 127], kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{str(kind): pa.array([0, 5, 127], kind) for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    "bool": pa.array([True, False, True]),
    "date32": pa.array([DAY, DAY, datetime.date(1970, 1, 3)]),
    "date64": pa.array([DAY, DAY, datetime.date(1970, 1, 3)], pa.date64()),
    "timestamp": pa.array([3, 2, 1], pa.timestamp("s")),
    "decimal": pa.array([Decimal(3), Decimal(4), Decimal(5)], pa.decimal128(20, 0)),
    "float": pa.array([3.0, 2.0, 1.0]),
    "string": pa.array(["3", "20", "1"]),
    "large string": pa.array(["3", "20", "1"], pa.large_string()),
    "binary": pa.array([b"3", b"20", b"1"]),
    "fixed binary": pa.array([b"03", b"20", b"01"], pa.binary(2)),
    "dictionary": pa.array(["3", "20", "3"]).dictionary_encode(),
    "dictionary of numbers": pa.array([3, 20, 3]).dictionary_encode(),
}


@pytest.mark.parametrize("column", SCALARS.values(), ids=SCALARS)
def test_ids_of_every_type_with_nulls_in_lists_and_in_slices(column):
    numbers = [number(id) for id in column.to_pylist()]
    assert convert(column) == [[n] for n in numbers]
    assert convert(column.slice(1)) == [[n] for n in numbers[1:]]
    assert convert(column.slice(3)) == []
    # The same with nulls: [n0, null, n1, null, n2].
    if pa.types.is_dictionary(column.type):
        indices = column.indices.to_pylist()
        spread = pa.array([indices[0], None, indices[1], None, indices[2]], column.indices.type)
        sparse: Any = pa.DictionaryArray.from_arrays(spread, column.dictionary)
    else:
        values = column.to_pylist()
        sparse = pa.array([values[0], None, values[1], None, values[2]], column.type)
    rows = [numbers[0], None, numbers[1], None, numbers[2]]
    for null in (RESERVED, EMPTY):
        for start, stop in [(0, 5), (1, 4), (2, 3), (3, 4), (3, 5), (5, 5)]:
            assert convert(sparse.slice(start, stop - start), null=null) == expected(rows[start:stop], null)
        lists = pa.ListArray.from_arrays(pa.array([0, 3, 3, 5], pa.int32()), sparse)
        given = [rows[:3], [], rows[3:]]
        assert convert(lists, null=null) == expected(given, null)
        assert convert(lists.slice(1), null=null, max_length=1) == expected(given[1:], null, 1)


def test_ids_without_nulls_go_straight_to_out():
    for dtype in (np.int32, np.int64):
        out, mapping, counts = np.zeros(3, dtype), Numbered(), Counts()
        found = convert_ids(pa.array([5, 6, 7]), part(mapping, statistics=counts), np.dtype(dtype), out)
        assert (counts.mapped, counts.nulls) == (3, 0)
        assert found.values is out and mapping.out is out
        assert found.lengths is None and found.weights is None and out.tolist() == [5, 6, 7]


def test_out_takes_reserved_rows_and_is_left_alone_where_rows_are_dropped():
    out = np.full(3, 9, np.int64)
    column = pa.array([5, None, 7])
    assert convert_ids(column, part(), out.dtype, out).values is out and out.tolist() == [5, 0, 7]
    out[:] = 9
    assert rows_of(convert_ids(column, part(null=EMPTY), out.dtype, out), 3) == [[5], [], [7]]
    assert rows_of(convert_ids(pa.array([[1], [2], [3]]), part(), out.dtype, out), 3) == [[1], [2], [3]]
    assert out.tolist() == [9] * 3


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint8(), pa.list_(pa.int64())], ids=str)
def test_what_lies_under_a_null_is_not_mapped_nor_counted(kind):
    garbage = pa.array([99, 1, 77, 2, 55], kind.value_type if pa.types.is_list(kind) else kind)
    valid = pa.py_buffer(np.packbits([0, 1, 0, 1, 0], bitorder="little"))
    ids: Any = pa.Array.from_buffers(garbage.type, 5, [valid, garbage.buffers()[1]])
    if pa.types.is_list(kind):
        ids = pa.ListArray.from_arrays(pa.array([0, 2, 5], pa.int32()), ids)
    for null in (RESERVED, EMPTY):
        mapping, counts = Numbered(), Counts()
        convert(ids, mapping=mapping, null=null, statistics=counts)
        assert mapping.ids == [1, 2] and (counts.mapped, counts.nulls) == (2, 3)


def test_integers_with_nulls_keep_every_bit():
    mapping = Numbered()
    convert(pa.array([2**53 + 1, None, 2**62 + 1]), mapping=mapping)
    assert mapping.ids == [2**53 + 1, 2**62 + 1]
    convert(pa.array([[2**64 - 1, None], None], pa.list_(pa.uint64())), mapping=SeenOnly(mapping))
    assert mapping.ids == [2**64 - 1]


class SeenOnly(Numbered):
    """Keeps the ids for another mapping, without rows: they may be too large for one."""

    def __init__(self, other: Numbered) -> None:
        super().__init__()
        self.other = other

    def map(self, ids: pa.Array, out: np.ndarray, statistics: Any = None) -> None:
        self.other.ids = ids.to_pylist()


def test_columns_whose_type_was_lost():
    # pandas writes such for a file in which no row has a value.
    assert convert(pa.nulls(2)) == [[0], [0]]
    assert convert(pa.nulls(2), null=EMPTY) == [[], []]
    assert convert(pa.array([[], None, [None]], pa.list_(pa.null()))) == [[], [], [0]]
    assert "2 nulls found" in refusal(lambda: convert(pa.nulls(2), null=REFUSE))
    assert floats(pa.nulls(2), fill=3.0) == [3.0, 3.0]
    assert "2 nulls" in refusal(lambda: floats(pa.nulls(2), fill=None))


@pytest.mark.parametrize("kind", [*SCALARS.values(), *LISTS, pa.null()], ids=lambda k: str(getattr(k, "type", k)))
def test_no_rows(kind):
    empty = kind.slice(3) if isinstance(kind, pa.Array) else pa.array([], kind)
    for settings in ({}, {"null": EMPTY, "max_length": 2}, {"null": REFUSE}):
        assert convert(empty, **settings) == []


@pytest.mark.parametrize("rows", [[5, None], [[1], [2, None]]], ids=["scalar", "list"])
def test_nulls_refused(rows):
    counts = Counts()
    message = refusal(lambda: convert(pa.array(rows), null=REFUSE, statistics=counts))
    assert message.startswith("column 'h' (feature 'history'): 1 null ") and "refuse" in message
    assert counts.mapped == counts.nulls == 0


def test_refuse_allows_what_has_no_null_among_its_ids():
    assert convert(pa.array([4, 5]), null=REFUSE) == [[4], [5]]
    assert convert(pa.array([[1], None, []]), null=REFUSE) == [[1], [], []]


@pytest.mark.parametrize(
    "kind",
    [
        pa.struct([("a", pa.int64())]),
        pa.list_(pa.list_(pa.int64())),
        pa.list_(pa.struct([("a", pa.int64())])),
        pa.map_(pa.string(), pa.int64()),
    ],
    ids=str,
)
def test_nested_ids_are_refused(kind):
    for column in (pa.array([], kind), pa.nulls(2, kind)):
        found = kind.value_type if pa.types.is_list(kind) else kind
        advice = "; name a field of the struct, such as 'h.a'" * pa.types.is_struct(found)
        assert refusal(lambda column=column: convert(column)) == (
            f"column 'h' (feature 'history'): ids must be integers or strings, found {found}; "
            f"a column holds one id a row, or one list of ids{advice}"
        )


@pytest.mark.parametrize("error", [TypeError, UserError])
def test_what_a_mapping_refuses_names_the_column(error):
    class Refusing(Numbered):
        def map(self, ids: pa.Array, out: np.ndarray, statistics: Any = None) -> None:
            raise error("not these")

    for column in (pa.array([1.5]), pa.array([[1.5]])):
        message = refusal(lambda column=column: convert(column, mapping=Refusing()))
        assert message == "column 'h' (feature 'history'): not these"


# Lists


@pytest.mark.parametrize("kind", LISTS, ids=str)
@pytest.mark.parametrize("null", [RESERVED, EMPTY])
@pytest.mark.parametrize(("max_length", "keep"), [(None, Keep.last), (1, Keep.first), (3, Keep.last), (3, Keep.first)])
def test_any_lists_in_any_slices(kind, null, max_length, keep):
    rows = some_lists(200)
    given = [row or [] for row in rows]
    array = as_type(rows, kind)
    settings: dict[str, Any] = {"null": null, "max_length": max_length, "keep": keep}
    for start, stop in [(0, 200), (0, 0), (17, 18), (13, 150), (199, 200), (200, 200)]:
        assert convert(array.slice(start, stop - start), **settings) == expected(
            given[start:stop], null, max_length, keep
        )


def test_null_lists_are_empty_and_nulls_inside_follow_the_policy():
    rows = pa.array([[1, None, 2], None, [], [None], [3]])
    assert convert(rows) == [[1, 0, 2], [], [], [0], [3]]
    assert convert(rows, null=EMPTY) == [[1, 2], [], [], [], [3]]


def test_what_lies_under_a_null_list_is_left_out():
    offsets, values = pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5])
    hidden = pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))
    assert convert(hidden) == [[1, 2], [], [5]]
    assert convert(hidden, max_length=1) == [[2], [], [5]]
    assert convert(hidden.slice(1)) == [[], [5]]


def test_max_length_keeps_the_end_that_is_asked_for():
    column = pa.array([[1, 2, 3], [4], [], [None, 5, 6, None]])
    assert convert(column, max_length=2) == [[2, 3], [4], [], [6, 0]]
    assert convert(column, max_length=2, keep=Keep.first) == [[1, 2], [4], [], [0, 5]]
    # Nulls count among the ids, and are dropped afterwards.
    assert convert(column, max_length=2, null=EMPTY) == [[2, 3], [4], [], [6]]


def test_ids_of_lists_are_not_copied():
    class SameMemory(Numbered):
        def map(self, ids: pa.Array, out: np.ndarray, statistics: Any = None) -> None:
            self.address = ids.buffers()[1].address + 8 * ids.offset

    mapping, column = SameMemory(), pa.array([[1, 2], [3], [], [4]])
    convert_ids(column.slice(1), part(mapping, max_length=2), np.dtype(np.int64))
    assert mapping.address == column.values.buffers()[1].address + 16


# With the mappings of tables


def test_row_0_is_kept_for_nulls_by_the_hash():
    rows = convert(pa.array([["a", None], ["b"], None, ["a"]]), mapping=HashMapping(50, 0))
    assert rows[0][1] == 0 and 0 not in (rows[0][0], rows[1][0])
    assert rows[2:] == [[], rows[0][:1]]


@pytest.mark.parametrize("null", [RESERVED, EMPTY])
def test_texts_of_any_kind_hash_alike(null):
    rows = [["a", "b", None], [], ["b", "bc"], None, ["d"]]
    mapping = HashMapping(1000, 0)
    given: dict[str, Any] = {"mapping": mapping, "null": null, "max_length": 2}
    found = convert(pa.array(rows), **given)
    assert [len(row) for row in found] == [2 if null is RESERVED else 1, 0, 2, 0, 1]
    lists = pa.array(rows)
    encoded = pa.ListArray.from_arrays(lists.offsets, lists.values.dictionary_encode(), mask=lists.is_null())
    for kind in (pa.large_string(), pa.binary(), pa.large_binary()):
        assert convert(pa.array(rows, pa.list_(kind)), **given) == found
    assert convert(encoded, **given) == found and convert(encoded[2:], **given) == found[2:]
    words = pa.array(["b", None, "a"])
    plain = convert(words, mapping=mapping)
    for column in (words.dictionary_encode(), words.cast(pa.large_binary())):
        assert convert(column, mapping=mapping) == plain


def test_statistics_of_a_table():
    statistics = IdStatistics()
    convert(pa.array([5, None, 5, 7]), mapping=HashMapping(50, 0), statistics=statistics)
    convert(pa.array([[9, None], None, [1, 2, 3]]), mapping=HashMapping(50, 0), statistics=statistics, max_length=2)
    assert (statistics.num_ids, statistics.num_nulls) == (6, 2)


@pytest.mark.parametrize("mapping", [HashMapping(50, 0), IdentityMapping(50)], ids=["hash", "identity"])
def test_columns_whose_type_was_lost_with_a_table(mapping):
    for null, rows in {RESERVED: [[0], [0]], EMPTY: [[], []]}.items():
        assert convert(pa.nulls(2), mapping=mapping, null=null) == rows


def test_ids_of_a_wrong_type():
    for column in (pa.array([{"a": 1}]), pa.array([[{"a": 1}]])):
        message = refusal(lambda column=column: convert(column, mapping=HashMapping(50, 0)))
        assert message.startswith(
            "column 'h' (feature 'history'): ids must be integers or strings, found struct<a: int64>"
        )


def test_id_out_of_range_names_the_column():
    message = refusal(lambda: convert(pa.array([[1], [1000]]), mapping=IdentityMapping(1000)))
    assert message.startswith("column 'h' (feature 'history'): id 1000 is outside 0 … 999")


# As Parquet decodes them


def test_columns_of_a_parquet_file_in_pieces(tmp_path: Path):
    rows = some_lists(1000, seed=3)
    scalars = [row[0] if row else None for row in rows]
    prices = [None if n is None else n / 4 for n in scalars]
    table = pa.table(
        {
            "number": pa.array(scalars, pa.int32()),
            "text": [None if n is None else str(n) for n in scalars],
            "lists": rows,
            "price": pa.array([None if p is None else Decimal(str(p)) for p in prices], pa.decimal128(9, 2)),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=400)
    read = pq.ParquetFile(tmp_path / "a.parquet", read_dictionary=["text"]).read_row_group(1)
    assert pa.types.is_dictionary(read["text"].type)
    for start, stop in [(0, 400), (33, 301)]:
        piece = {name: read[name].combine_chunks().slice(start, stop - start) for name in read.column_names}
        here = slice(400 + start, 400 + stop)
        for null in (RESERVED, EMPTY):
            assert convert(piece["number"], null=null) == expected(scalars[here], null)
            assert convert(piece["text"], null=null) == expected(scalars[here], null)
            assert convert(piece["lists"], null=null) == expected([row or [] for row in rows[here]], null)
        assert floats(piece["price"], fill=-1.0) == [-1 if p is None else p for p in prices[here]]
