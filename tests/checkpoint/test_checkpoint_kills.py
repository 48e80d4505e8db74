"""A process that is killed at any point of a save leaves a whole checkpoint, and the next save goes on from there."""

import signal
from pathlib import Path

import pytest
from kills import kill_at
from launch import forking
from small_checkpoints import checkpoints, loaded, names, state, tensors

from recsys.checkpoint import verify_checkpoint
from recsys.config import Device
from recsys.runtime.world import World, open_world


def _killed_save(folder: Path, point: str, number: int) -> None:
    with open_world(Device.cpu) as world:
        saved = checkpoints(folder, world, keep=1)
        saved.save(tensors(1), state(1))
        kill_at(point, (0,), number)
        saved.save(tensors(2), state(2))


@pytest.mark.parametrize(
    "point, number, newest",
    [
        ("staging", 1, 1),
        ("shard", 2, 1),
        ("before_marker", 1, 1),
        ("after_marker", 1, 1),
        ("after_renaming", 1, 2),
        ("pruning", 1, 2),
    ],
)
def test_a_kill_at_any_point_leaves_a_whole_checkpoint(
    point: str, number: int, newest: int, world: World, tmp_path: Path
) -> None:
    with forking() as context:
        process = context.Process(target=_killed_save, args=(tmp_path / "c", point, number))
        process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for path in (tmp_path / "c").glob("step-?????????"):
        verify_checkpoint(path, world)
    assert loaded(tmp_path / "c", world) == newest
    checkpoints(tmp_path / "c", world, keep=1).save(tensors(3), state(3))
    assert names(tmp_path / "c") == ["latest", "step-000000003"]
