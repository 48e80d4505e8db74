"""What was changed by hand, with right checksums, is refused in a sentence as well."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from recsys.checkpoint import Marker, TrainState
from recsys.data.order import Position
from recsys.data.sources import find_files
from recsys.errors import UserError


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
    with pytest.raises(UserError, match=rf"is not whole: checkpoint\.json: {name} is "):
        Marker.read(tmp_path)


def test_the_name_of_a_data_file_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "good.parquet").touch()
    os.replace(tmp_path / "good.parquet", os.fsencode(tmp_path) + b"/\xff.parquet")
    with pytest.raises(UserError, match=r"'data\.train': the name of '.*\\udcff\.parquet' is not UTF-8"):
        find_files("data.train", str(tmp_path))
