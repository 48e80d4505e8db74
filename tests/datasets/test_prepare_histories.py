"""Histories of a log's rows: against a loop over rows, over days, of any types; mistakes."""

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.datasets import histories
from recsys.datasets.histories import HistoryOptions, convert_histories
from recsys.datasets.prepare import prepare
from recsys.errors import UserError

START = datetime.datetime(2026, 11, 1)
TIMES = {
    "whole": int,
    "float": lambda second: second / 8,
    "moment": lambda second: START + datetime.timedelta(seconds=second),
    "day": lambda second: (START + datetime.timedelta(days=second)).date(),
    "text": lambda second: str(START + datetime.timedelta(seconds=second)),
    "of the day": lambda second: (START + datetime.timedelta(seconds=second)).time(),
}
Row = dict[str, Any]


def read(folder: Path) -> list[Row]:
    return [row for path in sorted(folder.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]


def users_of(folder: Path) -> dict[Any, Row]:
    rows = pq.read_table(folder / "_users.parquet").to_pylist()
    return {row.pop("who"): row for row in rows}


def write(folder: Path, rows: list[Row], files: int = 1, group_rows: int = 20) -> Path:
    """Write rows in order, to files of small row groups, the last of which has no rows."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    size = -(-len(rows) // files)
    for number in range(files + 1):
        part = table.slice(number * size, size) if number < files else table.slice(0, 0)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=group_rows)
    return folder


def drawn(seed: int, time: str = "whole", names: bool = False, count: int = 400) -> list[Row]:
    """Rows of a few users, some unknown, of whom several are of one moment, in no order."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        user = int(draw.integers(0, 12))
        rows.append(
            {
                "number": number,
                "who": None if user == 0 else f"u{user}" if names else user,
                "what": f"i{draw.integers(0, 9)}" if names else int(draw.integers(0, 9)),
                "at": TIMES[time](int(draw.integers(0, count // 4))),
                "label": int(draw.integers(0, 3)) if draw.random() < 0.9 else None,
                "kind": [None, "a", "b"][draw.integers(0, 3)],
                "tags": ["x"] * int(draw.integers(0, 3)),
            }
        )
    return rows


def by_a_loop(rows: list[Row], most: int, wanted: bool) -> list[Row]:
    """What the converter is to write."""
    rows = sorted(rows, key=lambda row: row["at"])
    written = []
    for row in rows:
        before = [
            other
            for other in rows
            if other["who"] == row["who"] is not None
            and other["at"] < row["at"]
            and (not wanted or (other["label"] or 0) >= 1)
        ][-most:]
        written.append(
            row | {"clicked": [other["what"] for other in before], "clicked_kind": [other["kind"] for other in before]}
        )
    return written


def options(**changes: Any) -> HistoryOptions:
    given = {"user": "who", "item": "what", "time": "at", "columns": ["kind"], "name": "clicked", "history": 5}
    return HistoryOptions(**{**given, **changes})


@pytest.fixture
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "STRETCH_ROWS", 64)
    monkeypatch.setattr(histories, "SAMPLED", 8)


@pytest.mark.usefixtures("small_stretches")
@pytest.mark.parametrize("where", [None, "label >= 1"])
@pytest.mark.parametrize("time", TIMES)
def test_histories_are_those_of_a_loop(time: str, where: str | None, tmp_path: Path) -> None:
    """Whatever times are, however the rows lie in files, and in however many stretches they are read."""
    for seed, in_order in enumerate((False, True)):
        rows = drawn(seed, time, names=in_order)
        if in_order:
            rows.sort(key=lambda row: row["at"])
        out, most = tmp_path / f"out-{seed}", 1 + 6 * seed
        source = write(tmp_path / f"log-{seed}", rows, files=3)
        convert_histories([source], out, options(history=most, history_where=where))
        assert read(out) == by_a_loop(rows, most, where is not None)


@pytest.mark.usefixtures("small_stretches")
@pytest.mark.parametrize(("seed", "time"), [*enumerate(TIMES)])
def test_days_one_after_the_other_are_all_days_at_once(seed: int, time: str, tmp_path: Path) -> None:
    rows = drawn(10 + seed, time, names=seed % 2 == 0)
    given: dict[str, Any] = {"history": 3 + seed, "history_where": "label >= 1"}
    convert_histories([write(tmp_path / "log", rows, files=2)], tmp_path / "all", options(**given))
    moments = sorted({row["at"] for row in rows})
    draw = np.random.default_rng(seed)
    cuts = [moments[0], *(moments[i] for i in np.sort(draw.choice(np.arange(1, len(moments)), 3, replace=False)))]
    found, after = [], None
    for day, (least, below) in enumerate(zip(cuts, [*cuts[1:], None], strict=True)):
        of_day = [row for row in rows if row["at"] >= least and (below is None or row["at"] < below)]
        folder = write(tmp_path / f"day={day}", of_day)
        convert_histories([folder], tmp_path / f"out-{day}", options(**given, after=after))
        after = tmp_path / f"out-{day}"
        found += read(after)
    days = [row.pop("day") for row in found]
    assert sorted(days) == days and set(days) == {0, 1, 2, 3}  # keys of paths have become columns
    assert found == read(tmp_path / "all") == by_a_loop(rows, given["history"], True)
    assert users_of(tmp_path / "out-3") == users_of(tmp_path / "all")


def test_what_is_carried_over_is_what_the_next_row_would_see(tmp_path: Path) -> None:
    rows = drawn(3)
    convert_histories([write(tmp_path / "log", rows)], tmp_path / "out", options())
    later = [{**rows[0], "who": who, "at": 10**6} for who in range(1, 12)]
    expected = {row["who"]: row for row in by_a_loop([*rows, *later], 5, False) if row["at"] == 10**6}
    found = users_of(tmp_path / "out")
    assert {who: row["clicked_kind"] for who, row in found.items()} == {
        who: row["clicked_kind"] for who, row in expected.items() if row["clicked"]
    }


def test_a_second_history_is_added_to_what_has_one(tmp_path: Path) -> None:
    rows = drawn(4)
    convert_histories([write(tmp_path / "log", rows)], tmp_path / "one", options())
    second = options(name="liked", columns=[], history_where="label >= 1")
    convert_histories([tmp_path / "one"], tmp_path / "two", second)
    expected = [
        row | {"liked": liked["clicked"]}
        for row, liked in zip(by_a_loop(rows, 5, False), by_a_loop(rows, 5, True), strict=True)
    ]
    assert read(tmp_path / "two") == expected


def test_a_first_day_without_clicks_and_wider_types_after_it(tmp_path: Path) -> None:
    days = [
        {"who": pa.array([1, 2], pa.int32()), "what": pa.array([7, 8], pa.int16()), "at": [1, 1], "label": [0, 0]},
        {"who": pa.array([1.0, None]), "what": pa.array([2**40, 9]), "at": [2, 2], "label": [1, 1]},
        {"who": pa.array([decimal.Decimal(1)]), "what": pa.array([3], pa.int8()), "at": [3], "label": [None]},
    ]
    after, found = None, []
    for day, columns in enumerate(days):
        pq.write_table(pa.table(columns), tmp_path / f"{day}.parquet")
        given = options(columns=[], history_where="label == 1", after=after)
        convert_histories([tmp_path / f"{day}.parquet"], tmp_path / f"out-{day}", given)
        after = tmp_path / f"out-{day}"
        found += [row["clicked"] for row in read(after)]
    assert found == [[], [], [], [], [2**40]]


def test_fields_of_structs_and_columns_that_some_files_lack(tmp_path: Path) -> None:
    rows = [{"event": {"who": who, "at": at}, "what": at} for at, who in enumerate("abaab")]
    (tmp_path / "log").mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:3]), tmp_path / "log/0.parquet")
    pq.write_table(pa.Table.from_pylist([row | {"more": 1.5} for row in rows[3:]]), tmp_path / "log/1.parquet")
    given = options(user="event.who", time="event.at", columns=[])
    convert_histories([tmp_path / "log"], tmp_path / "out", given)
    histories_of_rows = [[], [], [0], [0, 2], [1]]
    assert read(tmp_path / "out") == [
        {**row, "more": None if number < 3 else 1.5, "clicked": history}
        for number, (row, history) in enumerate(zip(rows, histories_of_rows, strict=True))
    ]


def test_rows_that_are_left_out_are_in_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row if row["number"] % 7 else row | {"at": None} for row in drawn(5)]
    source = write(tmp_path / "log", rows)
    with pytest.raises(
        UserError, match=r"column 'at' holds .* nulls; every row needs a time.*--where \"at is not None\""
    ):
        convert_histories([source], tmp_path / "out", options())
    convert_histories([source], tmp_path / "out", options(where="at is not None and kind == 'a'"))
    kept = [row for row in rows if row["at"] is not None and row["kind"] == "a"]
    assert read(tmp_path / "out") == by_a_loop(kept, 5, False)
    unknown = sum(row["who"] is None for row in kept)
    assert capsys.readouterr().err == f"note: {unknown} rows have no who, and an empty history\n"


@pytest.mark.usefixtures("small_stretches")
def test_a_log_in_no_order_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"who": 1} for row in drawn(6, count=1000)]
    convert_histories([write(tmp_path / "a", rows, group_rows=200)], tmp_path / "out-a", options())
    assert "note: the log is not in the order of at, so each row is read 1" in capsys.readouterr().err
    rows.sort(key=lambda row: row["at"])
    convert_histories([write(tmp_path / "b", rows, group_rows=20)], tmp_path / "out-b", options())
    assert capsys.readouterr().err == ""
    assert [row["clicked"] for row in read(tmp_path / "out-b")] == [row["clicked"] for row in by_a_loop(rows, 5, False)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user": "whom"}, "has no column 'whom', only number, who, what, at, label, kind, tags; did you mean 'who'?"),
        ({"columns": ["sort"]}, "has no column 'sort'"),
        ({"time": "tags"}, "column 'tags' is list<element: string>; a time is a number"),
        ({"time": "kind"}, "column 'kind' holds"),
        ({"user": "tags"}, "column 'tags' is list<element: string>; an id is a whole number"),
        ({"item": "tags"}, "column 'tags' is list<element: string>; a history is of single values"),
        ({"name": "number"}, "there would be two columns 'number'; call the lists otherwise, as in --name clicked"),
        ({"columns": ["kind", "kind"]}, "there would be two columns 'clicked_kind'"),
        ({"history": 0}, "--history must be at least 1, got 0"),
        (
            {"history_where": "lable == 1"},
            "has no column 'lable', only number, who, what, at, label, kind, tags; did you mean 'label'?",
        ),
        ({"history_where": "label == 'x'"}, "--history-where: column 'label' is int64"),
        ({"history_where": "label =="}, "--history-where: 'label ==' cannot be understood"),
        ({"where": "number > 1000"}, "--where: no row of INPUT matches 'number > 1000'"),
    ],
)
def test_mistakes_are_told(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "log", drawn(0))
    with pytest.raises(UserError) as error:
        convert_histories([source], tmp_path / "out", options(**changes))
    assert message in str(error.value) and not (tmp_path / "out").exists()


def test_files_that_do_not_go_together_or_hold_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "log", drawn(0))
    pq.write_table(pa.table({"who": ["a"], "what": [1], "at": [1], "kind": ["a"]}), source / "x.parquet")
    with pytest.raises(UserError, match=r"the files' columns are of different types: .*who"):
        convert_histories([source], tmp_path / "out", options())
    pq.write_table(pa.table({"who": [1], "what": [1], "at": [float("nan")]}), tmp_path / "nan.parquet")
    with pytest.raises(UserError, match=r"column 'at' holds NaN, which is not a time"):
        convert_histories([tmp_path / "nan.parquet"], tmp_path / "out", options(columns=[]))
    for name in ("0.parquet", "x.parquet"):
        (source / name).unlink()
    with pytest.raises(UserError, match=r"^INPUT has no rows$"):
        convert_histories([source], tmp_path / "out", options())


def test_what_goes_before_has_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = drawn(1, "moment")
    parts = [[row for row in rows if (row["at"].minute > 0) == is_late] for is_late in (False, True)]
    first, second = (write(tmp_path / name, part) for name, part in zip("ab", parts, strict=True))

    def run(source: Path, out: str, *more: str) -> str:
        words = ["histories", str(source), "--out", str(tmp_path / out), "--user", "who", "--item", "what"]
        try:
            prepare([*words, "--time", "at", *more])
        except UserError as error:
            return str(error)
        return capsys.readouterr().err

    out = str(tmp_path / "_out")  # which is no part of the log
    run(first, "_out")
    assert "already holds prepared data; add --overwrite" in run(first, "_out")
    assert "recsys prepare: " not in run(first, "_out", "--overwrite")
    assert "written with --history 50, and this is 20; give the same" in run(
        second, "x", "--after", out, "--history", "20"
    )
    assert "was not written by `recsys prepare histories`" in run(second, "x", "--after", str(tmp_path / "a"))
    until = max(row["at"] for row in parts[0])
    border = write(tmp_path / "border", [parts[1][0] | {"at": until}])
    for source in (first, tmp_path, border):  # the second: both days
        told = run(source, "x", "--after", out)
        assert f"has rows up to at '{until.isoformat()}" in told and "come after: --where \"at > '2026-" in told
    remedy = told.partition('--where "')[2].partition('"')[0]
    assert "recsys prepare: " not in run(tmp_path, "x", "--after", out, "--where", remedy)
    assert read(tmp_path / "x")[0]["number"] == min(parts[1], key=lambda row: row["at"])["number"]
    texts = [row | {"who": f"u{row['who']}"} for row in parts[1]]
    told = run(write(tmp_path / "c", texts), "y", "--after", out)
    assert "--after" in told and "the files' columns are of different types" in told
    numbers = [row | {"at": 10**15} for row in parts[1]]
    told = run(write(tmp_path / "d", numbers), "y", "--after", out)
    assert f"ends at at '{until.isoformat()}" in told and "does not compare with 1000000000000000 of INPUT" in told
