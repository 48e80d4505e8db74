"""Checkpoint files: written with a checksum, synced, and compared with it."""

import contextlib
import os
from pathlib import Path
from typing import Any

import xxhash

from recsys.runtime.files import replace_file

_AT_ONCE = 8 << 20


class HashedFile:
    """A new file that keeps count of its size and checksum, and is synced to disk on a regular exit.

    Attributes:
        num_bytes: written so far.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0

    def write(self, data: Any) -> None:
        """Append bytes."""
        self._hash.update(data)
        self._file.write(data)
        self.num_bytes += len(data)

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with contextlib.suppress(OSError):  # an error here would hide the first one
                self._file.close()
            return
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    @property
    def entry(self) -> tuple[int, str]:
        """Size in bytes and checksum (XXH3, 128 bits)."""
        return self.num_bytes, self._hash.hexdigest()


def write_file(path: Path, content: bytes) -> tuple[int, str]:
    """Write a file to disk; return its size and checksum."""
    replace_file(path, content)
    return len(content), xxhash.xxh3_128_hexdigest(content)


def entry_of(path: Path) -> tuple[int, str]:
    """Return size in bytes and checksum (XXH3, 128 bits) of a file."""
    total = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_AT_ONCE):
            total.update(chunk)
    return path.stat().st_size, total.hexdigest()


def file_problem(path: Path, num_bytes: int, checksum: str) -> str | None:
    """Return how a file differs from its size and checksum when written, or None."""
    try:
        size = path.stat().st_size
        if size != num_bytes:
            return f"{path.name} has {size} bytes, and was written with {num_bytes}"
        same = entry_of(path)[1] == checksum
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if same else f"{path.name} has changed since it was written"
