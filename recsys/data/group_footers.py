"""Footers cut down to a single row group: Arrow parses a footer as a whole, and one may have thousands of row groups.

So the places of row groups in a large footer are found once; then only the part about one row group is read and parsed.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.footers import digest_of, file_tail, footer_of, parsed_footer
from recsys.data.thrift import row_group_bounds, schema_end, with_one_row_group

_KEPT_BYTES = 4 << 20  # of footers as in the files (parsed, they take ten times as much) and of the cuts of large ones
_LARGE_BYTES = _KEPT_BYTES >> 4  # a footer of this size or more is not parsed as a whole
_BOUND_BYTES = 36  # size of a Python integer in a list


@dataclass(frozen=True)
class _Cut:
    """A large footer without the part about its row groups.

    Attributes:
        start: its place in the file. head: its bytes to the end of the schema. rest: its bytes after the row groups.
        bounds: from `row_group_bounds`.
    """

    start: int
    head: bytes
    rest: bytes
    bounds: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + len(self.rest) + _BOUND_BYTES * len(self.bounds)


_Kept = tuple[int, pq.FileMetaData | _Cut, int]  # bytes of a footer, the footer, and its digest


class GroupFooters:
    """Reads footers for single row groups; safe to call from several threads.

    A few are kept, since parsing the footer of a file with many row groups takes longer than decoding one of them.

    Args:
        is_remote: whether the files are on a remote file system.
    """

    def __init__(self, is_remote: bool) -> None:
        self._is_remote = is_remote
        self._kept: OrderedDict[tuple[str, int, int], _Kept] = OrderedDict()
        self._num_bytes, self._lock = 0, threading.Lock()

    def read(self, path: str, source: pa.NativeFile, index: int) -> tuple[pq.FileMetaData, int, int]:
        """Return a footer that describes a row group, the group's number in it, and the digest of the whole footer.

        The footer may be cut down to this row group, whose number is then 0. The digest is `Footer.digest`.

        Args:
            source: the opened file. index: number of the row group in the file, which may turn out to have fewer.

        Raises:
            OSError, pa.ArrowException: it cannot be read, or is damaged.
        """
        size = source.size()
        key = (path, size, 0 if self._is_remote else os.stat(path).st_mtime_ns)
        _, footer, digest = self._kept.get(key) or self._keep(key, file_tail(size, source.read_at))
        if not isinstance(footer, _Cut):
            return footer, index, digest
        if index + 1 >= len(footer.bounds):
            return parsed_footer(footer_of(file_tail(size, source.read_at))), index, digest
        start, stop = footer.bounds[index : index + 2]
        group = source.read_at(stop - start, footer.start + start)
        return parsed_footer(with_one_row_group(footer.head, group, footer.rest)), 0, digest

    def _keep(self, key: tuple[str, int, int], tail: bytes) -> _Kept:
        content, digest = footer_of(tail), digest_of(tail)
        footer = _cut(content, key[1]) or parsed_footer(content)
        num_bytes = footer.num_bytes if isinstance(footer, _Cut) else footer.serialized_size
        with self._lock:
            if key not in self._kept:
                self._kept[key] = num_bytes, footer, digest
                self._num_bytes += num_bytes
            while self._num_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._num_bytes -= self._kept.popitem(last=False)[1][0]
        return num_bytes, footer, digest


def _cut(content: bytes, file_size: int) -> _Cut | None:
    """Return a footer without its row groups; None if it is not large, or they cannot be told apart."""
    if len(content) < _LARGE_BYTES:
        return None
    try:
        bounds = row_group_bounds(content)
        return _Cut(file_size - 8 - len(content), content[: schema_end(content)], content[bounds[-1] :], bounds)
    except OSError:  # if the footer is damaged, Arrow's parser reports what is wrong
        return None
