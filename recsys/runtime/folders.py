"""A folder that appears whole, or in place of an earlier one, at a rename; one process at a time writes it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recsys.errors import UserError, why
from recsys.runtime.files import make_folder
from recsys.runtime.run_lock import beside_lock, output_lock


@contextmanager
def whole_folder(out: Path, argument: str = "OUT", replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block succeeds, and is removed if an error or a signal ends it.

    It lies beside `out`. What a process that was killed has left there is removed.

    Args:
        argument: by which the user names `out`. replaces: an `out` that is not empty is replaced.

    Raises:
        UserError: it cannot be made, another process writes it, or `out` has become another one meanwhile; or a disk is
            mounted there.
    """
    out = out.resolve()  # the folder itself, where a link leads to it
    if out.is_mount():  # told before any work, which would be lost
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
            lock.release()
            if replaces:
                _put_in_place(aside, out)
            else:
                _rename(aside, out)
        except BaseException:
            if not lock.lost():
                shutil.rmtree(aside, ignore_errors=True)
            raise


def _clear(folder: Path) -> None:
    """Remove all of a folder but its lock."""
    for path in beside_lock(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _rename(new: Path, out: Path) -> None:
    try:
        new.rename(out)
    except OSError as error:
        raise UserError(f"'{out}' cannot be made ({why(error)}); name another folder, or remove it") from error


def _put_in_place(new: Path, out: Path) -> None:
    """Rename a folder, in place of one that may be there and is removed; a crash leaves no half of either."""
    old = out.parent / f".{out.name}.old"
    try:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)  # of an attempt that was killed here
            out.rename(old)
        new.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
