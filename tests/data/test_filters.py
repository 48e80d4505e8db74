"""Filters: their syntax, nulls, row groups left out by statistics, counting, and the cache of both."""

import datetime as dt
import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversion import refusal
from parquet_files import open_columns, write

from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.filters import parse_filter
from recsys.data.parquet import read_column, read_head

NAN = float("nan")
DAYS = [dt.date(2026, 11, 1) + dt.timedelta(days=i) for i in range(6)]
TABLE = pa.table(
    {
        "row": pa.array(range(6)),
        "a": pa.array([1, None, 3, 4, 5, None], pa.int32()),
        "f": pa.array([0.1, 2.5, NAN, None, -1.0, 7.0], pa.float32()),
        "s": pa.array(["de", "at", None, "ch", "de", "x y"]),
        "b": pa.array([True, False, None, True, False, True]),
        "d": pa.array([*DAYS[:5], None]),
        "t": pa.array([dt.datetime(2026, 11, i + 1, 12) for i in range(5)] + [None], pa.timestamp("us")),
        "z": pa.array(
            [dt.datetime(2026, 11, i + 1, 12) for i in range(5)] + [None], pa.timestamp("ns", "Europe/Berlin")
        ),
        "n": pa.array([Decimal("1.50"), Decimal("2.00"), None, Decimal("-3.25"), Decimal("0.00"), Decimal("9.99")]),
        "l": pa.array([[1], None, [], [2], [3], [4]]),
        "odd name": pa.array([0, 1, 2, 3, 4, 5]),
        "u": pa.array([2**64 - 1, 0, 1, 2, None, 3], pa.uint64()),
        "big": pa.array([2**60 + 1, 2**60, -(2**60), 0, 1, None]),
        "bytes": pa.array([b"a", b"b", None, b"c", b"d", b"e"]),
        "null": pa.nulls(6),
        "h": pa.array([0.1, -2, None, -0.0, NAN, 7], pa.float16()),
        "a2": pa.array([1, 2, 2, 9, None, 4], pa.int64()),
        "ubig": pa.array([2**60, 2**60, 2**64 - 1, 0, None, 1], pa.uint64()),
    }
)
CASES = [
    ("a == 3", [2]),
    ("a != 3", [0, 3, 4]),
    ("not a == 3", [0, 3, 4]),
    ("a < 4", [0, 2]),
    ("4 <= a", [3, 4]),
    ("1 < a <= 4", [2, 3]),
    ("a > 2.5", [2, 3, 4]),
    ("a <= 3.5 and a >= 2.5", [2]),
    ("a < 3e9", [0, 2, 3, 4]),
    ("a == 3.0", [2]),
    ("a > -1", [0, 2, 3, 4]),
    ("a is None", [1, 5]),
    ("a is not None", [0, 2, 3, 4]),
    ("a == 1 or a is None", [0, 1, 5]),
    ("a == 1 or b", [0, 3, 5]),
    ("not (a == 1 and b)", [1, 2, 3, 4]),
    ("a in [1, 4, 77]", [0, 3]),
    ("a not in (1, 4)", [2, 4]),
    ("f == 0.1", [0]),
    ("f > 1", [1, 5]),
    ("not f > 1", [0, 2, 4]),
    ("f != 7", [0, 1, 2, 4]),
    ("s == 'de'", [0, 4]),
    ("s != 'de'", [1, 3, 5]),
    ("s < 'ch'", [1]),
    ("s in ['de', \"x y\"]", [0, 4, 5]),
    ("s not in {'de'}", [1, 3, 5]),
    ("b", [0, 3, 5]),
    ("not b", [1, 4]),
    ("b == 1", [0, 3, 5]),
    ("b != True", [1, 4]),
    ("d >= '2026-11-04'", [3, 4]),
    ("d == '2026-11-02'", [1]),
    ("d in ['2026-11-02', '2026-11-05']", [1, 4]),
    ("t < '2026-11-02 12:00:00.000001'", [0, 1]),
    ("t >= '2026-11-04'", [3, 4]),
    ("z == '2026-11-02 12:00'", [1]),
    ("z == '2026-11-02T13:00:00+01:00'", [1]),
    ("n > 1.5", [1, 5]),
    ("n == 1.5", [0]),
    ("n in [2, 9.99]", [1, 5]),
    ("n not in [2, 1.5, 100000000000000000000000000000, 0.0000000000001]", [3, 4, 5]),
    ("h > 0", [0, 5]),
    ("h == 0.1", [0]),
    ("h in [-2, 0, 7]", [1, 3, 5]),
    ("h not in [-0.0, 7]", [0, 1, 4]),
    ("h != 7", [0, 1, 3, 4]),
    ("h <= f", [0, 1, 5]),
    ("f < 1180591620717411303424", [0, 1, 4, 5]),
    ("l is None", [1]),
    ("l is not None and a == 3", [2]),
    ("col('odd name') >= 4", [4, 5]),
    ("u > 2", [0, 5]),
    ("big > 1.5", [0, 1]),
    ("big == 1152921504606846977", [0]),
    ("bytes >= 'c'", [3, 4, 5]),
    ("col('null') is None", [0, 1, 2, 3, 4, 5]),
    ("col('null') == 3 or a == 3", [2]),
    ("a == a2", [0]),
    ("a < a2", [3]),
    ("a != f", [0, 2, 4]),
    ("big == ubig", [1, 3]),
    ("big < ubig", [2]),
    ("big > ubig", [0]),
    ("s == col('null') or a == 3", [2]),
    ("col('null') < t or a == 3", [2]),
    ("d == '2026-11-02' or\n  d == '2026-11-03'", [1, 2]),
]


def open_filtered(path: Path, text: str | None, *columns: str, **options) -> Dataset:
    return open_columns(path, *columns or ("row",), filter=text, **options)


def rows(dataset: Dataset) -> list[int]:
    return read_column(dataset, "row").to_pylist()


# Meaning


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_rows_that_match(tmp_path, text, expected):
    write(tmp_path / "one" / "a.parquet", TABLE)
    write(tmp_path / "each" / "a.parquet", TABLE, row_group_rows=1)
    write(tmp_path / "bare" / "a.parquet", TABLE, row_group_rows=2, write_statistics=False, use_dictionary=False)
    for folder in ("one", "each", "bare"):
        dataset = open_filtered(tmp_path / folder, text)
        assert rows(dataset) == expected, folder
        assert dataset.num_rows == len(expected)
        assert read_head(dataset, 1)["row"].to_pylist() == expected[:1]


def test_row_groups_of_one_row_are_decided_by_statistics(tmp_path, monkeypatch):
    """What the statistics of a single value say is exact, but for NaN and types that have none."""
    write(tmp_path / "a.parquet", TABLE, row_group_rows=1)
    for text, _ in CASES:
        columns = parse_filter(text).columns()
        if columns & {"f", "l", "n", "null", "a2", "h", "ubig"}:
            continue

        def none(*_) -> int:
            raise AssertionError(f"'{text}' is counted")  # noqa: B023

        monkeypatch.setattr(SegmentReader, "count", none)
        open_filtered(tmp_path, text)


BAD = [
    ("sampled(2, 7)", "sampled takes a share of the rows, from 0 to 1, and a seed"),
    ("sampled(0.5)", "sampled takes a share of the rows"),
    ("a = 1", "write == for equal"),
    ("a == 1 && b", "write and in place of &"),
    ("a == 1 || b", "write or in place of |"),
    ("a == 1 & b", "write and in place of &"),
    ("!b", "write not in place of !"),
    ("a <> 1", "write != for unequal"),
    ("a == 1 AND b", "in lower case"),
    ("a BETWEEN 1 AND 2", "in lower case"),
    ("a IS NULL", "in lower case"),
    ("a between 1 and 2", "low <= column <= high"),
    ("s like 'd%'", "use == or in"),
    ("a == None", "is None"),
    ("a in [1, None]", "is None"),
    ("a is 5", "compare a column with None"),
    ("a in []", "list of values"),
    ("a in 'abc'", "list of values"),
    ("1 < 2", "no column"),
    ("a == true", "write True"),
    ("a.b == 1", "has no column 'a.b'"),
    ("len(s).b == 1", "'len(s).b' is not known"),
    ("len(s) == 2", "'len(s)' is not known"),
    ("a + 1 == 2", "'a + 1' is not known"),
    ("col(a) == 1", "one name in quotes"),
    ("a == b'x'", "is not known"),
    ("a ==", "invalid syntax"),
    ("odd name > 3", "(invalid syntax; a column whose name is no plain word is col('odd name'))"),
    ("`odd name` > 3", "is col('odd name')"),
    ("flag#b > 3", "(invalid '#', which begins a comment; a column whose name is no plain word is col('odd name'))"),
    ("price (€) > 3", "is col('odd name')"),
    ("'odd name' > 3", "and no column; a column whose name is no plain word is col('odd name')"),
    ("(a == 1", "never closed"),
    ("a == 1\nb == 2", "cannot be understood"),
    ("a == " + "(" * 300 + "1" + ")" * 300, "too many nested"),
    ("__import__('os').system('true')", "cannot be understood"),
    ("", "must be an expression"),
    (7, "must be an expression"),
    ("s", "'s' is string, which is not a condition"),
    ("a == 'x'", "'a' is int32, and cannot be compared with 'x'"),
    ("a == 2.5", "2.5 is not an integer"),
    ("big == 9223372036854775808", "'big' is int64, and cannot be compared with 9223372036854775808"),
    ("u > -1", "'u' is uint64"),
    ("a < 1e300", "cannot be compared with 1e+300; write an integer"),
    ("h == 'x'", "'h' is halffloat, and cannot be compared with 'x'; write a number"),
    ("a == True", "'a' is int32, and cannot be compared with True"),
    ("s == 5", "write a value in quotes"),
    ("b == 5", "write True or False"),
    ("d == 'yesterday'", "write a date such as '2026-11-01'"),
    ("d == 20261101", "write a date"),
    ("t == '2026-13-01'", "write a time"),
    ("l == 1", "a list has only"),
    ("a < s", "columns 'a' (int32) and 's' (string)"),
    ("l == l", "cannot be compared with each other"),
    ("aa == 1", "has no column 'aa'; did you mean 'a"),
]


@pytest.mark.parametrize(("text", "part"), BAD)
def test_filters_that_are_refused(tmp_path, text, part):
    write(tmp_path / "a.parquet", TABLE)
    message = refusal(lambda: open_filtered(tmp_path, text))
    assert message.startswith("config key 'data.filter'") and part in message


def test_a_long_filter(tmp_path):
    write(tmp_path / "a.parquet", TABLE)
    assert rows(open_filtered(tmp_path, " or ".join(f"a == {i}" for i in range(3, 1000)))) == [2, 3, 4]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_strings_however_they_are_held(tmp_path, kind):
    names = [None if i % 5 == 0 else f"name{i % 7}" for i in range(1000)]
    write(tmp_path / "a.parquet", {"row": range(1000), "s": pa.array(names).cast(kind)}, row_group_rows=300)
    write(tmp_path / "b.parquet", {"row": range(1000), "s": pa.array(names)}, row_group_rows=300)
    for text, wanted in (("s == 'name3'", {"name3"}), ("s in ['name1', 'name6']", {"name1", "name6"})):
        assert rows(open_filtered(tmp_path, text)) == 2 * [i for i in range(1000) if names[i] in wanted]


# Random filters against a model in plain Python


def random_filter(rng: random.Random, depth: int = 0) -> tuple[str, object]:
    """Return a filter, and a function of a row that gives True, False or None."""
    if depth < 3 and rng.random() < 0.6:
        (left, f), (right, g) = random_filter(rng, depth + 1), random_filter(rng, depth + 1)
        match rng.randrange(3):
            case 0:
                return f"({left} and {right})", lambda r: kleene(f(r), g(r), False)
            case 1:
                return f"({left} or {right})", lambda r: kleene(f(r), g(r), True)
        return f"not {left}", lambda r: None if f(r) is None else not f(r)
    name = rng.choice("xys")
    if rng.random() < 0.15:
        return f"{name} is None", lambda r: r[name] is None
    literal = repr(f"v{rng.randrange(12):02}") if name == "s" else str(rng.randrange(-1, 12))
    value = eval(literal)
    if rng.random() < 0.2:
        return f"{name} in [{literal}]", lambda r: None if r[name] is None else r[name] == value
    sign = rng.choice(["==", "!=", "<", "<=", ">", ">="])
    return (
        f"{name} {sign} {literal}",
        lambda r: None if r[name] is None else eval(f"v {sign} w", {"v": r[name], "w": value}),
    )


def kleene(a, b, wins: bool):
    return wins if wins in (a, b) else None if None in (a, b) else not wins


def test_random_filters(tmp_path, monkeypatch):
    rng = random.Random(1)
    everything = []
    for number in range(4):
        table: dict[str, list] = {"row": [], "x": [], "y": [], "s": []}
        for group in range(6):  # values of a row group lie close together, so that statistics decide some
            low, nulls = rng.randrange(10), rng.choice([0, 0.3, 1])
            for _ in range(5):
                cells = [
                    low + rng.randrange(2),
                    rng.choice([float(low), low + 0.5, NAN]),
                    f"v{low + rng.randrange(2):02}",
                ]
                values = [None if rng.random() < nulls else cell for cell in cells]
                for name, value in zip("xys", values, strict=True):
                    table[name].append(value)
                table["row"].append(1000 * number + 10 * group + _)
        kinds = {"row": pa.int64(), "x": pa.int64() if number else pa.int8(), "y": pa.float64(), "s": pa.string()}
        arrow = {name: pa.array(values, kinds[name]) for name, values in table.items()}
        write(tmp_path / f"{number}.parquet", arrow, row_group_rows=5, write_statistics=number != 2)
        everything += [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    found = counted = 0

    original = SegmentReader.count

    def count(*group) -> int:
        nonlocal counted
        counted += 1
        return original(*group)

    monkeypatch.setattr(SegmentReader, "count", count)
    for _ in range(80):
        text, model = random_filter(rng)
        expected = [row["row"] for row in everything if model(row) is True]
        if not expected:
            assert "matches" in refusal(lambda: open_filtered(tmp_path, text))  # noqa: B023
            continue
        assert rows(open_filtered(tmp_path, text)) == expected, text
        found += 1
    assert found > 30 and counted < 80 * 24 * 0.7


# Row groups


def test_columns_of_the_filter_alone_are_not_returned(tmp_path):
    write(tmp_path / "a.parquet", TABLE, row_group_rows=4)
    dataset = open_filtered(tmp_path, "a > 1", "s", "row")
    assert (dataset.columns, dataset.schema.names) == (("s", "row"), ["s", "row"])
    tables = SegmentReader(dataset).tables()
    assert [table.to_pydict() for table in tables] == [{"s": [None, "ch"], "row": [2, 3]}, {"s": ["de"], "row": [4]}]
    # Of the rows that match, 4 bytes for each of two columns.
    assert dataset.row_groups.num_bytes.tolist() == [16, 8]
    assert dataset.stored_rows.tolist() == [4, 2]
    only = SegmentReader(dataset, ["row"]).read(dataset.row_groups.segment(0, 1, 2))
    assert only.to_pydict() == {"row": [3]}


def test_row_groups_that_match_wholly_are_read_without_the_filter(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", {"row": range(20), "x": [*range(10), *range(100, 110)]}, row_group_rows=10)
    dataset = open_filtered(tmp_path, "x >= 5")
    read = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda *args, **options: read.extend(options["columns"]) or original(*args, **options),
    )
    assert rows(dataset) == [*range(5, 10), *range(10, 20)]
    assert read == ["row", "x", "row"]


def test_row_groups_and_files_without_a_match_are_dropped(tmp_path):
    for i in range(3):
        write(tmp_path / f"{i}.parquet", {"row": range(10 * i, 10 * i + 10)}, row_group_rows=5)
    dataset = open_filtered(tmp_path, "row >= 17")
    groups = dataset.row_groups
    assert [path.rsplit("/")[-1] for path in groups.paths] == ["1.parquet", "2.parquet"]
    assert (groups.file.tolist(), groups.index.tolist()) == ([0, 1, 1], [1, 0, 1])
    assert groups.num_rows.tolist() == [3, 5, 5] and dataset.num_files == 2
    message = refusal(lambda: open_filtered(tmp_path, "row < 0"))
    assert message.startswith("config key 'data.filter'") and "matches 'row < 0'" in message


def test_max_rows_counts_rows_that_match(tmp_path):
    write(tmp_path / "a.parquet", {"row": range(20), "x": [0, 1] * 10}, row_group_rows=8)
    dataset = open_filtered(tmp_path, "x == 1", max_rows=6)
    assert dataset.row_groups.num_rows.tolist() == [4, 2]
    assert rows(dataset) == [1, 3, 5, 7, 9, 11]
    whole = open_filtered(tmp_path, "row < 16", max_rows=10)
    assert rows(whole) == list(range(10))


def test_statistics_that_are_cut_short_exclude_nothing(tmp_path):
    names = ["a" * 5000, "b" * 5000, "\N{GRINNING FACE}" * 2000]
    write(tmp_path / "a.parquet", {"row": range(3), "s": names}, row_group_rows=3)
    for i, name in enumerate(names):
        assert rows(open_filtered(tmp_path, f"s == '{name}'")) == [i]
        assert rows(open_filtered(tmp_path, f"s != '{name}'")) == [row for row in range(3) if row != i]


def test_partitions_and_columns_in_one_filter(tmp_path):
    for hour in range(3):
        write(tmp_path / f"hour={hour:02}" / "a.parquet", {"row": [10 * hour, 10 * hour + 1], "x": [0, 1]})
    write(tmp_path / "hour=__HIVE_DEFAULT_PARTITION__" / "a.parquet", {"row": [90, 91], "x": [0, 1]})
    assert rows(open_filtered(tmp_path, "hour >= 1 and x == 1")) == [11, 21]
    assert rows(open_filtered(tmp_path, "hour is None or x == 0")) == [0, 10, 20, 90, 91]
    assert rows(open_filtered(tmp_path, "hour != 1")) == [0, 1, 20, 21]
    assert read_column(open_filtered(tmp_path, "hour == 2", "hour"), "hour").to_pylist() == [2, 2]
    assert "'hour' is int32" in refusal(lambda: open_filtered(tmp_path, "hour == '02'"))


def test_a_partition_key_and_literals_that_only_the_columns_type_holds(tmp_path):
    """Before the footers are read, the types of columns that are no keys are not known."""
    big = 2**63
    for day in (1, 2):
        u = pa.array([big, big + day], pa.uint64())
        write(tmp_path / f"day={day}" / "a.parquet", {"row": [10 * day, 10 * day + 1], "u": u})
    assert rows(open_filtered(tmp_path, f"day == 2 and u > {big}")) == [21]
    assert rows(open_filtered(tmp_path, f"day == 1 or u in [{big + 2}, 7]")) == [10, 11, 21]
    assert rows(open_filtered(tmp_path, f"day >= 1 and u == {big}")) == [10, 20]


def test_row_groups_of_halves_without_a_match_are_not_counted(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", {"row": range(4), "h": pa.array([1, 2, 3.5, 4], pa.float16())}, row_group_rows=2)
    counted, count = [], SegmentReader.count
    monkeypatch.setattr(SegmentReader, "count", lambda self, number: counted.append(number) or count(self, number))
    assert rows(open_filtered(tmp_path, "h >= 3.5")) == [2, 3] and counted == [1]


def test_filters_change_the_fingerprint(tmp_path):
    write(tmp_path / "a.parquet", {"row": [1, 2]})
    prints = [open_filtered(tmp_path, text).fingerprint for text in (None, "row > 0", "row == 1", "row == 2")]
    assert len(set(prints)) == 4
