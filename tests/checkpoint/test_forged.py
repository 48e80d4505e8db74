"""What was changed by hand, with right checksums, is refused in a sentence as well."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from small_checkpoints import checkpoints, loaded, names, state, tensors

from recsys.checkpoint import Marker, TrainState, export_table, parquet
from recsys.data.order import Position
from recsys.data.sources import find_files
from recsys.errors import UserError
from recsys.runtime.world import World


@pytest.mark.parametrize(
    "part, name, value",
    [
        ("state", "step", "many"),
        ("state", "step", -1),
        ("state", "epoch_rows", 3),
        ("state", "best_metric", []),
        ("position", "rows", None),
        ("position", "epoch", 1.5),
        ("marker", "scalars", []),
        ("marker", "world_size", True),
    ],
)
def test_the_marker_of_a_checkpoint(part: str, name: str, value: Any, tmp_path: Path) -> None:
    marker = Marker(TrainState(Position(0, 8, 0), step=1, best_metric=1), {}, {}, "Adam", {}, {}, 1)
    marker.write(tmp_path)
    assert Marker.read(tmp_path) == marker
    parts = {"state": marker.state, "position": marker.state.position, "marker": marker}
    forged = dataclasses.replace(parts[part], **{name: value})
    if part == "position":
        forged = dataclasses.replace(marker.state, position=forged)
    marker = forged if part == "marker" else dataclasses.replace(marker, state=forged)
    marker.write(tmp_path)
    with pytest.raises(UserError, match=rf"is corrupt: checkpoint\.json: {name} is "):
        Marker.read(tmp_path)


def test_the_name_of_a_data_file_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "good.parquet").touch()
    os.replace(tmp_path / "good.parquet", os.fsencode(tmp_path) + b"/\xff.parquet")
    with pytest.raises(UserError, match=r"'data\.train': the name of '.*\\udcff\.parquet' is not UTF-8"):
        find_files("data.train", str(tmp_path))


TABLE, STATE, OF_BIAS, OF_WEIGHT = (
    "tables/t",
    "table_optimizer/t/momentum1",
    "dense_optimizer/bias/",
    "dense_optimizer/weight/",
)
Edit = Callable[[dict[str, Any]], object]  # of what checkpoint.json says of tensors


def of(**values: Any) -> Edit:
    """Return an edit of what is said of the table; of the last of its places with their keys.

    A function makes the new value of the old.
    """

    def edit(entries: dict[str, Any]) -> None:
        for key, value in values.items():
            owner = entries[TABLE] if key in entries[TABLE] else entries[TABLE]["places"][-1]
            owner[key] = value(owner[key]) if callable(value) else value

    return edit


def without(key: str) -> Edit:
    return lambda entries: entries[TABLE].pop(key)


def renamed(new: dict[str, str]) -> Edit:
    """Return an edit that gives tensors other names."""

    def edit(entries: dict[str, Any]) -> None:
        other = {new.get(name, name): entry for name, entry in entries.items()}
        entries.clear()
        entries.update(other)

    return edit


def swapped(one: str, other: str) -> Edit:
    return renamed({one: other, other: one})


def another_border(entries: dict[str, Any]) -> None:
    """Let the last two places of the table be of other rows than they are."""
    *_, place, last = entries[TABLE]["places"]
    place["sizes"], last["offsets"], last["sizes"] = [5, 4], [35, 0], [15, 4]


COVER, NUMBERS, TYPE = "do not cover it", "is not a list of whole numbers", "there is no number type"
ALL, FILE = "is not all that lies in", "it names a file that the checkpoint does not have"
# Known before a tensor is read: a run goes on from the checkpoint before.
KNOWN_BEFORE: dict[str, tuple[Edit, str]] = {
    "longer": (of(size=[60, 4]), COVER),
    "shorter": (of(size=[40, 4]), COVER),
    "wider": (of(size=[50, 8]), COVER),
    "more dimensions": (of(size=[50, 4, 1]), COVER),
    "no dimensions": (of(size=[]), COVER),
    "size of text": (of(size="50"), NUMBERS),
    "size of fractions": (of(size=[50.0, 4.0]), NUMBERS),
    "no size": (of(size=None), NUMBERS),
    "size left out": (without("size"), "'size'"),
    "no places": (of(places=[]), COVER),
    "places left out": (without("places"), "'places'"),
    "places of text": (of(places="abc"), "is corrupt: checkpoint.json: "),
    "gap": (of(offsets=[41, 0]), COVER),
    "overlap": (of(offsets=[39, 0]), COVER),
    "twice": (of(places=lambda places: [*places, places[-1]]), COVER),
    "negative": (of(sizes=[-10, 4]), NUMBERS),
    "narrow": (of(sizes=[10, 2]), COVER),
    "sizes of one": (of(sizes=[40]), COVER),
    "huge": (of(size=[2**60, 4], sizes=[2**60 - 40, 4]), ALL),
    "no dtype": (of(dtype="float33"), TYPE),
    "dtype of something else": (of(dtype="load"), TYPE),
    "dtype of a number": (of(dtype=32), "is corrupt: checkpoint.json: "),
    "other dtype": (of(dtype="float16"), ALL),
    "border": (another_border, ALL),
    "short at the end": (of(size=[45, 4], sizes=[5, 4]), ALL),
    "start": (of(start=lambda start: start + 1), ALL),
    "negative start": (of(start=-1), NUMBERS),
    "far start": (of(start=10**12), ALL),
    "start of text": (of(start="0"), NUMBERS),
    "file": (of(file="checkpoint.json"), FILE),
    "folder": (of(file="../../x"), FILE),
    "no file": (of(file=None), FILE),
    "list of files": (of(file=[]), "is corrupt: checkpoint.json: "),
    "no table": (lambda entries: entries.pop(TABLE), ALL),
    "no tensors": (lambda entries: entries.clear(), ALL),
}
ALONE = "belongs to nothing else in it"
NO_STATE = "its optimizer state, random state or id counts cannot be read"
KNOWN_THEN: dict[str, tuple[Edit, str]] = {
    "dtype as large": (of(dtype="int32"), "train.init.convert_tables=true"),
    "table": (renamed({TABLE: "tables/u"}), ALONE),
    "table and state": (
        renamed({TABLE: "tables/u", STATE: "table_optimizer/u/momentum1"}),
        "does not have tables/t, which the config has",
    ),
    "state of the table": (renamed({STATE: "table_optimizer/t/x"}), "which the config has"),
    "weight": (renamed({"dense/bias": "dense/beas"}), ALONE),
    "kind": (renamed({"rng/0/torch": "desk/0/torch"}), ALONE),
    "rank": (renamed({"rng/0/torch": "rng/7/torch"}), ALONE),
    "generator": (renamed({"rng/0/torch": "rng/0/flame"}), NO_STATE),
    "generators": (swapped("rng/0/torch", "rng/0/numpy"), NO_STATE),
    "part of a state": (renamed({OF_BIAS + "exp_avg": OF_BIAS + "x"}), NO_STATE),
    "part of all": (renamed({of + "exp_avg": of + "x" for of in (OF_BIAS, OF_WEIGHT)}), NO_STATE),
    "states": (swapped(OF_BIAS + "exp_avg", OF_WEIGHT + "exp_avg"), NO_STATE),
    "step": (swapped(OF_BIAS + "exp_avg", OF_BIAS + "step"), NO_STATE),
}


def in_five(entries: dict[str, Any]) -> None:
    """Say of the table that it lies in five places, one behind the other, as it does."""
    (place,) = entries[TABLE]["places"]
    entries[TABLE]["places"] = [
        {**place, "start": place["start"] + row * 16, "offsets": [row, 0], "sizes": [10, 4]} for row in range(0, 50, 10)
    ]


def edit_marker(checkpoint: Path, edit: Edit) -> None:
    """Change what a marker says of tensors, and its checksum."""
    text = (checkpoint / "checkpoint.json").read_text()
    content = json.loads(text.partition("\n")[2])
    edit(content["tensors"])
    text = json.dumps(content)
    (checkpoint / "checkpoint.json").write_text(f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}\n")


@pytest.fixture(scope="module")
def good(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, whose table is in five places."""
    folder = tmp_path_factory.mktemp("good") / "checkpoints"
    for step in (1, 2):
        checkpoints(folder, world).save(tensors(step), state(step))
        edit_marker(folder / f"step-{step:09d}", in_five)
    assert loaded(folder, world) == 2
    return folder


def forged(good: Path, folder: Path, lie: Edit) -> Path:
    """Copy the checkpoints, and let the newer one's marker lie."""
    shutil.copytree(good, folder)
    newest = folder / names(good)[-1]
    edit_marker(newest, lie)
    return newest


@pytest.mark.parametrize("lie, said", KNOWN_BEFORE.values(), ids=KNOWN_BEFORE)
def test_places(
    lie: Edit, said: str, good: Path, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = forged(good, tmp_path / "checkpoints", lie)
    with pytest.raises(
        UserError, match=r"^checkpoint '.*' is corrupt: checkpoint\.json: [^\n]*; use another one$"
    ) as caught:
        export_table(newest, "t", tmp_path / "t.parquet")
    assert said in str(caught.value)
    assert loaded(newest.parent, world) == 1 and f"refused: {caught.value}" in caplog.text


@pytest.mark.parametrize("lie, said", KNOWN_THEN.values(), ids=KNOWN_THEN)
def test_places_of_other_tensors_than_there_are(lie: Edit, said: str, good: Path, world: World, tmp_path: Path) -> None:
    newest = forged(good, tmp_path / "checkpoints", lie)
    with pytest.raises(UserError, match=r"^checkpoint '[^\n]*$") as caught:
        loaded(newest.parent, world)
    assert said in str(caught.value)


def test_only_tables_are_overwritten(good: Path, tmp_path: Path) -> None:
    checkpoint, out, log = good / names(good)[-1], tmp_path / "t.parquet", tmp_path / "log.parquet"
    assert export_table(checkpoint, "t", out) == export_table(checkpoint, "t", out) == pq.read_metadata(out).num_rows
    pq.write_table(pa.table({"row": [1], "clicked": [0]}), log)
    before = log.read_bytes()
    with pytest.raises(
        UserError, match=f"^OUT: '{log}' exists and has no column 'vector', which such a file has; name"
    ):
        export_table(checkpoint, "t", log)
    assert log.read_bytes() == before


def test_tables_are_read_by_one_thread_beside_the_one_that_writes(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, read_rows, before = list[int](), parquet.read_rows, torch.get_num_threads()
    monkeypatch.setattr(parquet, "read_rows", lambda *of: threads.append(torch.get_num_threads()) or read_rows(*of))
    torch.set_num_threads(2)
    try:
        export_table(good / names(good)[-1], "t", tmp_path / "t.parquet")
        assert set(threads) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
