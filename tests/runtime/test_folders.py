"""A folder appears whole: two writers, a link, and what others put there meanwhile."""

import os
from pathlib import Path

import pytest

from recsys.errors import UserError
from recsys.runtime.folders import whole_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out") as folder:
        (folder / "mine").touch()
        with (
            pytest.raises(UserError, match=r"OUT: another process writes to .*\.out\.tmp' \(process \d+ of"),
            whole_folder(tmp_path / "out"),
        ):
            raise AssertionError
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["mine"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_folder_that_has_come_meanwhile(replaces: bool, tmp_path: Path) -> None:
    def write() -> None:
        with whole_folder(tmp_path / "out", replaces=replaces) as folder:
            (folder / "mine").touch()
            (tmp_path / "out" / "theirs").mkdir(parents=True)

    if replaces:
        write()
    else:
        with pytest.raises(UserError, match=r"/out' cannot be made \(Directory not empty\); name another folder"):
            write()
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["mine" if replaces else "theirs"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_link_stays_and_what_it_leads_to_is_written(replaces: bool, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "far")
    (tmp_path / ".far.tmp").mkdir()
    (tmp_path / ".far.tmp" / "left").touch()  # by a process that was killed
    with whole_folder(tmp_path / "out", replaces=replaces) as folder:
        (folder / "mine").touch()
    assert (tmp_path / "out").is_symlink() and names(tmp_path / "far") == ["mine"]
    assert names(tmp_path) == ["far", "out"]


@pytest.mark.parametrize("replaces", [False, True])
def test_all_is_on_disk_before_it_appears(replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []  # each file or folder by name, and whether `out` was there already
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, (tmp_path / "out" / "mine").exists()))

    monkeypatch.setattr(os, "fsync", noted)
    with whole_folder(tmp_path / "out", replaces=replaces) as folder:
        (folder / "mine").touch()
        (folder / "tables").mkdir()
        (folder / "tables" / "item.bin").touch()
    before = {name for name, has_appeared in synced if not has_appeared}
    assert {"mine", "tables", "item.bin", ".out.tmp"} <= before
    assert (tmp_path.name, True) in synced


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "out", replaces=True) as folder:
        (folder / "mine").touch()
        raise KeyboardInterrupt
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["old"]


def test_a_place_where_a_disk_is_mounted_is_refused_before_any_work() -> None:
    with (
        pytest.raises(UserError, match=r"^--out: '/proc' is the mount point .*; name a folder in it$"),
        whole_folder(Path("/proc"), "--out"),
    ):
        raise AssertionError
