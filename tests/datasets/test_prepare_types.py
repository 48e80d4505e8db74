"""Logs of columns and files however they are held: types that writers add to Parquet's own, times, folders, globs."""

import gzip
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.datasets.delimited import CsvOptions, convert_csv
from recsys.datasets.histories import HistoryOptions, convert_histories
from recsys.datasets.interactions import LogOptions, convert_log
from recsys.datasets.prepare import prepare
from recsys.errors import UserError

USERS = [f"u{i % 7}" for i in range(60)]
ITEMS = [f"i{i * 5 % 11}" for i in range(60)]


def write(path: Path, **columns: pa.Array | list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def read(folder: Path) -> dict[str, list]:
    parts = ("train", "valid", "test", "items")
    return {part: pa.concat_tables(map(pq.read_table, sorted((folder / part).glob("*")))).to_pylist() for part in parts}


def converted(source: Path, out: Path, **options) -> dict[str, list]:
    convert_log([source], out, LogOptions(**options))
    return read(out)


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int8(), pa.string()), pa.string_view(), pa.large_string()], ids=str)
def test_texts_however_they_are_held(kind: pa.DataType, tmp_path: Path) -> None:
    titles = [f"the {item}" for item in ITEMS]
    options = {"item_features": ["title"], "tokens": ["title"], "where": "title != 'the i3'"}
    plain = {"user_id": pa.array(USERS), "item_id": pa.array(ITEMS), "title": pa.array(titles)}
    held = {name: column.cast(kind) for name, column in plain.items()}
    expected = converted(write(tmp_path / "plain/a.parquet", **plain), tmp_path / "expected", **options)
    assert expected["items"][0]["title"] == ["i0"]
    assert converted(write(tmp_path / "held/a.parquet", **held), tmp_path / "found", **options) == expected
    for name, columns in (("a", plain), ("b", held)):  # both in one log
        pq.write_table(pa.table(columns).slice(30 * (name == "b"), 30), tmp_path / "held" / f"{name}.parquet")
    assert converted(tmp_path / "held", tmp_path / "both", **options) == expected


@pytest.mark.parametrize("kind", [pa.uuid(), pa.json_()], ids=str)
def test_types_of_their_own_are_read_as_what_they_are_stored_as(kind: pa.DataType, tmp_path: Path) -> None:
    size = 16 if kind == pa.uuid() else 18
    users, items = (pa.array([f'"{id:_<{size - 2}}"' for id in ids]).cast(kind.storage_type) for ids in (USERS, ITEMS))
    plain = {"user_id": users, "item_id": items}
    held = {name: pa.ExtensionArray.from_storage(kind, column) for name, column in plain.items()}
    plain["timestamp"] = held["timestamp"] = pa.array(range(60))
    paths = [write(tmp_path / name, **columns) for name, columns in (("plain.parquet", plain), ("held.parquet", held))]
    expected, found = (converted(path, path.with_suffix("")) for path in paths)
    assert len(expected["test"]) == 7 and found == expected
    for path in paths:
        convert_histories([path], path.with_suffix(".histories"), HistoryOptions())
    expected, found = (pq.read_table(path.with_suffix(".histories")) for path in paths)
    assert expected["history"].null_count == 0 and found.equals(expected)


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64(), 4), pa.list_view(pa.int64()), pa.large_list(pa.int64())],
    ids=["fixed size", "view", "large"],
)
def test_lists_however_they_are_held(kind: pa.DataType, tmp_path: Path) -> None:
    lists = np.random.default_rng(0).permuted(np.tile(np.arange(9), (20, 1)), axis=1)[:, :4].tolist()
    plain, held = pa.array(lists, pa.list_(pa.int64())), pa.array(lists, kind)
    users = [*range(20)]
    expected = converted(write(tmp_path / "plain.parquet", user_id=users, item_id=plain), tmp_path / "expected")
    assert len(expected["test"]) == 20
    assert converted(write(tmp_path / "held.parquet", user_id=users, item_id=held), tmp_path / "found") == expected


MOMENTS = pa.array([0, 10**15], pa.timestamp("us"))


@pytest.mark.parametrize(
    ("fits", "one", "other"),
    [
        (
            True,
            pa.array([Decimal("0.25"), Decimal("-9.75")], pa.decimal128(5, 2)),
            pa.array([2**31 - 1, 0], pa.int32()),
        ),
        (True, pa.array([-(2**63), 2**63 - 1]), pa.array([Decimal("1.5"), None], pa.decimal128(38, 4))),
        (True, pa.array([2**53, -(2**53)]), pa.array([0.5, None])),
        (False, pa.array([2**53 + 1, 0]), pa.array([0.5, None])),
        (False, pa.array([2**63, 0], pa.uint64()), pa.array([-1, 0])),
        (True, MOMENTS, MOMENTS.cast(pa.timestamp("ms"))),
        (False, pa.array([253_402_214_400_000_000, 0], pa.timestamp("us")), MOMENTS.cast(pa.timestamp("ns"))),
        (False, MOMENTS, MOMENTS.cast(pa.timestamp("us", "UTC"))),
        (True, pa.array([[1], [2, None]], pa.list_(pa.int8())), pa.array([[0.5], None])),
        (False, pa.array([[2**60 + 1], []]), pa.array([[0.5], None])),
        (True, pa.array([{"a": 1}, None]), pa.array([{"a": 0.5}, None])),
    ],
    ids=lambda column: str(getattr(column, "type", column)),
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_column_of_two_types_keeps_its_values_or_is_refused(
    fits: bool, one: pa.Array, other: pa.Array, is_first: bool, tmp_path: Path
) -> None:
    columns = (one, other) if is_first else (other, one)
    for name, column in zip("ab", columns, strict=True):
        times = [ord(name)] * 2
        write(tmp_path / f"log/{name}.parquet", user_id=[1, 2], item_id=[1, 2], timestamp=times, x=column)
    out = tmp_path / "out"
    kinds, files = r"'x' is .* in ('.*/a.parquet'|files before it|all files together) and .* in ", r"'.*/[ab].parquet'"
    message = kinds + files + r", and no one type holds all its values .* write it with the same type"
    if fits:
        convert_histories([tmp_path / "log"], out, HistoryOptions())
        assert pq.read_table(out)["x"].to_pylist() == [value for column in columns for value in column.to_pylist()]
        return
    with pytest.raises(UserError, match=message):
        convert_histories([tmp_path / "log"], out, HistoryOptions())
    with pytest.raises(UserError, match=message):
        convert_log([tmp_path / "log"], out, LogOptions(item_features=["x"]))


@pytest.mark.parametrize("at", ["at", "time of visit", "day-1", "is"])
def test_the_filter_that_a_message_advises_leaves_the_rows_out(at: str, tmp_path: Path) -> None:
    times = pa.array([None if i % 7 == 3 else float(i) for i in range(60)])
    for values, word in ((times, "nulls"), (times.fill_null(float("nan")), "NaN")):
        source = write(tmp_path / f"{word}.parquet", user_id=USERS, item_id=ITEMS, **{at: values})
        with pytest.raises(UserError, match=word) as caught:
            convert_log([source], tmp_path / "none", LogOptions(time=at))
        where = str(caught.value).partition('--where "')[2].removesuffix('"')
        assert converted(source, tmp_path / word, time=at, where=where)["test"]


def test_folders_are_read_as_training_reads_them(tmp_path: Path) -> None:
    """Without what begins with a dot or _, with the keys in paths as columns, and by globs."""
    for part in range(2):
        here = slice(30 * part, 30 * part + 30)
        write(tmp_path / f"log/day={1 + part}/a.parquet", user_id=USERS[here], item_id=ITEMS[here])
    write(tmp_path / "log/_delta_log/1.checkpoint.parquet", other=[1])
    write(tmp_path / "log/day=1/_temporary/b.parquet", user_id=["x"], item_id=["y"])
    write(tmp_path / "log/.hidden/c.parquet", user_id=["x"], item_id=["y"])
    whole = write(tmp_path / "whole.parquet", user_id=USERS, item_id=ITEMS, day=[1] * 30 + [2] * 30)
    expected = converted(whole, tmp_path / "expected", time="day")
    assert {row["day"] for row in expected["train"]} == {1, 2}
    assert converted(tmp_path / "log", tmp_path / "found", time="day") == expected
    second = converted(tmp_path / "log", tmp_path / "second", where="day == 1")
    assert second == converted(tmp_path / "log/*=1/*.parquet", tmp_path / "glob")
    with pytest.raises(UserError, match=r"^INPUT: no file matches '.*/log/x\*'$"):
        convert_log([tmp_path / "log/x*"], tmp_path / "none", LogOptions())
    with pytest.raises(UserError, match=r"^--test: '.*/nowhere' does not exist"):
        convert_log([tmp_path / "log"], tmp_path / "none", LogOptions(test=[tmp_path / "nowhere"]))
    with pytest.raises(UserError, match="has no column 'dya', only user_id, item_id, day; did you mean 'day'"):
        convert_log([tmp_path / "log"], tmp_path / "none", LogOptions(time="dya"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--history", "-3"], "--history must be at least 1, got -3"),
        (["--history", "0"], "--history must be at least 1, got 0"),
        (["--neighbours", "-2", "--train-rows", "users"], "--neighbours must be at least 0, got -2"),
        (["--valid-where", "item_id =="], "--valid-where: 'item_id ==' cannot be understood"),
        (["--test-where", "item_id > 3"], "--test-where: column 'item_id' is string"),
    ],
)
def test_options_that_are_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", user_id=USERS, item_id=ITEMS)
    with pytest.raises(UserError, match=re.escape(said)):
        prepare(["retrieval", str(source), "--out", str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "written", ["2026-11-{:02}", "12:00:{:02}", "2026-11-{:02} 12:00", "2026-11-{:02} 12:00:00.5Z", "1.{:02}"]
)
def test_rows_of_a_csv_are_split_by_any_time(written: str, tmp_path: Path) -> None:
    days = np.random.default_rng(0).permutation(20) + 1
    lines = [f"{day},{written.format(day)}" for day in days]
    (tmp_path / "a.csv").write_text("\n".join(["day,at", *lines]))
    convert_csv([tmp_path / "a.csv"], tmp_path / "out", CsvOptions(split=(0.5, 0.5), split_by="time:at"))
    first, second = (pq.read_table(tmp_path / "out" / part) for part in ("train", "valid"))
    assert sorted(first["day"].to_pylist()) == [*range(1, 11)] and sorted(second["day"].to_pylist()) == [*range(11, 21)]


def test_rows_of_a_csv_are_not_split_by_nan(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("at\n" + "1.5\n2\nnan\n3\n" * 5)
    options = CsvOptions(split=(0.5, 0.5), split_by="time:at")
    with pytest.raises(UserError, match=r'holds NaN, which is not a time; leave these out: --where "at > 0"$'):
        convert_csv([tmp_path / "a.csv"], tmp_path / "out", options)
    convert_csv([tmp_path / "a.csv"], tmp_path / "out", replace(options, where="at > 0"))
    assert pq.read_table(tmp_path / "out" / "train").num_rows == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b,b\n1,2,3\n", "has columns a, b, b, but .* has a, b; convert .* of their own"),
        ("a,grün\n1,2\n".encode("latin-1"), "the names of its columns are not UTF-8; convert the file"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), "is compressed by gzip, .*; let it end in .gz$"),
        ("a,b\n1,2\n".encode("utf-16"), "is UTF-16, not UTF-8; convert the file, say with iconv$"),
        ("a,b\n1,ü\n".encode("latin-1"), "invalid UTF8 data; convert the file, say with iconv$"),
    ],
)
def test_a_csv_that_cannot_be_read_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,x\n")
    (tmp_path / "other.csv").write_bytes(content)
    with pytest.raises(UserError, match=f"^{tmp_path}/other.csv.*{said}"):
        convert_csv([tmp_path / "a.csv", tmp_path / "other.csv"], tmp_path / "out", CsvOptions())


def test_numbers_of_a_csv_that_training_refuses_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b,c,d\n1.5,2.5,1 nan,nan\nNaN,,inf,x\n-Inf,3.5,2,y\n")
    convert_csv([path], tmp_path / "out", options := CsvOptions(lists={"c": (" ", "float32")}))
    assert (
        "note: numbers are NaN or infinite, which training refuses: 2 in 'a', 2 in 'c'; --null"
        in capsys.readouterr().err
    )
    convert_csv([path], tmp_path / "nulls", replace(options, null_values=["NaN", "-Inf", "inf"], lists={}))
    assert not capsys.readouterr().err


def test_a_csv_file_of_a_header_alone_tells_no_types(tmp_path: Path) -> None:
    """Spark's first file may be one."""
    for name, rows in (("a", ""), ("b", "2.5,7\n"), ("c", "3.5,8\n")):
        (tmp_path / f"{name}.csv").write_text(f"stars,user\n{rows}")
    convert_csv([tmp_path / f"{name}.csv" for name in "abc"], tmp_path / "out", CsvOptions())
    table = pq.read_table(tmp_path / "out")
    assert table.schema.types == [pa.float64(), pa.int64()] and table["user"].to_pylist() == [7, 8]
    with pytest.raises(UserError, match="no row fell into the output"):
        convert_csv([tmp_path / "a.csv"], tmp_path / "alone", CsvOptions())
    (tmp_path / "a.csv").write_text("stars\n")
    with pytest.raises(UserError, match=r"/a\.csv has columns stars, but .*/b\.csv has stars, user"):
        convert_csv([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "others", CsvOptions())


def test_a_csv_file_without_a_header_of_times_with_nanoseconds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2026-11-05 18:30:00.123456789\n")
    convert_csv([tmp_path / "a.csv"], tmp_path / "out", CsvOptions(columns=["user", "t"]))
    assert pq.read_table(tmp_path / "out")["t"][0].value == 1793903400123456789


def test_nulls_inside_lists_of_items_are_told_as_such(tmp_path: Path) -> None:
    source = write(tmp_path / "log.parquet", user_id=[1, 2], item_id=[[1, None], None])
    with pytest.raises(UserError, match=r"the lists of column 'item_id' hold 1 null, .* write the lists without them"):
        convert_log([source], tmp_path / "out", LogOptions(where="item_id is not None"))


def test_a_csv_has_bool_and_times_of_day_as_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("seen,hour\ntrue,18:30\nFalse,07:05:09\n")
    convert_csv([tmp_path / "a.csv"], tmp_path / "out", CsvOptions())
    assert pq.read_table(tmp_path / "out").schema.types == [pa.bool_(), pa.time32("ms")]


def test_zeros_in_front_of_numbers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("sku,price,at,zip,n\n12,0.5,07:05:00,,0\n0042,01.5,18:30:00,00501,-3\n")
    convert_csv([tmp_path / "a.csv"], tmp_path / "out", CsvOptions(types={"zip": "string"}))
    (note,) = re.findall("note: .*", capsys.readouterr().err)
    assert "'sku' is read as numbers" in note and "0042 becomes 42; --types sku=string" in note
    assert pq.read_table(tmp_path / "out").to_pylist()[1]["zip"] == "00501"


@pytest.mark.parametrize("split", [{"lists": {"genres": ("|", "string")}}, {"tokens": ["genres"]}])
def test_a_column_that_is_split_has_no_type_of_its_own(split: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("genres\n1|2\n")
    with pytest.raises(UserError, match=r"--types has 'genres', which is split; .* --list NAME=SEPARATOR:TYPE"):
        convert_csv([tmp_path / "a.csv"], tmp_path / "out", CsvOptions(types={"genres": "int64"}, **split))
