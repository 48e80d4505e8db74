"""Files written atomically (aside, synced, renamed), folders for output, and errors that name the file."""

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recsys.errors import UserError, why

# Errors of file systems that cannot sync folders, such as some of networks and virtual machines.
_NO_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and rename it to `path` at the end; a crash or an error leaves the file as it was.

    Raises:
        OSError: it cannot be written; `filename` is set.
    """
    # The name is random, because processes may write the same file at once, and have equal numbers in containers.
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    with naming(path):
        try:
            yield aside
            sync(aside)
            aside.replace(path)
            sync(path.parent)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the content of a file in one step; see `replacing`."""
    with replacing(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a folder, if it exists, into another."""
    target.mkdir(exist_ok=True)
    for path in source.glob("*"):
        replace_file(target / path.name, path.read_bytes())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set the file name of an OSError raised inside; errors of files that are already open have none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def make_folder(path: Path, argument: str = "OUT") -> None:
    """Make a folder that the user names by an argument, and the folders above it, unless they exist.

    Raises:
        UserError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{argument}: '{path}' cannot be made ('{error.filename}': {why(error)}); name another folder"
        ) from error


def cannot_write(key: str, folder: Path, error: OSError) -> UserError:
    """Return the UserError for a folder, named by a config key, that cannot be written to."""
    return UserError(f"config key '{key}': cannot write to '{folder}' ({why(error)}); name another folder")


def prepare_output(path: Path, argument: str = "OUT") -> None:
    """Refuse a path, named by an argument, that cannot be a regular file, and make its folder.

    It is called before any work, which would otherwise be lost.

    Raises:
        UserError: it is a folder, a device or a pipe, or its own folder cannot be made.
    """
    if path.is_dir():
        raise UserError(f"{argument}: '{path}' is a folder; name a file")
    if path.exists() and not path.is_file():  # root would replace /dev/null for everyone
        raise UserError(f"{argument}: '{path}' is a device, a pipe or a socket, which would be replaced; name a file")
    make_folder(path.parent, argument)


def write_output(path: Path, content: str) -> None:
    """Replace a file that the user may name by `--out`.

    Raises:
        UserError: it is not a file, or cannot be written.
    """
    prepare_output(path, "--out")
    try:
        replace_file(path, content)
    except OSError as error:
        raise UserError(f"'{path}' cannot be written ({why(error)}); name another file by --out") from error


def prepare_json(path: Path, command: str, *keys: str) -> None:
    """Refuse an existing OUT unless it is empty, or a JSON file of the same command, which has these keys.

    Raises:
        UserError: it is another file, cannot be written, or its folder does not exist.
    """
    if not path.parent.is_dir():
        raise UserError(f"'{path.parent}' is not a folder, so {path.name} cannot be written there; make it first")
    prepare_output(path)
    try:
        content = path.read_bytes()
        is_own = not content or {*keys} <= {*json.loads(content)}
    except FileNotFoundError:
        is_own = True
    except (OSError, ValueError, TypeError):
        is_own = False
    if not is_own:
        raise UserError(f"OUT: '{path}' exists and was not written by `{command}`; name another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"OUT: '{path}' cannot be written; name another file")


def unused_folder(path: Path) -> Path:
    """Make a folder, with a number added to its name if that is taken, and return it.

    Raises:
        OSError: it cannot be made.
    """
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        folder = path.with_name(f"{path.name}{suffix}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDERS or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
