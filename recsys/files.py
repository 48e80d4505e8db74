"""Files in place of others: written aside, brought to disk, renamed; an error names the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write what then takes the place of a file; a crash or an error leaves the one or the other.

    Raises:
        OSError: it cannot be written; its `filename` is set.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # ranks may write pages over all of them at once
    with naming(path):
        try:
            yield aside
            descriptor = os.open(aside, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            aside.replace(path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Put a file in place of another, as `replacing` does."""
    with replacing(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a folder, which need not be there, into another."""
    target.mkdir(exist_ok=True)
    for path in source.glob("*"):
        replace_file(target / path.name, path.read_bytes())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError inside tell of a file, as those of writing to an open one do not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
