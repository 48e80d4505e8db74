"""A checkpoint on disk: damage is noticed, what interrupts a save leaves the one before it, nothing is executed."""

import errno
import gc
import os
import pickle
import re
import shutil
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_checkpoints import checkpoints, loaded, names, state, tensors

from recsys.checkpoint import Marker, find_checkpoint, load_tensors, verify_checkpoint
from recsys.checkpoint import files as files_module
from recsys.checkpoint import save as save_module
from recsys.checkpoint import state as state_module
from recsys.checkpoint.files import HashedFile, write_file
from recsys.errors import UserError
from recsys.ids import IdStatistics
from recsys.runtime.world import World


def test_one_bit_in_any_file_is_noticed(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    saved = checkpoints(tmp_path / "c", world, documents=(tmp_path / "config.yaml", tmp_path / "none.json"))
    for step in (1, 2):
        saved.save(tensors(step), state(step))
    good = tmp_path / "c" / "step-000000002"
    assert names(good) == ["checkpoint.json", "config.yaml", "rank_0.bin"]
    for name in names(good):
        for place in (0.0, 0.5, 0.999):
            folder = tmp_path / f"{name}-{place}"
            shutil.copytree(tmp_path / "c", folder)
            damaged = folder / good.name / name
            content = bytearray(damaged.read_bytes())
            content[int(place * len(content))] ^= 1 << 4
            damaged.write_bytes(content)
            with pytest.raises(UserError, match="is corrupt"):
                verify_checkpoint(damaged.parent, world)
            caplog.clear()
            assert loaded(folder, world) == 1
            assert f"refused: checkpoint '{damaged.parent}' is corrupt: {name}" in caplog.text
            assert "step-000000002.refused" in names(folder)


@pytest.mark.parametrize("damage", ["cut", "removed", "marker"])
def test_files_that_are_cut_or_gone_are_noticed(damage: str, world: World, tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "c", world)
    for step in (1, 2):
        saved.save(tensors(step), state(step))
    shard = tmp_path / "c/step-000000002/rank_0.bin"
    if damage == "cut":
        os.truncate(shard, 1000)
    else:
        (shard if damage == "removed" else shard.with_name("checkpoint.json")).unlink()
    assert loaded(tmp_path / "c", world) == 1
    # The step is saved anew, and is the newest again.
    saved.save(tensors(7), state(2))
    assert loaded(tmp_path / "c", world) == 7


def test_where_none_is_valid_the_run_does_not_start_again(world: World, tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "c", world)
    assert saved.newest_valid() is None
    saved.save(tensors(1), state(1))
    os.truncate(tmp_path / "c/step-000000001/rank_0.bin", 1000)
    with pytest.raises(UserError, match=r"no checkpoint in .* is valid .*rank_0.bin has 1000 bytes"):
        saved.newest_valid()
    assert names(tmp_path / "c") == ["latest", "step-000000001"]


def test_no_content_of_a_file_is_more_than_numbers(world: World, tmp_path: Path) -> None:
    """A pickle in place of the tensors, with right checksums, is read as the numbers that its bytes are."""
    saved, harm = checkpoints(tmp_path / "c", world), tmp_path / "harm"
    saved.save(tensors(1), state(1))
    folder = tmp_path / "c/step-000000001"
    marker, size = Marker.read(folder), (folder / "rank_0.bin").stat().st_size
    poison = f"cposix\nmkdir\n(V{harm}\ntR.".encode()
    with pytest.raises(FileNotFoundError):  # it does what it should
        pickle.loads(poison.replace(b"harm", b"x/y"))
    marker.files["rank_0.bin"] = write_file(folder / "rank_0.bin", (poison * size)[:size])
    marker.write(folder)
    with pytest.raises(UserError, match="is corrupt: its optimizer state, random state or id counts"):
        loaded(tmp_path / "c", world)
    assert not harm.exists()


def test_the_same_step_again_changes_the_marker_alone(world: World, tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "c", world)
    saved.save(tensors(1), state(1))
    shard = tmp_path / "c/step-000000001/rank_0.bin"
    before = shard.stat().st_ino, shard.stat().st_mtime_ns
    saved.save(tensors(1), state(1, best_step=1, best_metric=0.5))
    assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == before
    found = saved.newest_valid()
    assert found is not None and found[1].state.best_metric == 0.5


@pytest.mark.parametrize("background", [False, True])
def test_the_newest_and_the_best_are_kept(background: bool, world: World, tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "c", world, keep=2, background=background)
    (tmp_path / "c/step-000000000.tmp").mkdir()  # what a crash has left
    for step in range(1, 6):
        saved.save(tensors(step), state(step, best_step=min(step, 2)))
    saved.wait()
    kept = [f"step-{step:09d}" for step in (2, 4, 5)]
    assert names(tmp_path / "c") == ["latest", *kept]
    assert (tmp_path / "c/latest").read_text() == "step-000000005\n"
    assert loaded(tmp_path / "c", world) == 5 and find_checkpoint(tmp_path / "c" / kept[0]).name == kept[0]


def test_a_copy_is_saved_in_the_background(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_write, writes = threading.Event(), []
    whole_write = HashedFile.write

    def write(self: HashedFile, data: Any) -> None:
        assert may_write.wait(20)
        writes.append(threading.current_thread().name)
        whole_write(self, data)

    monkeypatch.setattr(HashedFile, "write", write)
    caplog.set_level("INFO", "recsys")
    saved = checkpoints(tmp_path / "c", world, background=True)
    trained, now = tensors(1), state(1, epoch_rows=[[5, 0, 0]])
    saved.save(trained, now)
    assert not writes and "from a copy of 0.0 MiB" in caplog.text
    trained.tables()["t"].fill_(9)
    now.epoch_rows[0][0], now.step = 99, 2
    threading.Timer(0.3, may_write.set).start()
    saved.save(tensors(2), state(2))  # one at a time: this one waits
    assert writes and (tmp_path / "c/step-000000001/checkpoint.json").exists()
    saved.wait()
    shutil.rmtree(tmp_path / "c/step-000000002")
    found = saved.newest_valid()
    assert found is not None and found[1].state.epoch_rows == [[5, 0, 0]] and found[1].state.step == 1
    assert loaded(tmp_path / "c", world) == 1 and "checkpoint_0" in set(writes)


def test_ranks_wait_for_each_other_in_the_background_as_long_as_they_are_told(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default torch has them wait half an hour."""
    whole, waits = dist.new_group, []

    def new_group(**settings: Any) -> Any:
        waits.append(settings["timeout"].total_seconds())
        return whole(**settings)

    monkeypatch.setattr(dist, "new_group", new_group)
    checkpoints(tmp_path / "c", replace(world, timeout=timedelta(seconds=7320)), background=True)
    assert waits == [7320.0]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("file", ["rank_0.bin", "checkpoint.json"])
def test_a_failed_save_leaves_nothing_of_itself(
    background: bool, file: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoints(tmp_path / "c", world, background=background)
    saved.save(tensors(1), state(1))
    saved.wait()
    whole_write = HashedFile.write

    def full(self: HashedFile, data: Any) -> None:
        if Path(self._file.name).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        whole_write(self, data)

    def full_disk(path: Path, content: bytes) -> None:
        if path.name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        whole_replace(path, content)

    whole_replace = state_module.replace_file
    monkeypatch.setattr(state_module, "replace_file", full_disk)
    monkeypatch.setattr(HashedFile, "write", full)
    sentence = r"checkpoint '.*step-000000002' cannot be written: .*No space left.* before it are valid"
    if background:
        saved.save(tensors(2), state(2))
        while not saved.failed:
            pass
        with pytest.raises(UserError, match=sentence):
            saved.save(tensors(3), state(3))
    else:
        with pytest.raises(UserError, match=sentence):
            saved.save(tensors(2), state(2))
    assert names(tmp_path / "c") == ["latest", "step-000000001"]
    monkeypatch.undo()
    assert loaded(tmp_path / "c", world) == 1


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoints(tmp_path / "c", world)
    monkeypatch.setattr(save_module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"a checkpoint needs 1,\d\d\d,\d\d\d bytes, and '.*' has 5 free.*\(1 MiB of what"
    ):
        saved.save(tensors(1), state(1))
    assert names(tmp_path / "c") == []


def test_damaged_ones_make_room_before_valid_ones(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(folder: Path) -> Any:
        is_full = len([*folder.glob("step-*")]) > 3
        return shutil._ntuple_diskusage(1 << 30, 0, 5 if is_full else 1 << 30)  # type: ignore[attr-defined]

    saved = checkpoints(tmp_path, world, keep=3)
    for step in (1, 2, 3):
        saved.save(tensors(step), state(step))
    damaged = [state_module.refused_of(saved.path(step)) for step in (4, 5)]
    for path in damaged:
        path.mkdir()
    monkeypatch.setattr(save_module.shutil, "disk_usage", usage)  # type: ignore[attr-defined]
    saved.save(tensors(4), state(4))
    assert names(tmp_path) == ["latest", *(f"step-00000000{step}" for step in (2, 3, 4))]


def test_an_old_one_that_somebody_reads_over_nfs_is_removed_later(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    saved = checkpoints(tmp_path, world, keep=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        for step in (1, 2, 3):
            saved.save(tensors(step), state(step))
    assert loaded(tmp_path, world) == 3
    saved.save(tensors(4), state(4))
    assert names(tmp_path) == ["latest", "step-000000004"]


def test_another_format_is_named(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = checkpoints(tmp_path / "c", world)
    saved.save(tensors(1), state(1))
    with monkeypatch.context() as earlier:
        earlier.setattr(state_module, "FORMAT", 4)
        saved.save(tensors(2), state(2))
    with pytest.raises(UserError, match="has format 4, and this version reads format 5 alone"):
        saved.newest_valid()


def test_what_is_written_is_on_disk_before_it_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is synced after its last byte, the folder after its marker, the folder above after the renaming."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        name = re.sub(r"\.\w{16}(?=\.tmp$)", "", path.name)
        done.append(f"sync {name}:{path.stat().st_size if path.is_file() else ''}")
        fsync(descriptor)

    def watched_rename(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name}")
        return rename(self, target)

    monkeypatch.setattr(files_module.os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    saved = checkpoints(tmp_path / "c", world)
    saved.save(tensors(1), state(1))
    folder = tmp_path / "c/step-000000001"
    named = done.index("rename step-000000001.tmp")
    for name, written_as in (("rank_0.bin", "rank_0.bin"), ("checkpoint.json", "checkpoint.json.tmp")):
        size = (folder / name).stat().st_size
        assert done.index(f"sync {written_as}:{size}") < named
    assert done.index("sync step-000000001.tmp:") < named
    assert done[named + 1 :] == ["sync c:", "sync latest.tmp:15", "sync c:"]


def test_counts_of_ids_are_read_one_at_a_time(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of few may load those of many ranks: together they would take much memory."""
    statistics = {name: IdStatistics() for name in ("a", "b", "c")}
    for count in statistics.values():
        count.add_unseen(np.arange(1000, dtype=np.uint64))
    saved = replace(tensors(1.0), statistics=statistics)
    checkpoints(tmp_path, world).save(saved, state(1))
    lengths, alive, add_state = (
        [len(count.state()) for count in statistics.values()],
        list[int](),
        IdStatistics.add_state,
    )

    def counting(self: IdStatistics, counts: np.ndarray) -> None:
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        counted = [tensor for tensor in tensors if tensor.dtype is torch.int64 and tensor.numel() in lengths]
        alive.append(len({tensor.data_ptr() for tensor in counted}))
        add_state(self, counts)

    monkeypatch.setattr(IdStatistics, "add_state", counting)
    found = checkpoints(tmp_path, world).newest_valid()
    assert found is not None
    into = replace(tensors(-1.0), statistics={name: IdStatistics() for name in statistics})
    load_tensors(*found, into, world)
    assert alive == [1, 1, 1] and [len(count.state()) for count in into.statistics.values()] == lengths
