"""Checkpoint files: written with a checksum, synced, and compared with it."""

import contextlib
import io
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta

from recsys.runtime.files import replace_file

_AT_ONCE = 8 << 20


class HashedFile:
    """A file for appending that knows its size and checksum."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes."""
        self._hash.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self._error = error
            raise
        self.num_bytes += written
        return written

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self.num_bytes

    def flush(self) -> None:
        """Flush what is buffered to the system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file once its content is on disk; a second call, as DCP makes, does nothing."""
        if self._file.closed:
            return
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def discard(self) -> None:
        """Close the file after an error, and raise the first error of writing: torch.save hides it behind another."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._error is not None:
            raise self._error

    @property
    def entry(self) -> tuple[int, str]:
        """Size in bytes and checksum (XXH3, 128 bits)."""
        return self.num_bytes, self._hash.hexdigest()


class HashingFileSystem(FileSystem):
    """DCP's file system, with files that have a checksum and are on disk when they are closed.

    DCP's own `sync_files` syncs before Python's buffer is flushed.

    Attributes:
        written: (size, checksum) by file name.
    """

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        """Yield a file to read from, or a `HashedFile`."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file: Any = HashedFile(Path(path))
        try:
            yield file
            file.close()
        except BaseException:
            file.discard()
            raise
        self.written[Path(path).name] = file.entry

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Rename a file, and its checksum with it."""
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    """DCP's writer of files over a `HashingFileSystem`.

    Attributes:
        written: (size, checksum) of the files that this rank has written, by name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False, overwrite=False)
        self.fs = HashingFileSystem()
        self.written = self.fs.written

    def storage_meta(self) -> StorageMeta:
        """Return the identity of this save, without its path, which names a place and no content."""
        return StorageMeta(save_id=self.save_id)  # without the path, which names a place and no content


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
    """Return how a file differs from what was written, or None."""
    try:
        size = path.stat().st_size
        if size != num_bytes:
            return f"{path.name} has {size} bytes, and was written with {num_bytes}"
        same = entry_of(path)[1] == checksum
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if same else f"{path.name} has changed since it was written"


def causes(error: CheckpointException) -> str:
    """Return the errors of ranks in an error of DCP, in one line."""
    texts = {" ".join(str(failure[0]).split())[:200] for failure in error.failures.values()}
    return "; ".join(sorted(texts))
