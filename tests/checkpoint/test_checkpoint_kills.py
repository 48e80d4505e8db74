"""A process that is killed at any point of a save leaves a whole checkpoint, and the next save goes on from there."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kills import kill
from launch import forking
from small_checkpoints import checkpoints, loaded, names, state, tensors

from recsys.checkpoint import Checkpoints, Marker, Tensors, verify_checkpoint
from recsys.checkpoint import save as save_module
from recsys.checkpoint.files import HashedFile
from recsys.config import Device
from recsys.runtime.world import World, open_world


def _killed_save(folder: Path, prepare: Callable[[], None]) -> None:
    with open_world(Device.cpu) as world:
        saved = checkpoints(folder, world, keep=1)
        saved.save(tensors(1), state(1))
        prepare()
        saved.save(tensors(2), state(2))


def _kill_in_staging() -> None:
    Tensors.to_save = kill  # type: ignore[assignment,method-assign]


def _kill_in_a_shard() -> None:
    write = HashedFile.write

    def half(self: HashedFile, data: Any) -> None:
        write(self, bytes(data)[: len(data) // 2])
        self.flush()
        if self.num_bytes >= 400:
            kill()

    HashedFile.write = half  # type: ignore[method-assign]


def _kill_before_the_marker() -> None:
    Marker.write = kill  # type: ignore[method-assign]


def _kill_after_the_marker() -> None:
    write = Marker.write

    def write_and_kill(self: Marker, folder: Path) -> None:
        write(self, folder)
        kill()

    Marker.write = write_and_kill  # type: ignore[method-assign]


def _kill_after_the_renaming() -> None:
    Checkpoints._point_to = kill  # type: ignore[method-assign]


def _kill_in_pruning() -> None:
    def remove_half(folder: Path, **settings: Any) -> None:
        if folder.exists():
            (folder / "rank_0.bin").unlink()
            kill()

    save_module.shutil.rmtree = remove_half  # type: ignore[assignment]


@pytest.mark.parametrize(
    "prepare, newest",
    [
        (_kill_in_staging, 1),
        (_kill_in_a_shard, 1),
        (_kill_before_the_marker, 1),
        (_kill_after_the_marker, 1),
        (_kill_after_the_renaming, 2),
        (_kill_in_pruning, 2),
    ],
)
def test_a_kill_at_any_point_leaves_a_whole_checkpoint(
    prepare: Callable[[], None], newest: int, world: World, tmp_path: Path
) -> None:
    with forking() as context:
        process = context.Process(target=_killed_save, args=(tmp_path / "c", prepare))
        process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for path in (tmp_path / "c").glob("step-?????????"):
        verify_checkpoint(path, world)
    assert loaded(tmp_path / "c", world) == newest
    checkpoints(tmp_path / "c", world, keep=1).save(tensors(3), state(3))
    assert names(tmp_path / "c") == ["latest", "step-000000003"]
