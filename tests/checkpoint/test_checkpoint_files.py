"""A checkpoint on disk: damage is noticed, what interrupts a save leaves the one before it, nothing is executed."""

import enum
import errno
import io
import os
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import checkpoints, loaded, names, state, tensors

from recsys.checkpoint import Marker, find_checkpoint, verify_checkpoint
from recsys.checkpoint import files as files_module
from recsys.checkpoint import save as save_module
from recsys.checkpoint import state as state_module
from recsys.checkpoint.files import HashedFile, write_file
from recsys.config import Device
from recsys.errors import UserError
from recsys.runtime.world import World, open_world


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Device.cpu) as opened:
        yield opened


def test_one_bit_in_any_file_is_noticed(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    saved = checkpoints(tmp_path / "c", world, documents=(tmp_path / "config.yaml", tmp_path / "none.json"))
    for step in (1, 2):
        saved.save(tensors(step), state(step))
    good = tmp_path / "c" / "step-000000002"
    assert names(good) == [".metadata", "__0_0.distcp", "checkpoint.json", "config.yaml"]
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
    shard = tmp_path / "c/step-000000002/__0_0.distcp"
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
    os.truncate(tmp_path / "c/step-000000001/__0_0.distcp", 1000)
    with pytest.raises(UserError, match=r"no checkpoint in .* is valid .*__0_0.distcp has 1000 bytes"):
        saved.newest_valid()
    assert names(tmp_path / "c") == ["latest", "step-000000001"]


class _Malice:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


def replace(folder: Path, name: str, content: bytes) -> None:
    """Put a file in a checkpoint in place of another, with a marker that is right about it."""
    marker = Marker.read(folder)
    marker.files[name] = write_file(folder / name, content)
    marker.write(folder)


class _OldPickler(pickle._Pickler):
    """Pickles members of an Enum as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, each: object) -> object:
        return (getattr, (type(each), each.name)) if isinstance(each, enum.Enum) else NotImplemented


def test_a_checkpoint_of_an_old_python_is_read(world: World, tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "c", world)
    saved.save(tensors(1), state(1))
    folder, pickled = tmp_path / "c/step-000000001", io.BytesIO()
    _OldPickler(pickled).dump(pickle.loads((folder / ".metadata").read_bytes()))
    assert b"getattr" in pickled.getvalue()
    replace(folder, ".metadata", pickled.getvalue())
    assert loaded(tmp_path / "c", world) == 1
    replace(folder, ".metadata", pickle.dumps(_Attribute()))
    with pytest.raises(UserError, match=r"getattr of <class '.*TensorProperties'>"):
        loaded(tmp_path / "c", world)


class _Attribute:
    def __reduce__(self) -> object:
        return getattr, (torch.distributed.checkpoint.metadata.TensorProperties, "__init__")


def test_nothing_in_a_checkpoint_is_executed(world: World, tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "c", world)
    saved.save(tensors(1), state(1))
    folder, harm = tmp_path / "c/step-000000001", tmp_path / "harm"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    malicious = pickle.loads((folder / ".metadata").read_bytes())
    malicious.planner_data = _Malice(harm)
    # A pickle where a tensor should be, which DCP would load as an object.
    as_bytes = pickle.loads((folder / ".metadata").read_bytes())
    as_bytes.state_dict_metadata["tables/t"] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    as_text = pickle.loads((folder / ".metadata").read_bytes())
    as_text.state_dict_metadata["tables/t"] = "a table"
    elsewhere = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(elsewhere.storage_data.values())).relative_path = "../../elsewhere"
    for changed, reason in (
        (malicious, "it asks for posix.mkdir"),
        (as_bytes, "BytesStorageMetadata, which describes no tensor"),
        (as_text, "it describes an object that is no tensor"),
        (elsewhere, "it names a file that the checkpoint does not have"),
    ):
        replace(folder, ".metadata", pickle.dumps(changed))
        with pytest.raises(UserError, match=reason):
            loaded(tmp_path / "c", world)
    replace(folder, ".metadata", pickle.dumps(metadata))
    assert loaded(tmp_path / "c", world) == 1
    # Pickles in place of the tensors.
    content = (folder / "__0_0.distcp").read_bytes()
    poison = pickle.dumps(_Malice(harm)) + b"\0" * len(content)
    replace(folder, "__0_0.distcp", poison[: len(content)])
    with pytest.raises(UserError, match="cannot be read"):
        loaded(tmp_path / "c", world)
    assert not harm.exists()


def test_the_same_step_again_changes_the_marker_alone(world: World, tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "c", world)
    saved.save(tensors(1), state(1))
    shard = tmp_path / "c/step-000000001/__0_0.distcp"
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

    def write(self: HashedFile, data: Any) -> int:
        assert may_write.wait(20)
        writes.append(threading.current_thread().name)
        return whole_write(self, data)

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


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata.tmp", "checkpoint.json"])
def test_a_failed_save_leaves_nothing_of_itself(
    background: bool, file: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoints(tmp_path / "c", world, background=background)
    saved.save(tensors(1), state(1))
    saved.wait()
    whole_write = HashedFile.write

    def full(self: HashedFile, data: Any) -> int:
        if Path(self._file.name).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        return whole_write(self, data)

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
    with pytest.raises(UserError, match=r"a checkpoint needs 1,\d\d\d,\d\d\d bytes, and '.*' has 5 free"):
        saved.save(tensors(1), state(1))
    assert names(tmp_path / "c") == []


def test_another_format_is_named(world: World, tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "c", world)
    saved.save(tensors(1), state(1))
    old = tmp_path / "c/step-000000002"
    old.mkdir()
    (old / "state.json").write_text("{}")
    with pytest.raises(UserError, match="has format 1, and this version reads format 4 alone"):
        saved.newest_valid()


def test_what_is_written_is_on_disk_before_it_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is synced after its last byte, the folder after its marker, the folder above after the renaming."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(f"sync {path.name}:{path.stat().st_size if path.is_file() else ''}")
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
    asides = (".metadata.tmp", "__0_0.distcp", f"checkpoint.json.{os.getpid()}.tmp")
    for name, written_as in zip((".metadata", "__0_0.distcp", "checkpoint.json"), asides, strict=True):
        size = (folder / name).stat().st_size
        assert done.index(f"sync {written_as}:{size}") < named
    assert done.index("sync step-000000001.tmp:") < named
    assert done[named + 1 :] == ["sync c:", f"sync latest.{os.getpid()}.tmp:15", "sync c:"]
