"""Columns of numbers to float32, and their transforms."""

import datetime
import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from conversion import floats, refusal

from recsys.data.arrays import to_numbers
from recsys.data.convert import convert_floats
from recsys.data.spec import FloatColumn, Transform

# Numbers

NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
NUMBERS += [pa.float16(), pa.float32(), pa.float64(), pa.decimal32(5, 1), pa.decimal64(10, 2), pa.decimal128(38, 30)]
NUMBERS += [pa.decimal256(76, 60), pa.decimal128(5, -1)]


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_numbers(kind):
    numbers = [0, 10, 100, None, 120, 50]
    plain = pa.array([None if n is None else np.float16(n) for n in numbers], pa.float16()).cast(pa.float64())
    column = plain.cast(pa.decimal128(5, 1)).cast(kind) if pa.types.is_decimal(kind) else plain.cast(kind)
    indices = pa.array([0, 1, 2, None, 4, 5])
    for array in (column, pa.DictionaryArray.from_arrays(indices, column)):
        assert floats(array, fill=7.5) == [0, 10, 100, 7.5, 120, 50]
        assert floats(array.slice(1, 2), fill=7.5) == [10, 100]
        assert floats(array.slice(2, 3), fill=7.5) == [100, 7.5, 120]
        assert floats(array.slice(6)) == []


def test_numbers_of_other_types():
    assert floats(pa.array([True, False, None] * 5)[2:], fill=0.5) == ([1, 0, 0.5] * 5)[2:]
    assert floats(pa.array([2**63, 2**24 + 1], pa.uint64())) == [2**63, 2**24]
    assert floats(pa.array([2**53 + 1, None, -(2**63)])) == [2**53, 0, -(2**63)]
    values = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array([1.5, None]))
    assert floats(values, fill=9) == [1.5, 9, 9]


def test_decimals():
    given = ["1.25", None, "-3.50", "-0.01", "12345678901234567.89", "-12345678901234567.89", "99999999999999999999.5"]
    for kind in (pa.decimal128(38, 2), pa.decimal256(70, 2)):
        column = pa.array([g if g is None else Decimal(g) for g in given], kind)
        assert floats(column, fill=9) == [9 if g is None else float(np.float32(g)) for g in given]
        assert floats(column[2:4]) == [-3.5, float(np.float32(-0.01))]
    assert floats(pa.array([Decimal("1E+6"), Decimal("-2E+3")], pa.decimal128(10, -3))) == [1e6, -2e3]
    assert floats(pa.Array.from_buffers(pa.decimal128(9, 2), 0, [None, None])) == []
    huge = pa.array([Decimal(10) ** 60], pa.decimal256(70, 0))
    assert "holds 1e+60, but only finite numbers" in refusal(lambda: floats(huge))


def test_decimals_are_rounded_once():
    cents = [Decimal(i) / 100 for i in range(-1000, 1000)]
    assert to_numbers(pa.array(cents, pa.decimal128(38, 16))[1:]).tolist() == [float(cent) for cent in cents[1:]]


def test_times_are_seconds():
    for unit, per_second in {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}.items():
        raw = pa.array([3 * per_second, None, -5 * per_second])
        for kind in (pa.timestamp(unit), pa.timestamp(unit, "Asia/Tokyo"), pa.duration(unit)):
            assert floats(raw.view(kind), fill=0.5) == [3, 0.5, -5]
    assert floats(pa.array([1500, None], pa.timestamp("ms"))) == [1.5, 0]
    days = [datetime.date(1970, 1, 2), None, datetime.date(1969, 12, 31)]
    for kind in (pa.date32(), pa.date64()):
        assert floats(pa.array(days, kind)) == [86400, 0, -86400]
    clock = [datetime.time(0, 0, 1), None, datetime.time(1)]
    for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")):
        assert floats(pa.array(clock, kind)) == [1, 0, 3600]


def test_standardised_timestamps_keep_their_seconds():
    first = 1_700_000_000
    column = pa.array([first, first + 1, first + 7], pa.timestamp("s"))
    assert floats(column) == [first - first % 128] * 3
    assert floats(column, transform=Transform(mean=float(first), std=2.0)) == [0, 0.5, 3.5]


def test_null_numbers_are_filled_in_slices_too():
    column = pa.array([1.0, None, 2.0, None, 3.0])
    assert floats(column, fill=-1.0) == [1, -1, 2, -1, 3]
    assert floats(column[1:4], fill=-1.0) == [-1, 2, -1]


@pytest.mark.parametrize("transform", [None, Transform(clip=(0, 9))], ids=["plain", "transform"])
def test_what_lies_under_a_null_number_is_not_looked_at(transform):
    garbage = pa.array([math.nan, 1.0, 1e300, 0.0])
    valid = pa.py_buffer(np.packbits([0, 1, 0, 1], bitorder="little"))
    column = pa.Array.from_buffers(pa.float64(), 4, [valid, garbage.buffers()[1]])
    assert floats(column, fill=0.5, transform=transform) == [0.5, 1, 0.5, 0]
    found = convert_floats(column, FloatColumn("label", "l", 1.0, binary=True))
    assert found.tolist() == [1, 1, 1, 0]


def test_floats_go_to_out_which_may_be_a_column_of_a_matrix():
    matrix = np.full((3, 2), 9, np.float32)
    out = matrix[:, 1]
    assert convert_floats(pa.array([1.0, None, 2.0]), FloatColumn("price", "p", -1.0), out) is out
    assert matrix.tolist() == [[9, 1], [9, -1], [9, 2]]
    convert_floats(pa.array([4, 5, 6]), FloatColumn("price", "p", transform=Transform(mean=4.0)), out)
    assert matrix.tolist() == [[9, 0], [9, 1], [9, 2]]


def test_floats_are_no_view_of_arrow_memory():
    column = pa.array([1.0, 2.0], pa.float32())
    convert_floats(column, FloatColumn("price", "p"))[:] = 7
    assert column.to_pylist() == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_numbers_that_are_not_finite(value):
    for transform in (None, Transform(clip=(0, 1))):
        message = refusal(lambda transform=transform: floats(pa.array([1.0, value]), transform=transform))
        assert message == (
            f"column 'p' (price) holds {value}, but only finite numbers up to 3.4e38 can be trained on; "
            "write null for an unknown number"
        )
    assert message[-20:] != refusal(lambda: floats(pa.array([value]), fill=None))[-20:]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (["1.5"], "string; write it as numbers, or for ids use a feature of type id"),
        ([b"1"], "binary; write it as numbers, or for ids"),
        ([[1.5], [1.0, 2.0]], "list<item: double>; write one number a row, each position"),
        (
            [[1.5, 2.0], None],
            "list<item: double>; write one number a row, or for vectors of 2 set features.price.dim=2",
        ),
        ([{"a": 1}], "struct<a: int64>; write one number a row; name a field of the struct, such as 'p.a'"),
    ],
    ids=["string", "binary", "lists", "vectors", "struct"],
)
def test_numbers_of_a_wrong_type(column, said):
    assert f"column 'p' (price) must hold numbers, found {said}" in refusal(lambda: floats(pa.array(column)))
    encoded = pa.array(["a"]).dictionary_encode()
    assert "(price) must hold numbers, found string" in refusal(lambda: floats(encoded))
    assert "type id" not in refusal(lambda: floats(encoded, fill=None))


# Transforms


def test_transforms_come_in_order():
    column, clip = pa.array([-5, 0, 9, 1000]), (0.0, 99.0)
    assert floats(column, transform=Transform(clip=clip)) == [0, 0, 9, 99]
    assert floats(column, transform=Transform(clip=(0, None))) == [0, 0, 9, 1000]
    assert floats(column, transform=Transform(clip=(None, 5))) == [-5, 0, 5, 5]
    logs = [math.log(1), math.log(1), math.log(10), math.log(100)]
    assert floats(column, transform=Transform(clip, log1p=True)) == pytest.approx(logs, rel=1e-7)
    scaled = [(x - 1.5) / 0.25 for x in logs]
    found = floats(column, transform=Transform(clip, True, 1.5, 0.25))
    assert found == pytest.approx(scaled, rel=1e-6)
    assert floats(column, transform=Transform(mean=4.0, std=2.0)) == [-4.5, -2, 2.5, 498]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_log1p_near_nought(kind):
    given = [1e-6, -1e-6, 1e-3, -0.999, 1e30]
    found = floats(pa.array(given, kind), transform=Transform(log1p=True))
    exact = pa.array(given, kind).to_pylist()
    assert found == pytest.approx([math.log1p(x) for x in exact], rel=1e-6)


def test_fill_is_a_raw_value():
    column = pa.array([3.0, None])
    assert floats(column, fill=7.0, transform=Transform(clip=(0, 5), mean=1.0, std=2.0)) == [1, 2]


def test_a_constant_column_standardises_to_nought():
    assert floats(pa.array([3, 3]), transform=Transform(mean=3.0, std=0.0)) == [0, 0]


def test_transforms_of_nothing():
    assert floats(pa.array([], pa.float32()), transform=Transform((0, 1), True, 0.5, 1.0)) == []


@pytest.mark.parametrize("value", [-1.0, -3.0])
def test_log1p_of_minus_one_and_less(value):
    message = refusal(lambda: floats(pa.array([1.0, value]), transform=Transform(log1p=True)))
    assert f"column 'p' (price) holds {value:.10g}, but log1p needs numbers above -1" in message and "clip" in message
    assert floats(pa.array([1.0, value]), transform=Transform(clip=(0, 0), log1p=True)) == [0, 0]


@pytest.mark.parametrize("value", [-1.0, -3.0, -math.inf, math.nan])
@pytest.mark.parametrize("std", [None, 2.0])
@pytest.mark.filterwarnings("error")
def test_with_bad_steps_what_has_no_logarithm_is_not_finite(value, std):
    part = FloatColumn("price", "p", finite=False, transform=Transform(log1p=True, mean=0.0, std=std))
    good, bad, least = convert_floats(pa.array([1.0, value, -0.5]), part)
    assert not math.isfinite(bad)
    assert [good, least] == pytest.approx([math.log(2) / (std or 1), math.log(0.5) / (std or 1)])


def test_a_transform_beyond_float32():
    message = refusal(lambda: floats(pa.array([1e30]), transform=Transform(mean=0.0, std=1e-30)))
    assert "column 'p' (price) is beyond 3.4e38 after its transform" in message


# Labels


def test_null_labels_are_refused():
    message = refusal(lambda: convert_floats(pa.array([1, None, 0]), FloatColumn("data.label_column", "l", None)))
    said = "column 'l' (data.label_column) holds 1 null, but none are allowed"
    assert message == said + '; leave such rows out by data.filter="l is not None"'


@pytest.mark.parametrize("label", [[1, 2, 0], [0.5, 1.0, 1.0], [-1, 1, 0]], ids=["2", "half", "minus"])
def test_binary_labels(label):
    binary = FloatColumn("label", "l", None, binary=True)
    other = next(value for value in label if value not in (0, 1))
    message = refusal(lambda: convert_floats(pa.array(label), binary))
    assert f"column 'l' (label) holds {other}" in message and "0 or 1" in message
    assert convert_floats(pa.array([1, 0]), binary).tolist() == [1, 0]
    assert convert_floats(pa.array([True, False]), binary).tolist() == [1, 0]
    assert convert_floats(pa.array(label), FloatColumn("label", "l", None)).tolist() == label
