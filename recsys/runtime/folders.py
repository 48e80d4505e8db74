"""A folder that appears complete, by a rename, and may replace an earlier one; one process at a time writes it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recsys.errors import UserError, why
from recsys.runtime.files import make_folder, naming, sync
from recsys.runtime.run_lock import beside_lock, output_lock


@contextmanager
def whole_folder(out: Path, argument: str = "OUT", replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block succeeds, and is removed if an error or a signal ends it.

    It is next to `out`. If a killed process has left something there, that is removed. All of it is on disk before it
    becomes `out`, so that a machine that goes down leaves no part of it there.

    Args:
        argument: what the user calls `out`. replaces: whether an `out` that is not empty is replaced.

    Raises:
        UserError: it cannot be made, another process writes it or has made `out` meanwhile, or a disk is mounted there.
    """
    out = out.resolve()  # if it is a link, the folder itself
    if out.is_mount():  # checked before any work, which would be lost
        raise UserError(
            f"{argument}: '{out}' is the mount point of a disk or volume, which cannot be replaced; name a folder in it"
        )
    aside = out.parent / f".{out.name}.tmp"
    with output_lock(argument) as lock:
        make_folder(aside, argument)
        lock.take(aside)
        try:
            _clear(aside)
            yield aside
            lock.check(now=True)
            _sync_all(aside)
            lock.release()
            if replaces:
                _put_in_place(aside, out)
            else:
                _rename(aside, out)
            sync(out.parent)
        except BaseException:
            if not lock.lost():
                shutil.rmtree(aside, ignore_errors=True)
            raise


def _clear(folder: Path) -> None:
    """Remove everything in a folder except its lock."""
    for path in beside_lock(folder):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync_all(folder: Path) -> None:
    """Flush a folder to disk, with all that is in it."""
    for path in (*folder.rglob("*"), folder):
        with naming(path):
            sync(path)


def _rename(new: Path, out: Path) -> None:
    try:
        new.rename(out)
    except OSError as error:
        raise UserError(f"'{out}' cannot be made ({why(error)}); name another folder, or remove it") from error


def _put_in_place(new: Path, out: Path) -> None:
    """Rename a folder to `out`, whose earlier content is removed; a crash never leaves a part of either there."""
    old = out.parent / f".{out.name}.old"
    try:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)  # left by an attempt that was killed at this point
            out.rename(old)
        new.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
