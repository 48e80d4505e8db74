"""`recsys inspect`: what the columns of a log hold, and the config that is written for them."""

import re
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyarrow import fs

from recsys.config import load_config
from recsys.data import storage
from recsys.datasets.inspect import main
from recsys.datasets.leaks import auc_alone
from recsys.datasets.logs import LogFiles
from recsys.datasets.prepare import prepare
from recsys.datasets.survey import survey
from recsys.errors import UserError
from recsys.runtime import live
from recsys.runtime.arguments import Parser

ROWS = 2000


def inspect(folder: Path, *words: str) -> dict[str, Any]:
    """Write a config for a log, load it, and return what it says."""
    out = folder / "my.yaml"
    assert main(Parser("recsys inspect"), [*words, "--out", str(out)]) == 0
    load_config(out)
    return yaml.safe_load(out.read_text())


def a_log() -> dict[str, pa.Array]:
    draw = np.random.default_rng(0)
    user, item = draw.integers(1, 300, ROWS), draw.integers(0, 100, ROWS)
    rating = draw.integers(1, 6, ROWS)
    start = datetime(2026, 11, 1, tzinfo=timezone.utc)
    os = [{"os": f"os{i % 3}", "age": int(i % 70)} for i in user]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(draw.normal(size=8 * ROWS), pa.float32()), 8)
    return {
        "user_id": pa.array(user),
        "item_id": pa.array([f"sku {i}" for i in item]),
        "history": pa.array([[f"sku {i}" for i in draw.integers(0, 100, n % 5)] for n in range(ROWS)]),
        "long": pa.array([draw.integers(0, 9, n % 150).tolist() for n in range(ROWS)]),
        "price": pa.array(draw.gamma(2, 50, ROWS)),
        "margin": pa.array(draw.normal(0, 50, ROWS), mask=draw.random(ROWS) < 0.1),
        "share": pa.array(draw.random(ROWS), pa.float32()),
        "tags": pa.array(["|".join(f"t{t}" for t in draw.integers(0, 9, n % 4)) or None for n in range(ROWS)]),
        "row_weight": pa.array(draw.random(ROWS)),
        "cost": pa.array([Decimal(int(i)).scaleb(-2) for i in draw.integers(0, 99999, ROWS)]),
        "views": pa.array(draw.lognormal(3, 1.5, ROWS).astype(int)),
        "weekday": pa.array(draw.integers(0, 7, ROWS)),
        "store": pa.array(draw.integers(0, 9, ROWS).astype(float), mask=draw.random(ROWS) < 0.1),
        "is new": pa.array(draw.random(ROWS) < 0.5),
        "device": pa.array(os),
        "text": vectors,
        "at": pa.array([start + timedelta(minutes=i) for i in range(ROWS)]),
        "rating": pa.array(rating),
        "clicked": pa.array((rating >= 4).astype(np.int8)),
        "bought": pa.array(draw.integers(0, 2, ROWS)),
        "event": pa.array([f"{i:032x}" for i in range(ROWS)]),
        "always": pa.array(["x"] * ROWS),
        "never": pa.nulls(ROWS),
        "broken": pa.array(np.where(draw.random(ROWS) < 0.1, np.nan, 1.5)),
        "ragged": pa.array([draw.normal(size=n % 4).tolist() for n in range(ROWS)]),
    }


def test_a_config_has_what_each_column_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table(a_log())
    (tmp_path / "logs").mkdir()
    pq.write_table(table.slice(0, 1200), tmp_path / "logs/a.parquet", row_group_size=500)
    pq.write_table(table.slice(1200), tmp_path / "logs/b.parquet")
    found = inspect(tmp_path, str(tmp_path / "logs"), "--label", "clicked")
    assert found["features"] == {
        "user_id": {"table": "user"},
        "item_id": {"table": "item"},
        "history": {"table": "item", "max_length": 4},
        "long": {"table": "long", "max_length": 100},
        "price": {"type": "float", "log1p": True},
        "margin": {"type": "float", "standardise": True},
        "share": {"type": "float"},
        "cost": {"type": "float", "log1p": True},
        "views": {"type": "float", "log1p": True},
        "weekday": {"table": "weekday"},
        "store": {"table": "store"},
        "is_new": {"type": "float", "column": "is new"},
        "device_os": {"column": "device.os", "table": "device_os"},
        "device_age": {"column": "device.age", "table": "device_age"},
        "text": {"type": "float", "dim": 8},
        "tags": {"table": "tags", "separator": "|", "max_length": 3},
    }
    assert found["tables"]["item"] == {"num_embeddings": 1000, "embedding_dim": 16, "pooling": "mean"}
    cut = "2026-11-02 06:00:00"  # nine tenths of 2,000 minutes
    assert found["data"]["filter"] == {"train": f"at < '{cut}'", "valid": f"at >= '{cut}'"}
    assert found["data"]["label_column"] == "clicked"
    text, printed = (tmp_path / "my.yaml").read_text(), capsys.readouterr().out
    for name, why in (
        ("rating", "it tells the label"),
        ("bought", "another label"),
        ("event", "hardly a value"),
        ("row_weight", "is it how much a row counts"),
    ):
        assert f"  # {name}: {why}" in text
    for name, why in (("always", "one value"), ("never", "no values"), ("broken", "NaN"), ("ragged", "as many as")):
        assert f"  # {name}: " in text and why in text.partition(f"# {name}: ")[2].partition("\n")[0]
    assert '  tags: {table: tags, separator: "|", max_length: 3} # 9 ids\n' in text
    assert found["tables"]["tags"]["pooling"] == "mean"
    (margin,) = (line for line in printed.splitlines() if line.startswith("margin"))
    assert margin.split()[1:4] == [
        "double",
        f"{table['margin'].null_count / ROWS:.2%}",
        f"{ROWS - table['margin'].null_count:,}",
    ]


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ([], {"label_column": "clicked"}),
        (["--label", "rating >= 4"], {"labels": {"label": "rating >= 4"}}),
        (["--label", "rating"], {"labels": {"label": {"column": "rating", "loss": "squared"}}}),
        (["--label", "tip"], {"labels": {"label": {"column": "tip", "nulls": "unknown"}}}),
        (["--label", "tip > 0"], {"labels": {"label": {"expression": "tip > 0", "nulls": "unknown"}}}),
    ],
)
def test_the_label(tmp_path: Path, words: list[str], data: dict[str, Any]) -> None:
    log = {name: values for name, values in a_log().items() if name in ("user_id", "item_id", "rating", "clicked")}
    log["tip"] = pa.array(np.arange(ROWS) % 2, mask=np.arange(ROWS) % 10 == 0)
    pq.write_table(pa.table(log), tmp_path / "a.parquet")
    found = inspect(tmp_path, str(tmp_path / "a.parquet"), *words)
    assert found["data"] | data == found["data"]
    assert ("rating" in found["features"]) == (words[1:] in (["tip"], ["tip > 0"]))
    drawn = {"train": "not sampled(0.1, 1)", "valid": "sampled(0.1, 1)"}
    assert found["data"]["filter"] == drawn


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "not clear: one, two hold 0 and 1; .*prepare retrieval"),
        (["--label", "tow"], "--label.*'tow'"),
        (["--label", "one >= 1 and tow == 2"], "no column 'tow', only .*two"),
        (["--label", "name"], "name == 'buy'"),
        (["--label", "one =="], "--label"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, words: list[str], says: str) -> None:
    flags = pa.array([0, 1] * 10)
    pq.write_table(pa.table({"one": flags, "two": flags, "name": ["a", "b"] * 10}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=says):
        inspect(tmp_path, str(tmp_path), *words)


@pytest.mark.parametrize(
    ("columns", "words", "says"),
    [
        ({}, [], "there are no rows in"),
        ({"of": pa.array([[("a", 1)]] * 5, pa.map_(pa.string(), pa.int64()))}, [], "not clear: none hold 0 and 1"),
        ({"of": pa.array([[("a", 1)]] * 5, pa.map_(pa.string(), pa.int64()))}, ["--label", "one"], "only of"),
    ],
)
def test_a_log_without_a_column_that_is_read_is_told(
    columns: dict[str, pa.Array], words: list[str], says: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=says):
        inspect(tmp_path, str(tmp_path), *words)


def test_folders_that_prepare_writes_are_taken_as_they_are(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    item = pa.array([f"i{n}" for n in draw.integers(0, 30, 500)])
    log = {"user": pa.array(draw.integers(0, 50, 500)), "item": item, "kind": pa.array(draw.integers(0, 5, 500))}
    log["history"] = pa.array([[f"i{n}" for n in draw.integers(0, 30, 4)] for _ in range(500)])
    for name, columns in {"train": list(log), "valid": ["user", "history"], "items": ["item", "kind"]}.items():
        (tmp_path / "shop" / name).mkdir(parents=True)
        pq.write_table(pa.table(log).select(columns), tmp_path / "shop" / name / "a.parquet")
    found = inspect(tmp_path, str(tmp_path / "shop"))
    assert found["data"] == {role: str(tmp_path / "shop" / role) for role in ("train", "valid", "items")}
    (tmp_path / "my.yaml").unlink()
    assert inspect(tmp_path, f"{tmp_path}/shop/train/") == found  # its neighbours go with it
    model = found["model"]
    assert model["name"] == "two_tower" and model["item_id"] == "item"
    assert (model["user_features"], model["item_features"]) == (["user", "history"], ["item", "kind"])
    assert found["features"]["history"]["table"] == "item"
    assert found["tables"]["user"]["mapping"] == "vocabulary"
    with pytest.raises(UserError, match=r"my\.yaml' already exists"):
        inspect(tmp_path, str(tmp_path / "shop"))


def test_a_folder_of_lists_of_items_gets_sasrec(tmp_path: Path) -> None:
    log = {"user": np.arange(400) % 40, "the track": np.arange(400) * 7 % 60, "t": np.arange(400)}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    words = ["--user", "user", "--item", "the track", "--time", "t", "--train-rows", "users", "--history", "201"]
    prepare(["retrieval", str(tmp_path / "log.parquet"), *words, "--neighbours", "3", "--out", str(tmp_path / "lists")])
    found = inspect(tmp_path, str(tmp_path / "lists"))
    assert found["data"]["items"] == str(tmp_path / "lists/items")
    assert found["features"] == {
        "history": {"table": "item", "max_length": 8},
        "item": {"table": "item", "column": "the track"},
    }
    assert (found["model"]["name"], found["model"]["max_length"]) == ("sasrec", 7)


def test_ids_of_a_few_rows_and_columns_that_say_much_of_the_label_are_told(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    label = draw.integers(0, 2, ROWS)
    log = {"session_id": np.arange(ROWS) // 5, "user": draw.integers(0, 99, ROWS), "clicked": label.astype(np.int8)}
    log["skipped"] = (label == 0) & (draw.random(ROWS) < 0.8)  # AUC .9
    log["shift"] = log["user"] % 3
    log["position"], log["duration_ms"] = draw.integers(1, 6, ROWS), draw.integers(90_000, 400_000, ROWS)
    pq.write_table(pa.table(log), tmp_path / "a.parquet")
    found = inspect(tmp_path, str(tmp_path / "a.parquet"), "--label", "clicked")
    assert set(found["features"]) == {"user", "skipped", "shift", "position", "duration_ms"}
    assert found["features"]["duration_ms"] == {"type": "float", "log1p": True}
    text = (tmp_path / "my.yaml").read_text()
    assert "  # session_id: an id of a few rows" in text
    assert re.search(r"\n  skipped: {type: float} # it says much of the label \(AUC 0\.(89|90|91)", text)
    assert "  shift: {table: shift} # 3 ids\n" in text
    assert "  position: {table: position} # 5 ids; rows to be scored have no place in a list yet? hidden: 0.1" in text


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        (["Action|Comedy", "Drama", "Action|Drama|Comedy", ""], "|"),
        (["Action; Comedy", "Drama", "Action; Drama; Comedy", None], ";"),
        (["12,57,3", "3,12", "57", ""], ","),
        (["Home > Garden", "Home > Kitchen & Bath > Garden", "Home", ""], " > "),
        (["red,blue", "red", "blue,green,red", "green"], ","),
        (["12 55 13", "55", "12 13", ""], " "),
        (["N55189 N42782", "N42782", "N34694 N55189  N42782", None], " "),
        (["Apollo 13", "Toy Story 2", "2001", "Heat"] * 2, None),
        (["12 Monkeys", "48 Hours", "101 Dalmatians", "300"] * 2, None),
        (["cheap flights", "flights paris", "cheap hotel paris", "hotel"], None),
        ([f"0{30 + i % 9} {i * 37 + 100} {i * 91}"[: 9 + i % 5] for i in range(100)], None),  # telephones
        (["2026-11-05 18:30", "2026-11-06 07:15", "2026-11-05 18:31", ""], None),
        (["12.5 3.1", "7.2", "3.1 12.5 1.0", "7.2"], None),
        (["Main St 12", "Main St 7", "High St 12", "12 Oak Ave"], None),
        (["google|5f7c", "google|81aa", "mail|22", "mail|7"], None),  # as many parts in each
        (["1,50", "1,234,567", "20", "3,75"], None),
        (["48.1,11.5", "52.5,13.4", "1.2,3.4,5.6", "48.1,11.5"], None),
        (["[1,2]", "[3]", "[1,2,3]", "[2]"], None),
        (["Mozilla/5.0 (X11; Linux)", "Mozilla/5.0 (X11; Linux; U)", "curl", "lynx"], None),
        (["one, two, and three", "two", "one, four", "three"], None),
        ([f"a{i}|b{i}|c{i}"[: 5 + i % 7] for i in range(100)], None),  # hardly an id is there twice
    ],
)
def test_lists_in_texts(texts: list[str | None], separator: str | None, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": texts * (5 if len(texts) < 10 else 1)}), tmp_path / "1.parquet")
    column = survey(LogFiles("DATA", [tmp_path]))["x"]
    assert (column.separator, column.is_list) == (separator, separator is not None)
    if separator is not None:
        assert column.num_distinct == 3 and len(column.lengths) == 4


def test_quantities_by_their_names_are_numbers(tmp_path: Path) -> None:
    """As `ms_played`, whose values hardly occur twice; their spread alone tells them from ids only if it is wide."""
    draw = np.random.default_rng(0)
    numbers = ["ms_played", "itemPrice", "watch_time", "num_words", "days_since_signup"]
    ids = ["price_code", "account_number", "track"]
    log = {name: draw.integers(1000, 3000, ROWS) for name in numbers + ids}
    few = draw.integers(30, 60, ROWS)
    tree = pa.array([("Home > Garden", "Home > Bath", "Toys > Cars")[n % 3] for n in range(ROWS)])
    log |= {"ms_played": draw.integers(1000, 10**6, ROWS), "size": few, "label": draw.integers(0, 2, ROWS)}
    pq.write_table(pa.table(log | {"category": tree}), tmp_path / "a.parquet")
    features = inspect(tmp_path, str(tmp_path / "a.parquet"))["features"]
    assert {name: features[name] for name in numbers} == {name: {"type": "float", "log1p": True} for name in numbers}
    assert all("table" in features[name] for name in (*ids, "size"))
    # A tree has as many levels in each row, but nobody puts " > " into an id.
    assert features["category"] == {"table": "category", "separator": " > ", "max_length": 2}


def test_numbers_in_texts_share_a_table_with_the_same_integers(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    history = [",".join(map(str, draw.integers(10, 60, n % 5))) for n in range(500)]
    log = {"item": draw.integers(10, 60, 500), "history": history, "label": draw.integers(0, 2, 500)}
    pq.write_table(pa.table(log), tmp_path / "a.parquet")
    found = inspect(tmp_path, str(tmp_path / "a.parquet"))["features"]
    table = found["item"]["table"]
    assert found["history"] == {"table": table, "separator": ",", "integers": True, "max_length": 4}
    for items in (draw.integers(500, 600, 500), [f"{item}" for item in log["item"]]):
        pq.write_table(pa.table(log | {"item": items}), tmp_path / "a.parquet")
        (tmp_path / "my.yaml").unlink()
        found = inspect(tmp_path, str(tmp_path / "a.parquet"))["features"]
        table = "history" if isinstance(items, np.ndarray) else found["item"]["table"]
        assert found["history"] == {"table": table, "separator": ",", "max_length": 4}
    assert "# 50 ids; texts of digits, unless integers: true makes" in (tmp_path / "my.yaml").read_text()


def test_files_without_a_column_and_of_other_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1, 2], pa.int32()), "b": ["x", "x"], "c": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": pa.array([2**40]), "c": ["z"]}), tmp_path / "2.parquet")
    columns = survey(LogFiles("DATA", [tmp_path]))
    assert (columns["a"].dtype, columns["a"].num_distinct, columns["a"].greatest) == (pa.int64(), 3, 2**40)
    assert (columns["b"].num_rows, columns["b"].num_nulls) == (3, 1)
    assert columns["c"].problem == "it is int64 and string, by file"
    pq.write_table(pa.table({"a": [1, 2, 2], "the label": [0, 1, 0]}), tmp_path / "2.parquet")
    data = inspect(tmp_path, str(tmp_path), "--label", "the label")["data"]
    assert data["optional_columns"] == ["b", "the label"]  # not c, which is left out


def test_a_column_that_is_a_struct_in_other_files_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [{"b": 1}]}), tmp_path / "2.parquet")
    columns = survey(LogFiles("DATA", [tmp_path]))
    assert columns["a"].problem == "it is int64 and struct<b: int64>, by file"
    assert (columns["a.b"].greatest, columns["a.b"].num_nulls, columns["a.b"].is_in_all) == (1, 2, False)


def test_the_last_tenth_is_of_rows_whatever_row_groups_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsys.datasets.survey._MOST_TIMES", 1 << 10)
    times = pa.array(range(30_000), pa.timestamp("us"))
    pq.write_table(pa.table({"ts": times[:20_000]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"ts": times[20_000:]}), tmp_path / "2.parquet", row_group_size=50)
    column = survey(LogFiles("DATA", [tmp_path]))["ts"]
    assert abs((column.time_after(0.9) - datetime(1970, 1, 1)) / timedelta(microseconds=1) - 27_000) < 100
    assert sum(map(len, column._times)) <= 2 << 10


def test_a_log_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bucket/day=3").mkdir(parents=True)
    pq.write_table(pa.table({"a": [1, 2], "label": [0, 1]}), tmp_path / "bucket/day=3/a.parquet")
    here = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr(storage, "filesystem_of", lambda root, retries: (here, "bucket"))
    columns = survey(LogFiles("DATA", ["s3://bucket"]))
    assert {name: column.greatest for name, column in columns.items()} == {"a": 2, "label": 1, "day": 3}


def test_many_distinct_values_are_estimated(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 300_000, 500_000)
    pq.write_table(pa.table({"a": numbers, "b": numbers // 2}), tmp_path / "a.parquet", row_group_size=100_000)
    columns = survey(LogFiles("DATA", [tmp_path]))
    for name, values in (("a", numbers), ("b", numbers // 2)):
        assert columns[name].num_distinct == pytest.approx(len(np.unique(values)), rel=0.02)
    shared = len(np.intersect1d(numbers, numbers // 2)) / len(np.union1d(numbers, numbers // 2))
    assert columns["a"].likeness(columns["b"]) == pytest.approx(shared, abs=0.02)


def test_auc_alone() -> None:
    draw = np.random.default_rng(1)
    positive = draw.random(20_000) < 0.3
    noise = draw.normal(size=20_000)
    told = pa.array(np.where(positive, noise, np.nan), mask=~positive)  # null where it is not
    assert auc_alone(told, positive) == pytest.approx(1, abs=1e-3)
    assert auc_alone(pa.array(noise + positive), positive) == pytest.approx(0.76, abs=0.02)  # that of a shift by 1
    assert auc_alone(pa.array(noise), positive) == pytest.approx(0.5, abs=0.02)
    ids = pa.array([f"{n}" for n in range(20_000)])
    assert auc_alone(ids, positive) == pytest.approx(0.5, abs=0.02)  # ids that are there once tell nothing
    assert auc_alone(ids, np.ones(20_000, bool)) == 0.5


def test_reading_and_writing_for_long_show_how_far_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_AFTER_S", 0.001)
    monkeypatch.setattr(live.logger, "level", 0)  # another test may have opened a log in this process
    prepare(["synthetic", "--out", f"{tmp_path}/log", "--rows", "20000", "--users", "500", "--items", "50"])
    assert f"writing {tmp_path}/log, 0 s so far\n" in capfd.readouterr().err
    inspect(tmp_path, f"{tmp_path}/log", "--label", "label")
    assert re.search(r"^reading the log: \d of \d row groups \(", capfd.readouterr().err, re.MULTILINE)
