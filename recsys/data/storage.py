"""Storage of Parquet files: local paths, file systems named by URIs, reads with retries, Hive partitions in paths."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress
from typing import ParamSpec, TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.fs as fs

from recsys.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.1
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class BadDataError(UserError):
    """A file, or one of its row groups, cannot be read.

    Attributes:
        path: of the file. row_group: its number in the file, or None if the error concerns the whole file.
    """

    def __init__(self, message: str, path: str, row_group: int | None = None) -> None:
        super().__init__(message)
        self.path, self.row_group = path, row_group

    def __reduce__(self) -> tuple[type, tuple[str, str, int | None]]:
        return BadDataError, (str(self), self.path, self.row_group)


@dataclass(frozen=True)
class Storage:
    """The file system of a dataset; each process that receives one by pickle opens it for itself.

    Attributes:
        root: URI without a path, such as `s3://bucket?region=eu-west-1`, or empty for local files.
        retries: how often a failed read from a remote file system is repeated.
    """

    root: str = ""
    retries: int = 0

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return Storage, (self.root, self.retries)

    @cached_property
    def remote(self) -> tuple[fs.FileSystem, str]:
        """The remote file system, and the prefix that its paths have instead of `shown`."""
        return filesystem_of(self.root, self.retries)

    @property
    def shown(self) -> str:
        """The prefix of remote paths in messages: the root without secrets and options."""
        return re.sub("//.*@", "//", self.root.partition("?")[0])

    def path(self, name: str) -> str:
        """Return the path, in the remote file system, of the file that messages call `name`."""
        return self.remote[1].rstrip("/") + name.removeprefix(self.shown)

    def name(self, path: str) -> str:
        """Return what messages call the file at a path of the remote file system."""
        return self.shown + path.removeprefix(self.remote[1].rstrip("/"))

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for random access. Raises OSError."""
        return self.remote[0].open_input_file(self.path(name)) if self.root else pa.OSFile(name)

    def retried(self, action: Callable[P, T]) -> Callable[P, T]:
        """Return `action`; if files are remote, wrapped to retry an OSError after 0.1, 0.2, 0.4 … seconds."""

        def retry(*args: P.args, **kwargs: P.kwargs) -> T:
            for attempt in range(self.retries):
                try:
                    return action(*args, **kwargs)
                except FileNotFoundError:
                    raise
                except OSError:
                    time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
            return action(*args, **kwargs)

        return retry if self.root else action


def filesystem_of(root: str, retries: int) -> tuple[fs.FileSystem, str]:
    """Return the file system of a URI without a path, and the path in it that the URI stands for.

    Raises:
        UserError: it cannot be opened.
    """
    authority, mark, options = root.partition("?")
    try:
        filesystem, path = fs.FileSystem.from_uri(f"{authority}/{mark}{options}")
        if isinstance(filesystem, fs.S3FileSystem):
            # from_uri accepts no retry strategy, so it is made again, with the options that pickling would use.
            strategy = fs.AwsStandardS3RetryStrategy(max_attempts=retries + 1)
            filesystem = fs.S3FileSystem(**filesystem.__reduce__()[1][0], retry_strategy=strategy)
    except (pa.ArrowException, OSError) as error:
        host = re.sub("//.*@", "//", authority)
        raise UserError(f"the file system of '{host}' cannot be opened ({reason(error)})") from error
    return filesystem, path


@dataclass(frozen=True, eq=False)
class Files:
    """The files of a dataset.

    Attributes:
        names: the names used in messages, in order.
        sizes: bytes, int64 [files], -1 if unknown. times: last change in ns, int64 [files], 0 if unknown.
    """

    storage: Storage
    names: tuple[str, ...]
    sizes: np.ndarray
    times: np.ndarray

    def select(self, chosen: np.ndarray) -> "Files":
        """Return the files for which a bool mask [files] is true."""
        return Files(self.storage, tuple(compress(self.names, chosen)), self.sizes[chosen], self.times[chosen])

    def partition_type(self, column: str, like: pa.Schema | None = None) -> pa.DataType:
        """Return the type of a column whose values are in the paths: string if it is that in `like`, else int32 or
        string as pyarrow.dataset infers from the values, or null if no path has the column.

        `like` matters because values of digits alone look like numbers, but may be texts in the data these belong to.
        """
        if like is not None and column in like.names and pa.types.is_string(like.field(column).type):
            return pa.string()
        values = {keys[column] for keys in map(partition_keys, self.names) if column in keys}
        try:
            pa.array([*values], pa.string()).cast(pa.int32())
        except pa.ArrowInvalid:
            return pa.string()
        return pa.int32() if values else pa.null()


def partition_keys(name: str) -> dict[str, str | None]:
    """Return the Hive partition keys in a path, such as {"day": "2026-11-01"} of logs/day=2026-11-01/part-0.parquet.

    Values are percent-decoded, and __HIVE_DEFAULT_PARTITION__ is None.

    Raises:
        UnicodeDecodeError: a decoded key or value is not UTF-8, which `find_files` has ruled out for its files.
    """
    pairs = (folder.partition("=") for folder in name.split("/")[:-1] if "=" in folder)
    decoded = partial(unquote, errors="strict")  # else all other bytes become one sign, and different values the same
    return {decoded(key): None if value == _NULL_PARTITION else decoded(value) for key, _, value in pairs}


def partition_column(value: str | None, dtype: pa.DataType, num_rows: int) -> pa.Array:
    """Return a column of `num_rows` times one value, given as text from a path."""
    if value is None:
        return pa.nulls(num_rows, dtype)
    if pa.types.is_string(dtype):
        return pa.DictionaryArray.from_arrays(np.zeros(num_rows, np.int32), pa.array([value], dtype))
    return pa.repeat(pa.scalar(value).cast(dtype), num_rows)


def reason(error: Exception) -> str:
    """Return in short why something cannot be read, without the details that Arrow and the operating system add."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, PermissionError):
        return "there is no permission to read it"
    text = " ".join(str(error).split())
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, text):
            return meaning
    return re.split(r"\. |\.? Detail: |; Details: ", text)[0].rstrip(".") or type(error).__name__


_MEANINGS = (
    ("CRC checksum", "the checksum of a page is wrong"),
    ("Deserializing page header failed", "a page header is damaged"),
    ("deserialize thrift|TProtocolException|invalid TType|codec can't decode", "its structure is damaged"),
    ("Unable to load lib(jvm|hdfs)", "libhdfs needs Java and Hadoop, with JAVA_HOME and CLASSPATH set"),
    ("NETWORK_CONNECTION|Couldn't resolve host", "the server cannot be reached"),
)
