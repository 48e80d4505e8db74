"""What was changed by hand, with right checksums, is refused in a sentence as well."""

import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import checkpoints, loaded, names, state, tensors
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from recsys.checkpoint import Marker, TrainState, export_table
from recsys.checkpoint import pieces as pieces_module
from recsys.checkpoint.files import write_file
from recsys.config import Device
from recsys.data.order import Position
from recsys.data.sources import find_files
from recsys.errors import UserError
from recsys.runtime.world import World, open_world


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
LAST = MetadataIndex(TABLE, (40, 0))  # of the table's chunks
Edit = Callable[[Metadata], object]


def of(**values: Any) -> Edit:
    """Return an edit of what is said of the table; of its last chunk with `offsets` and `sizes`."""

    def edit(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata[TABLE]
        for key, value in values.items():
            owner = {"dtype": entry.properties, "size": entry, "chunks": entry}.get(key) or entry.chunks[-1]
            setattr(owner, key, value)

    return edit


def at(**values: Any) -> Edit:
    """Return an edit of where the last chunk of the table lies; a function makes the new value of the old."""

    def edit(metadata: Metadata) -> None:
        place = metadata.storage_data[LAST]
        for key, value in values.items():
            setattr(place, key, value(getattr(place, key)) if callable(value) else value)

    return edit


def renamed(new: dict[str, str]) -> Edit:
    """Return an edit that gives tensors other names."""

    def edit(metadata: Metadata) -> None:
        entries, places = metadata.state_dict_metadata.items(), metadata.storage_data.items()
        metadata.state_dict_metadata = {new.get(name, name): entry for name, entry in entries}
        metadata.storage_data = {MetadataIndex(new.get(i.fqn, i.fqn), i.offset): place for i, place in places}

    return edit


def swapped(one: str, other: str) -> Edit:
    return renamed({one: other, other: one})


def twice(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata[TABLE].chunks  # type: ignore[union-attr]
    chunks.append(chunks[-1])


def without(metadata: Metadata) -> None:
    """Say nothing of the table."""
    del metadata.state_dict_metadata[TABLE]
    metadata.storage_data = {i: place for i, place in metadata.storage_data.items() if i.fqn != TABLE}


def another_border(metadata: Metadata) -> None:
    """Let the last two chunks of the table be of other rows than they are."""
    *_, chunk, last = metadata.state_dict_metadata[TABLE].chunks  # type: ignore[union-attr]
    chunk.sizes, last.offsets, last.sizes = torch.Size([5, 4]), torch.Size([35, 0]), torch.Size([15, 4])
    places = metadata.storage_data
    places[MetadataIndex(TABLE, (35, 0))] = places.pop(LAST)


COVER, PLACE, LARGER = "do not cover it", "has no place of its own", "is larger than its place"
ALL, FILE = "is not all that lies in", "it names a file that the checkpoint does not have"
# Known before a tensor is read: a run goes on from the checkpoint before.
KNOWN_BEFORE: dict[str, tuple[Edit, str]] = {
    "longer": (of(size=torch.Size([60, 4])), COVER),
    "shorter": (of(size=torch.Size([40, 4])), COVER),
    "wider": (of(size=torch.Size([50, 8])), COVER),
    "more dimensions": (of(size=torch.Size([50, 4, 1])), COVER),
    "no dimensions": (of(size=torch.Size([])), COVER),
    "size of text": (of(size="50"), COVER),
    "size of fractions": (of(size=[50.0, 4.0]), COVER),
    "no size": (of(size=None), "is corrupt: .metadata: "),
    "no chunks": (of(chunks=[]), COVER),
    "chunks of text": (of(chunks="abc"), "is corrupt: .metadata: "),
    "gap": (of(offsets=torch.Size([41, 0])), COVER),
    "overlap": (of(offsets=torch.Size([39, 0])), COVER),
    "twice": (twice, COVER),
    "negative": (of(sizes=torch.Size([-10, 4])), COVER),
    "narrow": (of(sizes=torch.Size([10, 2])), COVER),
    "huge": (of(size=torch.Size([2**60, 4]), sizes=torch.Size([2**60 - 40, 4])), LARGER),
    "dtype of text": (of(dtype="float32"), COVER),
    "offset": (at(offset=lambda offset: offset + 1), ALL),
    "negative offset": (at(offset=-1), LARGER),
    "far offset": (at(offset=10**12), ALL),
    "offset of text": (at(offset="0"), LARGER),
    "no length": (at(length=0), LARGER),
    "length": (at(length=lambda length: length - 64), ALL),
    "file": (at(relative_path="checkpoint.json"), FILE),
    "folder": (at(relative_path="../../x"), FILE),
    "transform": (at(transform_descriptors=["zstd"]), PLACE),
    "no table": (without, ALL),
    "no entry": (lambda metadata: metadata.state_dict_metadata.pop(TABLE), ALL),
    "no place": (lambda metadata: metadata.storage_data.pop(LAST), PLACE),
    "no entries": (lambda metadata: metadata.state_dict_metadata.clear(), ALL),
    "no places": (lambda metadata: metadata.storage_data.clear(), PLACE),
}
STORED, ALONE = "__0_0.distcp does not have tables/t as .metadata says", "of nothing else in it"
NO_STATE = "its state of the optimizer, of random numbers or of counts of ids is none"
KNOWN_THEN: dict[str, tuple[Edit, str]] = {
    "short at the end": (of(size=torch.Size([45, 4]), sizes=torch.Size([5, 4])), "train.init.resize_tables=true"),
    "border": (another_border, STORED),
    "dtype": (of(dtype=torch.float16), "train.init.convert_tables=true"),
    "dtype as large": (of(dtype=torch.int32), "train.init.convert_tables=true"),
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


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world(Device.cpu) as opened:
        yield opened


@pytest.fixture(scope="module")
def good(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, whose table is in five chunks."""
    folder = tmp_path_factory.mktemp("good") / "checkpoints"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "CHUNK_BYTES", 160)
        for step in (1, 2):
            checkpoints(folder, world).save(tensors(step), state(step))
    return folder


def forged(good: Path, folder: Path, lie: Edit) -> Path:
    """Copy the checkpoints, and let the newer one's `.metadata` lie, with a marker that is right about it."""
    shutil.copytree(good, folder)
    newest = folder / names(good)[-1]
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    lie(metadata)
    marker = Marker.read(newest)
    marker.files[".metadata"] = write_file(newest / ".metadata", pickle.dumps(metadata))
    marker.write(newest)
    return newest


@pytest.mark.parametrize("lie, said", KNOWN_BEFORE.values(), ids=KNOWN_BEFORE)
def test_metadata(
    lie: Edit, said: str, good: Path, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = forged(good, tmp_path / "checkpoints", lie)
    with pytest.raises(
        UserError, match=r"^checkpoint '.*' is corrupt: \.metadata: [^\n]*; take another one$"
    ) as caught:
        export_table(newest, "t", tmp_path / "t.parquet")
    assert said in str(caught.value)
    assert loaded(newest.parent, world) == 1 and f"refused: {caught.value}" in caplog.text


@pytest.mark.parametrize("lie, said", KNOWN_THEN.values(), ids=KNOWN_THEN)
def test_metadata_of_other_tensors_than_there_are(
    lie: Edit, said: str, good: Path, world: World, tmp_path: Path
) -> None:
    newest = forged(good, tmp_path / "checkpoints", lie)
    with pytest.raises(UserError, match=r"^checkpoint '[^\n]*$") as caught:
        loaded(newest.parent, world)
    assert said in str(caught.value)
    if said == STORED or "train.init." in said:  # it is the table that is other than what a run would have
        with pytest.raises(UserError, match=STORED):
            export_table(newest, "t", tmp_path / "t.parquet")
