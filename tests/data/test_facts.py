"""Means and deviations of float features: exact at any offset and size, and the same on every number of ranks."""

import math
import statistics
import weakref
from dataclasses import astuple
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from thread_ranks import ALONE, on_ranks

from recsys.data.convert import convert_floats
from recsys.data.decode import SegmentReader
from recsys.data.facts import VocabularyRequest, measure
from recsys.data.figures import FloatFacts
from recsys.data.parquet import open_dataset
from recsys.data.spec import FloatColumn, Transform
from recsys.errors import UserError

RANDOM = np.random.default_rng(18)
MINUTE = RANDOM.permutation(np.arange(60) % 60)  # seconds, whose deviation is 17.318


def figures(folder, column, ranks=1, transform=None, dim=None):
    if not list(folder.glob("*.parquet")):
        pq.write_table(pa.table({"x": column}), folder / "rows.parquet", row_group_size=7)
    dataset = open_dataset("data.train", str(folder), {"x": "features.x"})
    part = FloatColumn("x", "x", transform=transform, dim=dim)
    facts, *others = on_ranks(ranks, lambda world: measure(dataset, {}, [part], world).floats["x"])
    assert all(other == facts for other in others)
    return facts


COLUMNS = {
    "seconds": pa.array(1.7e9 + MINUTE),
    "times": pa.array([datetime(2026, 11, 22) + timedelta(seconds=int(s)) for s in MINUTE]),
    "far": pa.array(1e15 + 0.125 * MINUTE),
    "large integers": pa.array(2**53 - MINUTE),
    "beyond 2^53": pa.array(2**60 + 2**10 * MINUTE),
    "unsigned": pa.array(2**63 + 2**11 * MINUTE.astype(np.uint64)),
    "float32": pa.array((1e6 + MINUTE).astype(np.float32)),
    "nulls": pa.array([None if s % 3 else 1e9 + s for s in MINUTE.tolist()]),
    "great": pa.array(RANDOM.permutation([3e38, -3e38, 1e38] * 20)),
    "one great": pa.array([3e38, *MINUTE.astype(float)]),
    "small": pa.array(1e-170 * (1 + MINUTE)),
    "denormal": pa.array(5e-324 * MINUTE),
    "steps": pa.array(np.repeat([1e9, 1e9 + 1, 1e9 + 9], 20)),  # groups of rows that are constant in themselves
    "heavy tail": pa.array(RANDOM.standard_cauchy(500) * 1e6),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_mean_and_deviation_are_those_of_exact_arithmetic(tmp_path, name):
    column = COLUMNS[name]
    numbers = [n.timestamp() if isinstance(n, datetime) else float(n) for n in column.drop_null().to_pylist()]
    if name == "times":
        numbers = (column.cast(pa.int64()).to_numpy() / 1e6).tolist()
    found = figures(tmp_path, column)
    mean, size = statistics.fmean(numbers), max(abs(n) for n in numbers)
    # `pstdev` of Python 3.10 squares small numbers as floats, to 0.
    std = size * math.sqrt(statistics.pvariance([Fraction(n) / Fraction(size) for n in numbers]))
    assert found.mean == found.raw_mean == pytest.approx(mean, rel=0, abs=2.3e-16 * size + 5e-324)
    assert found.std == pytest.approx(std, rel=1e-9, abs=1e-16 * size)
    for ranks in (2, 3, 5, 8, 64):
        assert figures(tmp_path, column, ranks=ranks) == found, "bit for bit"
    done = convert_floats(
        column, FloatColumn("x", "x", found.raw_mean, transform=Transform(None, False, found.mean, found.std))
    )
    rounding = (1.2e-16 * size + 5e-324) / found.std  # of the mean
    assert abs(done.mean()) < 1e-5 + rounding and np.ptp(done) > 1, "it is spread out, in float32 too"


@pytest.mark.parametrize("value", [1e15 + 0.5, 0.1, -1.7e9, 3.4e38, 5e-324, 0.0, 2**60 + 1])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_a_constant_has_a_deviation_of_1(tmp_path, value, rows):
    assert figures(tmp_path, pa.array([value] * rows)) == FloatFacts(float(value), float(value), 1.0)


def test_numbers_that_differ_by_their_rounding_are_a_constant(tmp_path):
    noisy = [0.1 + 0.2, 0.3, np.nextafter(0.3, 0)] * 5
    assert figures(tmp_path, pa.array(noisy)).std == 1.0


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_number_of_a_vector_has_the_figures_of_a_column_of_its_own(tmp_path, ranks):
    some = [COLUMNS[name].to_pylist() for name in ("seconds", "nulls", "small", "steps")]
    clipped = Transform((0.0, 1e9 + 20))
    rows = [None if i % 5 == 0 else list(numbers) for i, numbers in enumerate(zip(*some, strict=True))]
    found = figures(tmp_path, pa.array(rows, pa.list_(pa.float64(), 4)), ranks=ranks, transform=clipped, dim=4)
    for i, of_number in enumerate(zip(*astuple(found), strict=True)):
        folder = tmp_path / str(i)
        folder.mkdir()
        column = pa.array([None if row is None else row[i] for row in rows], pa.float64())
        assert of_number == astuple(figures(folder, column, transform=clipped))
    assert len(set(found.mean)) == 4


def test_vectors_of_nothing_but_nulls(tmp_path):
    assert figures(tmp_path, pa.nulls(20, pa.list_(pa.float32())), dim=2) == FloatFacts(
        (0.0,) * 2, (0.0,) * 2, (1.0,) * 2
    )


def test_nothing_but_nulls(tmp_path):
    assert figures(tmp_path, pa.nulls(20, pa.float32())) == FloatFacts()


def test_row_groups_and_files_without_rows_or_numbers_count_for_nothing(tmp_path):
    schema = pa.schema([("x", pa.float64())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for numbers in ([], [1.0, 3.0], [None, None], [5.0], []):
            writer.write_table(pa.table({"x": numbers}, schema))
    pq.write_table(schema.empty_table(), tmp_path / "b.parquet")
    found = figures(tmp_path, None)
    assert (found.raw_mean, found.mean) == (3.0, 3.0) and found.std == pytest.approx(math.sqrt(8 / 3))


def test_figures_are_of_what_clip_and_log1p_leave(tmp_path):
    numbers = pa.array([-5.0, 0.0, 1e-17, 3e-17, 9.0, 1000.0])
    transform = Transform((0.0, 99.0), True)
    found = figures(tmp_path, numbers, transform=transform)
    logs = [math.log1p(min(max(n, 0), 99)) for n in numbers.to_pylist()]
    assert found.raw_mean == pytest.approx(statistics.fmean(numbers.to_pylist()))
    assert (found.mean, found.std) == (pytest.approx(statistics.fmean(logs)), pytest.approx(statistics.pstdev(logs)))


def test_log1p_of_small_numbers_keeps_their_differences(tmp_path):
    numbers = pa.array([1e-17, 2e-17, 3e-17])
    found = figures(tmp_path, numbers, transform=Transform(log1p=True))
    done = convert_floats(numbers, FloatColumn("x", "x", transform=Transform(None, True, found.mean, found.std)))
    assert done.tolist() == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)], abs=1e-6)


@pytest.mark.parametrize("value", [-1.0, -7.0])
def test_a_number_without_logarithm_is_in_no_mean(tmp_path, value):
    """Of a column whose NaN are left to the steps that meet them, too."""
    part = FloatColumn("x", "x", finite=False, transform=Transform(log1p=True))
    pq.write_table(pa.table({"x": [1.0, value]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="log1p needs numbers above -1"):
        measure(open_dataset("data.train", str(tmp_path), {"x": "x"}), {}, [part], ALONE)


@pytest.mark.parametrize("value", [1e308, math.inf, math.nan])
def test_numbers_beyond_float32_are_refused_by_column_and_row_group(tmp_path, value):
    with pytest.raises(
        UserError,
        match=r"column 'x' \(x\) holds .*, but only finite numbers up to 3.4e38 can be trained on"
        rf".* \(in row group 1 of {tmp_path}/rows.parquet\)",
    ):
        figures(tmp_path, pa.array([1.0] * 8 + [value]))


def test_one_row_group_is_held_while_the_next_is_decoded(tmp_path, monkeypatch):
    """Ids and numbers are taken of each, and what a prediction of memory counts is one."""
    pq.write_table(pa.table({"x": MINUTE}), tmp_path / "rows.parquet", row_group_size=7)
    read, given = SegmentReader.read, []

    def watched(self, segment):
        assert all(table() is None for table in given)
        table = read(self, segment)
        given.append(weakref.ref(table))
        return table

    monkeypatch.setattr(SegmentReader, "read", watched)
    request = VocabularyRequest(("x",), min_count=1, max_size=99)
    dataset = open_dataset("data.train", str(tmp_path), {"x": "features.x"})
    measure(dataset, {"item": request}, [FloatColumn("x", "x")], ALONE)
    assert len(given) == 9


class OneOfSeveral:
    """Stands in for the `World` of a rank whose data are at fault; `told`: the other ranks are told of it."""

    rank, world_size, told = 0, 1, False

    def agree(self, action):
        try:
            return action()
        except UserError:
            self.told = True
            raise


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (pa.array([-1] * 8), pa.array([2**64 - 1] * 8, pa.uint64()), "are negative in one place and beyond 2"),
        (pa.array([1] * 8), pa.array([Decimal("1.5")] * 8), "are numbers in one place and texts in another"),
        (pa.array([1] * 8), pa.array([Decimal("1.5"), Decimal(2)] * 4), "are not all whole numbers within 64 bits"),
    ],
    ids=["signs", "kinds", "decimals"],
)
def test_ids_that_make_no_vocabulary_are_told_with_their_columns(tmp_path, one, other, said):
    pq.write_table(pa.table({"liked": one, "seen": other}), tmp_path / "rows.parquet")
    dataset = open_dataset("data.train", str(tmp_path), {"liked": "features.liked", "seen": "features.seen"})
    request = VocabularyRequest(("liked", "seen"), min_count=1, max_size=9)
    with pytest.raises(
        UserError, match=f"^config key 'data.train': ids of a vocabulary, in 'liked', 'seen': ids .*{said}"
    ):
        measure(dataset, {"item": request}, [], world := OneOfSeveral())
    assert world.told
