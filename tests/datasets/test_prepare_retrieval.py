"""Logs of interactions as retrieval data: what is held out, histories, ids of any type, repeats, mistakes."""

import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.datasets.delimited import CsvOptions, convert_csv
from recsys.datasets.interactions import LogOptions, convert_log
from recsys.datasets.prepare import prepare
from recsys.errors import UserError

START = datetime.datetime(2026, 1, 1)


def read(folder: Path) -> list[dict[str, Any]]:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))]).to_pylist()


def log(folder: Path, rows: list[dict[str, Any]], files: int = 2) -> Path:
    folder.mkdir()
    for index in range(files):
        pq.write_table(pa.Table.from_pylist(rows[index::files]), folder / f"{index}.parquet")
    return folder


ROWS = [
    {"who": who, "what": what, "at": START + datetime.timedelta(hours=hour), "age": hour, "kind": kind}
    for hour, (who, what, kind) in enumerate(
        [
            ("ann", "a", ["x"]),
            ("bob", "b", []),
            ("ann", "b", []),
            ("ann", "a", ["y"]),  # again: the first counts, the features are the newest
            ("ann", "c", None),
            ("bob", "a", ["y", "z"]),
            ("ann", "d", ["w"]),
        ]
    )
]


def test_the_last_are_held_out_by_time(tmp_path: Path) -> None:
    options = LogOptions("who", "what", "at", ["age"], ["kind"])
    convert_log([log(tmp_path / "log", ROWS)], tmp_path / "out", options)
    train = sorted(read(tmp_path / "out/train"), key=lambda row: row["at"])
    assert [(row["who"], row["what"], row["history"]) for row in train] == [
        ("ann", "a", []),
        ("bob", "b", []),
        ("ann", "b", ["a"]),
        ("bob", "a", ["b"]),  # of bob nothing is held out: he has two items
    ]
    assert [(row["at"] - START).seconds // 3600 for row in train] == [0, 1, 2, 5]
    assert [row["age"] for row in train] == [6, 5, 6, 5]
    assert [row["kind"] for row in train] == [["y", "z"], [], [], ["y", "z"]]
    valid = {"who": "ann", "age": 6, "history": ["a", "b"], "targets": ["c"], "seen": ["a", "b"]}
    test = {"who": "ann", "age": 6, "history": ["a", "b", "c"], "targets": ["d"], "seen": ["a", "b", "c"]}
    assert read(tmp_path / "out/valid") == [valid] and read(tmp_path / "out/test") == [test]
    items = {row["what"]: row["kind"] for row in read(tmp_path / "out/items")}
    assert items == {"a": ["y", "z"], "b": [], "c": None, "d": ["w"]}
    users = [("ann", 6, ["a", "b", "c", "d"]), ("bob", 5, ["b", "a"])]
    assert read(tmp_path / "out/users") == [
        {"who": who, "age": age, "history": had, "seen": had} for who, age, had in users
    ]


def test_nothing_is_held_out(tmp_path: Path) -> None:
    options = LogOptions("who", "what", "at", ["age"], ["kind"], hold_out="none")
    convert_log([log(tmp_path / "log", ROWS)], tmp_path / "out", options)
    train = sorted(read(tmp_path / "out/train"), key=lambda row: row["at"])
    assert [(row["who"], row["what"], row["history"]) for row in train] == [
        *(("ann", "a", []), ("bob", "b", []), ("ann", "b", ["a"]), ("ann", "c", ["a", "b"])),
        *(("bob", "a", ["b"]), ("ann", "d", ["a", "b", "c"])),
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["items", "train", "users"]


def test_a_random_tenth_is_held_out_of_each_users(tmp_path: Path) -> None:
    rows = [{"user_id": user, "item_id": 1000 - item} for item in range(20) for user in range(3)]
    rows += [{"user_id": 99, "item_id": 3000 + item} for item in range(9)]
    convert_log([log(tmp_path / "log", rows, files=1)], tmp_path / "out", LogOptions(hold_out="random"))
    train, valid, test = (read(tmp_path / "out" / name) for name in ("train", "valid", "test"))
    assert len(train) == 3 * 16 + 9 and [row["user_id"] for row in valid] == [row["user_id"] for row in test] == [
        0,
        1,
        2,
    ]
    for user in range(3):
        mine = [row["item_id"] for row in train if row["user_id"] == user]
        assert len(valid[user]["targets"]) == len(test[user]["targets"]) == 2
        assert {*mine, *valid[user]["targets"], *test[user]["targets"]} == set(range(981, 1001))
        assert valid[user]["history"] == test[user]["history"] == valid[user]["seen"] == mine
        assert sorted(test[user]["seen"]) == sorted(mine + valid[user]["targets"])
        for row in train:
            if row["user_id"] == user:
                assert row["history"] == [item for item in mine if item != row["item_id"]]


def test_advice_on_rows_keeps_the_condition_of_where(tmp_path: Path) -> None:
    """It would replace what the user has given."""
    source, where = log(tmp_path / "log", [ROWS[0] | {"some": 1}, *ROWS[1:]], files=1), 'what != "a" or age == 1'
    with pytest.raises(UserError) as error:
        prepare(["retrieval", str(source), "--user", "some", "--item", "what", "--where", where, "--out", "out"])
    assert str(error.value).endswith(r'--where "(what != \"a\" or age == 1) and some is not None"')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            LogOptions("who", "wat"),
            "0.parquet has no column 'wat', only who, what, at, age, kind, some; did you mean 'what'?",
        ),
        (LogOptions("who", "what", "kind"), "column 'kind' is list<element: string>; a time is a number"),
        (LogOptions("kind", "what"), "column 'kind' is list<element: string>; an id is a whole number, a string or"),
        (
            LogOptions("who", "some"),
            "column 'some' holds 6 nulls; every row needs an id, so leave these out: --where \"some is not None\"",
        ),
        (
            LogOptions("who", "what", tokens=["age"]),
            "--tokens: 'age' is not a feature; name it in --item-features or --user-features too",
        ),
        (LogOptions("who", "what", "who"), "column 'who' is named twice"),
        (LogOptions("who", "what", hold_out="random"), "no user has 10 different items"),
        (LogOptions("who", "what", where="what != 'a'", train_rows="users"), "no user has 2 items in train, as many"),
        (
            LogOptions("who", "what", train_rows="windows", history=1),
            "--history 1 leaves one item of each list of --train-rows windows, and nothing that follows it; it must be",
        ),
        (LogOptions("who", "what", where="age > 9"), "--where: no row of INPUT matches 'age > 9'"),
    ],
)
def test_mistakes_are_told(options: LogOptions, message: str, tmp_path: Path) -> None:
    source = log(tmp_path / "log", [ROWS[0] | {"some": 1}, *ROWS[1:]], files=1)
    with pytest.raises(UserError) as error:
        convert_log([source], tmp_path / "out", options)
    assert message in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("written", ["05.11.2026 18:30", "2026-11-05 18:30"])
def test_times_of_a_csv_are_written_in_two_ways(written: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"at,then,who,what\n{written},5/11/2026,ann,tea\n")
    convert_csv([tmp_path / "a.csv"], tmp_path / "out", CsvOptions(time_format="%d.%m.%Y %H:%M"))
    assert read(tmp_path / "out") == [
        {"at": datetime.datetime(2026, 11, 5, 18, 30), "then": "5/11/2026", "who": "ann", "what": "tea"}
    ]
    with pytest.raises(
        UserError, match=r"column 'then' holds other texts than times .*`recsys prepare csv --time-format"
    ):
        convert_log([tmp_path / "out"], tmp_path / "data", LogOptions("who", "what", time="then"))


def test_ids_and_times_of_warehouses_and_of_pandas(tmp_path: Path) -> None:
    """Decimals and floats that are whole are integers; texts of times, as in the paths of partitions, are times."""
    numbers = {name: number for number, name in enumerate(("ann", "bob", *"abcd"))}
    rows = [row | {"who": numbers[row["who"]], "what": numbers[row["what"]]} for row in ROWS]
    options = LogOptions("who", "what", "at")
    convert_log([log(tmp_path / "log", rows)], tmp_path / "out", options)
    table = pa.Table.from_pylist(rows)
    for index, (kind, time) in enumerate(((pa.decimal128(20, 0), pa.string()), (pa.float64(), pa.timestamp("s")))):
        folder = tmp_path / f"log-{index}"
        folder.mkdir()
        columns = {
            "who": table["who"].cast(pa.float64()).cast(kind),
            "what": table["what"].cast(pa.float64()).cast(kind),
        }
        pq.write_table(pa.table(columns | {"at": table["at"].cast(time)}), folder / "a.parquet")
        convert_log([folder], tmp_path / f"out-{index}", options)
        for part in ("valid", "test", "items"):
            assert read(tmp_path / f"out-{index}" / part) == read(tmp_path / "out" / part)
    for wrong, message in ((1.5, r"column 'who': .*1\.5"), (2.0**60, "column 'who': ")):
        pq.write_table(pa.table({"who": [wrong], "what": [1]}), tmp_path / "log-0/a.parquet")
        with pytest.raises(UserError, match=message):
            convert_log([tmp_path / "log-0"], tmp_path / "wrong", LogOptions("who", "what"))


def test_other_files_and_none(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id\n1,2\n")
    (tmp_path / "empty").mkdir()
    for source, message in (("log.csv", "cannot be read as Parquet"), ("empty", r"^INPUT: .* no \*.parquet file")):
        with pytest.raises(UserError, match=message):
            convert_log([tmp_path / source], tmp_path / "out", LogOptions())


@pytest.mark.parametrize("hold_out", ["last", "random", "time", "none"])
@pytest.mark.parametrize("items", [pa.array([], pa.int64()), pa.array([[], []], pa.list_(pa.int64()))])
def test_a_log_without_items(items: pa.Array, hold_out: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"user_id": pa.array(range(len(items))), "item_id": items}), tmp_path / "log.parquet")
    with pytest.raises(UserError, match="INPUT holds no items"):
        convert_log([tmp_path / "log.parquet"], tmp_path / "out", LogOptions(hold_out=hold_out))


def test_a_split_that_is_there_is_kept(tmp_path: Path) -> None:
    """As a column, in words or numbers, and as files: the same data; an item of train is in no part after it."""
    words = ["train", "train", "train", "test", "test", "test", "valid"]  # ann: a, b | d | c; a again is seen
    rows = [row | {"part": word} for row, word in zip(ROWS, words, strict=True)]
    numbers = [row | {"part": ("train", "valid", "test").index(row["part"])} for row in rows]
    given: dict[str, Any] = {"user": "who", "item": "what", "time": "at"}
    convert_log([log(tmp_path / "words", rows)], tmp_path / "a", LogOptions(**given, split_column="part"))
    convert_log([log(tmp_path / "numbers", numbers)], tmp_path / "b", LogOptions(**given, split_column="part"))
    parts = {
        name: [log(tmp_path / name, [r for r in rows if r["part"] == name], files=1)]
        for name in ("train", "valid", "test")
    }
    convert_log(parts["train"], tmp_path / "c", LogOptions(**given, valid=parts["valid"], test=parts["test"]))
    for out in ("a", "b", "c"):
        found = {name: sorted(read(tmp_path / out / name), key=str) for name in ("train", "valid", "test")}
        assert [(row["who"], row["what"], row["history"]) for row in found["train"]] == [
            ("ann", "a", []),
            ("ann", "b", ["a"]),
            ("bob", "b", []),
        ]
        assert found["valid"] == [{"who": "ann", "history": ["a", "b"], "targets": ["d"], "seen": ["a", "b"]}]
        assert found["test"] == [
            {"who": "ann", "history": ["a", "b", "d"], "targets": ["c"], "seen": ["a", "b", "d"]},
            {"who": "bob", "history": ["b"], "targets": ["a"], "seen": ["b"]},
        ]


def test_a_split_in_the_middle_of_time_shows_train_rows_what_came_after(tmp_path: Path) -> None:
    rows = [{"user_id": 1, "item_id": item, "part": item == 5} for item in range(3, 9)]
    convert_log([log(tmp_path / "log", rows, 1)], tmp_path / "out", LogOptions(split_column="part"))
    assert {row["item_id"]: row["history"] for row in read(tmp_path / "out/train")}[3] == [4, 6, 7, 8]
    assert [row["targets"] for row in read(tmp_path / "out/test")] == [[5]] and not (tmp_path / "out/valid").exists()


@pytest.mark.parametrize(
    ("part", "message"),
    [("trian", "column 'part' holds trian; a split is train, valid and test, or 0, 1 and 2"), ("train", "train alone")],
)
def test_a_split_that_is_none(part: str, message: str, tmp_path: Path) -> None:
    source = log(tmp_path / "log", [row | {"part": part} for row in ROWS], files=1)
    with pytest.raises(UserError, match=message):
        convert_log([source], tmp_path / "out", LogOptions("who", "what", split_column="part"))


def test_only_some_rows_of_a_log(tmp_path: Path) -> None:
    source = log(tmp_path / "log", ROWS)
    given: dict[str, Any] = {"user": "who", "item": "what", "time": "at"}
    options = LogOptions(**given, where="age <= 4 and what != 'a' or what == 'd'")
    convert_log([source], tmp_path / "out", options)
    assert [row["targets"] for row in read(tmp_path / "out/test")] == [["d"]]  # of ann's b, c, d
    for where, message in (("aeg < 3", "no column 'aeg'.*did you mean 'age'"), ("age < 'x'", "^--where: column 'age'")):
        with pytest.raises(UserError, match=message):
            convert_log([source], tmp_path / "other", LogOptions(**given, where=where))


def test_lists_of_users_for_sequence_models(tmp_path: Path) -> None:
    """Repeats stay, the newest items are kept, and a user of one item has nothing to be found."""
    lists = {"ann": ["a", "b", "a", "c", "d", "e"], "bob": ["b", "c"], "eve": ["c"], "joe": []}
    rows = [{"who": who, "items": items} for who, items in lists.items()]
    options = LogOptions("who", "items", train_rows="users", history=3)
    convert_log([log(tmp_path / "log", rows, files=1)], tmp_path / "out", options)
    assert read(tmp_path / "out/train") == [
        {"who": "ann", "history": ["b", "a", "c"]},
        {"who": "bob", "history": ["b", "c"]},
    ]
    assert read(tmp_path / "out/valid") == [
        {"who": "ann", "history": ["b", "a", "c"], "targets": ["d"], "seen": ["a", "b", "a", "c"]}
    ]
    (test,) = read(tmp_path / "out/test")
    assert test["history"] == ["a", "c", "d"] and test["targets"] == ["e"]
    ann, bob, eve = read(tmp_path / "out/users")
    assert ann == {"who": "ann", "history": ["c", "d", "e"], "seen": lists["ann"]}
    assert (bob["seen"], eve["history"]) == (lists["bob"], ["c"])
    assert sorted(row["items"] for row in read(tmp_path / "out/items")) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("rows_of", ["users", "interactions"])
def test_targets_that_were_there_before_are_told(
    rows_of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(3)
    lists = {who: generator.integers(0, 6, 8).tolist() for who in "abcdefghijkl"}
    rows = [{"who": who, "items": items} for who, items in lists.items()]
    options = LogOptions("who", "items", train_rows=rows_of)
    convert_log([log(tmp_path / "log", rows, files=1)], tmp_path / "out", options)
    said = capsys.readouterr().err
    for name in ("valid", "test"):
        queries = read(tmp_path / "out" / name)
        again = sum(target in row["seen"] for row in queries for target in row["targets"])
        assert (f"note: {again} of {len(queries)} targets of {name} are items that" in said) == (rows_of == "users")
        assert (again > 0) == (rows_of == "users")
    repeated = sum(len(items) - len(set(items)) for items in lists.values())
    assert (f"note: {repeated} of 96 rows have an item" in said) == (rows_of == "interactions") and repeated


@pytest.mark.parametrize("history", [2, 3, 4, 100])
def test_windows_of_users_find_each_item_once(history: int, tmp_path: Path) -> None:
    """Of all items of train, each but a user's first comes after the one before it once; the newest window is full."""
    generator = np.random.default_rng(history)
    lists = {who: generator.permutation(20)[: generator.integers(3, 15)].tolist() for who in "abcdefgh"}
    rows = [{"who": who, "items": items} for who, items in lists.items()]
    options = LogOptions("who", "items", train_rows="windows", history=history)
    convert_log([log(tmp_path / "log", rows, files=1)], tmp_path / "out", options)
    found = read(tmp_path / "out/train")
    assert all(2 <= len(row["history"]) <= history for row in found)
    pairs = [(row["who"], *pair) for row in found for pair in pairwise(row["history"])]
    trained = {who: items[:-2] for who, items in lists.items()}
    assert pairs == [(who, *pair) for who in sorted(trained) for pair in pairwise(trained[who])]
    newest = {row["who"]: row["history"] for row in found}
    assert newest == {who: items[-history:] for who, items in trained.items() if len(items) > 1}


def test_conditions_hold_rows_out(tmp_path: Path) -> None:
    rows = [{"who": "ann", "what": i, "last": i == 4, "checked": i == 3} for i in range(5)]
    options = LogOptions("who", "what", train_rows="users", valid_where="checked", test_where="last == True")
    convert_log([log(tmp_path / "log", rows, files=1)], tmp_path / "out", options)
    assert [row["history"] for row in read(tmp_path / "out/train")] == [[0, 1, 2]]
    assert [(row["history"], row["targets"]) for row in read(tmp_path / "out/test")] == [([0, 1, 2, 3], [4])]
    both = LogOptions("who", "what", valid_where="checked", split_column="last")
    with pytest.raises(UserError, match="--valid-where and --test-where, --split-column, and --hold-out; give one"):
        convert_log([tmp_path / "log"], tmp_path / "out2", both)
    with pytest.raises(UserError, match=r"has no column .chekced., only who, what"):
        convert_log([tmp_path / "log"], tmp_path / "out2", LogOptions("who", "what", test_where="chekced"))


def test_the_last_tenths_of_all_rows_are_held_out_by_time(tmp_path: Path) -> None:
    rows = [{"who": f"u{i % 3}", "what": i, "at": START + datetime.timedelta(hours=min(i, 28))} for i in range(29)]
    rows += [{"who": "new", "what": 29, "at": rows[-1]["at"]}]  # at one time with the row before
    convert_log([log(tmp_path / "log", rows)], tmp_path / "out", LogOptions("who", "what", "at", hold_out="time"))
    train, valid, test = (read(tmp_path / "out" / part) for part in ("train", "valid", "test"))
    assert sorted(row["what"] for row in train) == [*range(24)]
    assert next(row["history"] for row in train if row["what"] == 9) == [0, 3, 6]
    assert {row["who"]: row["targets"] for row in valid} == {"u0": [24], "u1": [25], "u2": [26]}
    assert {row["who"]: row["targets"] for row in test} == {"u0": [27], "u1": [28], "new": [29]}
    seen = {row["who"]: row["seen"] for row in test}
    assert seen == {"u0": [*range(0, 25, 3)], "u1": [*range(1, 26, 3)], "new": []}
    few = log(tmp_path / "few", rows[:9])
    with pytest.raises(UserError, match="fewer than 10 rows, or all are of one time"):
        convert_log([few], tmp_path / "none", LogOptions("who", "what", "at", hold_out="time"))


def test_titles_of_items_are_lists_of_words(tmp_path: Path) -> None:
    rows = [{**row, "title": f"The {row['what'].upper()}-team"} for row in ROWS]
    logged = log(tmp_path / "log", rows)
    options = LogOptions("who", "what", "at", item_features=["title"], tokens=["title"])
    convert_log([logged], tmp_path / "out", options)
    assert {row["what"]: row["title"] for row in read(tmp_path / "out/items")}["c"] == ["c", "team"]
    for column in ("age", "kind", "what"):
        with pytest.raises(UserError, match=column):
            convert_log([logged], tmp_path / "no", LogOptions("who", "what", "at", ["age"], ["kind"], tokens=[column]))


def test_features_of_tables_with_a_row_for_each_id(tmp_path: Path) -> None:
    users, items = tmp_path / "users.parquet", tmp_path / "items"
    pq.write_table(pa.table({"who": pa.array(["zoe", "bob"], pa.large_string()), "city": ["Oslo", "Rome"]}), users)
    catalogue = [{"what": what, "price": price} for price, what in enumerate(["e", "d", "b", "a"])]
    options = LogOptions("who", "what", "at", ["city"], ["price"], users=[users], items=[log(items, catalogue)])
    convert_log([log(tmp_path / "log", ROWS)], tmp_path / "out", options)
    prices = {"a": 3, "b": 2, "c": None, "d": 1, "e": 0}  # of c the catalogue has no row, and e nobody had
    assert {row["what"]: row["price"] for row in read(tmp_path / "out/items")} == prices
    train = read(tmp_path / "out/train")
    assert all(row["price"] == prices[row["what"]] for row in train)
    assert {row["who"]: row["city"] for row in train + read(tmp_path / "out/test")} == {"ann": None, "bob": "Rome"}
    assert [row["who"] for row in read(tmp_path / "out/users")] == ["ann", "bob"]  # zoe has nothing to go by


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b", "a"], r"--items: column 'what' holds a in 2 rows"),
        ([1, 2, 3], "'what' is string in the log and int64 in --items"),
        (["a", None, "b"], "^--items: column 'what' holds 1 null, and every row needs an id; write it without them"),
    ],
)
def test_a_table_of_items_that_is_none(ids: list[Any], message: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"what": ids, "price": [1, 2, 3]}), tmp_path / "items.parquet")
    options = LogOptions("who", "what", "at", [], ["price"], items=[tmp_path / "items.parquet"])
    with pytest.raises(UserError, match=message):
        convert_log([log(tmp_path / "log", ROWS)], tmp_path / "out", options)
