"""Checkpoint files: written with a checksum and synced, read with nothing executed."""

import contextlib
import enum
import io
import os
import pickle
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from recsys.errors import UserError

METADATA_FILE = ".metadata"
_AT_ONCE = 8 << 20
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}


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
        return StorageMeta(save_id=self.save_id)  # without the path, which names a place and no content


class SafeReader(FileSystemReader):
    """DCP's reader, whose `.metadata` may hold descriptions of tensors and nothing else.

    Args:
        files: names of the checkpoint's files; others are not opened.
    """

    def __init__(self, path: Path, files: Iterable[str]) -> None:
        super().__init__(path)
        self._folder, self._files = path, set(files)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the tensors.

        Raises:
            UserError: it is damaged, names other objects, or describes what is no tensor or in no file of the
                checkpoint.
        """
        if self._metadata is not None:
            return self._metadata
        path = self._folder / METADATA_FILE
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            entries, places = metadata.state_dict_metadata.values(), metadata.storage_data.values()
            if not all(type(entry) is TensorStorageMetadata for entry in entries):
                raise pickle.UnpicklingError("it describes an object that is no tensor")
            if not all(place.relative_path in self._files and not place.transform_descriptors for place in places):
                raise pickle.UnpicklingError("it names a file that the checkpoint does not have")
        except Exception as error:  # unpickling damaged bytes may raise anything
            raise UserError(
                f"'{path}' cannot be read ({' '.join(str(error).split())[:200]}), and nothing of the checkpoint was "
                f"loaded; take another checkpoint"
            ) from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._metadata = metadata
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


def _enum_member(kind: Any, name: str) -> Any:
    """Stand in for getattr, as which Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickle members of an Enum."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"it asks for builtins.getattr of {kind}, which describes no tensor")
    return kind[name]


def write_file(path: Path, content: bytes) -> tuple[int, str]:
    """Write a file to disk; return its size and checksum."""
    file = HashedFile(path)
    try:
        file.write(content)
        file.close()
    except BaseException:
        file.discard()
        raise
    return file.entry


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
        found = path.stat().st_size
        if found != num_bytes:
            return f"{path.name} has {found} bytes, and was written with {num_bytes}"
        same = entry_of(path)[1] == checksum
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if same else f"{path.name} has changed since it was written"
