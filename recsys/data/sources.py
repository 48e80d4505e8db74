"""Listing of Parquet files: the folders, globs, files and URIs of a config key, local and remote."""

import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.fs as fs

from recsys.data.storage import Files, Storage, partition_keys, reason
from recsys.errors import UserError, nearest
from recsys.runtime.logs import logger

SCHEMES = ("s3", "gs", "hdfs", "file")
# Folder of a table's log → table format. Only the log says which files belong to the newest version.
_TABLE_LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi"}


class _File(NamedTuple):
    """A file: `size` in bytes, -1 if unknown; `time` of the last change in ns, 0 if unknown."""

    name: str
    size: int
    time: int


def find_files(key: str, paths: str | Sequence[str], retries: int = 0) -> Files:
    """Return the Parquet files of directories (searched in depth), globs, file names and URIs, sorted within each.

    Hidden files and those that begin with `_` (markers of other tools) are left out. %20 in a URI means a space only
    after file://; `?` begins the options (`s3://bucket/logs?region=eu-west-1`). Credentials are found where the tools
    of the file system find them.

    Args:
        key: config key of `paths`, for messages. retries: of reads from a remote file system.

    Raises:
        UserError: for a path that does not exist, a glob or directory without Parquet files, a file given twice, files
            of several file systems, or a file system that is unknown or does not answer.
    """
    given = [_split(key, path) for path in ([paths] if isinstance(paths, str) else paths)]
    if not given:
        raise UserError(f"config key '{key}' is an empty list; name a directory, glob or file")
    roots = sorted({root for root, _ in given})
    if len(roots) > 1:
        shown = " and ".join(f"'{Storage(root).shown}'" if root else "local files" for root in roots[:2])
        raise UserError(f"config key '{key}' names files in {shown}; keep the files of one key in one place")
    storage = Storage(roots[0], retries)
    if storage.root:
        _reach(key, storage)
    files = [file for _, path in given for file in _expand(key, storage, path)]
    names = tuple(file.name for file in files)
    _check_texts(key, names)
    if len(given) > 1:
        counts = Counter(names if storage.root else map(os.path.abspath, names))
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise UserError(f"config key '{key}' names the file '{min(twice)}' twice; name each file once")
    sizes, times = (np.array([file[i] for file in files], np.int64) for i in (1, 2))
    return Files(storage, names, sizes, times)


def _reach(key: str, storage: Storage) -> None:
    """Open a file system, which may ask a server, say for a bucket's region. Raises UserError if that fails."""
    try:
        _ = storage.remote  # a cached property, which stays open
    except UserError as error:
        raise UserError(f"config key '{key}': {error}") from error


def _check_texts(key: str, names: Sequence[str]) -> None:
    """Raise a UserError if the name of a file, or a partition key in it, is not UTF-8."""
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # Python's signs for bytes that are not UTF-8
            raise UserError(
                f"config key '{key}': the name of '{name}' is not UTF-8, which Arrow needs; rename the file or folder"
            )
        try:
            partition_keys(name)
        except UnicodeDecodeError as error:
            raise UserError(
                f"config key '{key}': a partition key of '{name}' has %-escapes that are not UTF-8; rename its folder"
            ) from error


def _split(key: str, path: str) -> tuple[str, str]:
    """Return the root of a path's file system and the name of the file there; local paths have an empty root."""
    uri = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?]*@)?([^/?]*)([^?]*)(\?.*)?$", path)
    if uri is None:
        return "", os.path.expanduser(path)
    scheme, user, host, name, options = (part or "" for part in uri.groups())
    if not user and ":" in host and "@" in name:
        raise UserError(f"config key '{key}': a name or password in '{scheme}://' holds a '/'; write it as %2F")
    if scheme not in SCHEMES:
        raise UserError(
            f"config key '{key}': files cannot be read from '{scheme}://'{nearest(scheme, SCHEMES)}; give a local path "
            f"or a URI that begins with {', '.join(f'{known}://' for known in SCHEMES)}"
        )
    if scheme == "file":
        if host not in ("", "localhost"):
            raise UserError(f"config key '{key}': '{path}' names the computer '{host}'; write file:///{host}{name}")
        return "", unquote(name)
    return f"{scheme}://{user}{host}{options}", f"{scheme}://{host}{name.rstrip('/')}"


def _expand(key: str, storage: Storage, path: str) -> list[_File]:
    try:
        if storage.root:
            return storage.retried(_expand_remote)(key, storage, path)
        return _expand_local(key, path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"config key '{key}': '{path}' cannot be listed ({reason(error)})") from error


def _expand_local(key: str, path: str) -> list[_File]:
    if os.path.isdir(path) or os.path.isfile(path):
        files = _file_or_below(path)
        if not files:
            raise UserError(_nothing_in(key, path, os.listdir(path)))
        _tell_of_versions(key, path, [log for log in _TABLE_LOGS if os.path.isdir(os.path.join(path, log))])
        return files
    if not glob.has_magic(path):
        if os.path.islink(path):
            raise UserError(f"config key '{key}': '{path}' is a link to '{os.readlink(path)}', which leads nowhere")
        wrong = "is not a regular file" if os.path.exists(path) else f"does not exist{_seen_from(path)}"
        raise UserError(f"config key '{key}': '{path}' {wrong}{_near(Storage(), path)}")
    path = re.sub("/+", "/", path)  # matches have single slashes; `$LOGS/*.parquet` has two if LOGS ends in one
    pattern = path.split("/")
    matches = sorted(match for match in glob.glob(path, recursive=True) if _is_match(match.split("/"), pattern))
    by_name = {file.name: file for match in matches for file in _file_or_below(match)}
    if not by_name:
        raise UserError(f"config key '{key}': no file matches '{path}'{_seen_from(path)}")
    return list(by_name.values())


def _seen_from(path: str) -> str:
    """Return the folder that a relative path starts from, for messages: a run may have been trained from another."""
    return "" if os.path.isabs(path) else f", seen from '{os.getcwd()}'"


def _file_or_below(path: str) -> list[_File]:
    return sorted(_below(path, frozenset())) if os.path.isdir(path) else [_file(path)]


def _below(folder: str, above: frozenset[str]) -> Iterator[_File]:
    # Some writers name a folder like a file. Links to folders are followed, but not in circles.
    here = os.path.realpath(folder)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _is_hidden(entry.name) and entry.is_dir():
                yield from _below(entry.path, above | {here})
            elif not _is_hidden(entry.name) and entry.name.endswith(".parquet"):
                yield _file(entry.path)


def _file(path: str) -> _File:
    try:
        status = os.stat(path)
    except FileNotFoundError:  # a broken link, which is reported when it is read
        return _File(path, -1, 0)
    # A pipe or device cannot be read from its end, so it counts as empty.
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return _File(path, size, status.st_mtime_ns)


def _tell_of_versions(key: str, folder: str, logs: Iterable[str]) -> None:
    for log in logs:
        logger.warning(
            "config key '%s': '%s' is a %s table, whose folder also keeps files of earlier versions; their rows are "
            "read too, unless the key lists the files of one version",
            *(key, folder, _TABLE_LOGS[log]),
        )


def _nothing_in(key: str, folder: str, names: Iterable[str]) -> str:
    others = sorted(names)[:3]
    holds = f"it holds {', '.join(others)}" if others else "it is empty"
    return f"config key '{key}': the folder '{folder}' has no *.parquet file; {holds}"


def _near(storage: Storage, name: str) -> str:
    """Return a hint, for messages, at the name closest to the missing one in the deepest folder that exists."""
    names: list[str] | None = None
    parent, missing = name, ""
    while names is None and len(parent) > len(storage.shown):
        parent, missing = os.path.split(parent)
        names = _names(storage, parent)
    return nearest(missing, names or [], os.path.join(parent, ""))


def _names(storage: Storage, folder: str) -> list[str] | None:
    """Return the names in a folder, None if there is no such folder."""
    if storage.root:
        selector = fs.FileSelector(storage.path(folder), allow_not_found=True)
        return [info.base_name for info in storage.remote[0].get_file_info(selector)] or None
    return os.listdir(folder or ".") if os.path.isdir(folder or ".") else None


def _expand_remote(key: str, storage: Storage, name: str) -> list[_File]:
    filesystem = storage.remote[0]
    info = filesystem.get_file_info(storage.path(name))
    if info.type == fs.FileType.File:
        return [_of_info(storage, info)]
    if info.type == fs.FileType.Directory:
        below = _listing(storage, name)
        files = [file for file in below if _is_data(_parts(file.name, name))]
        inside = {_parts(file.name, name)[0] for file in below}
        if not files:
            raise UserError(_nothing_in(key, name, inside))
        _tell_of_versions(key, name, _TABLE_LOGS.keys() & inside)
        return files
    if not glob.has_magic(name):
        raise UserError(f"config key '{key}': '{name}' does not exist{_near(storage, name)}")
    fixed = re.split(r"[*?[]", name, maxsplit=1)[0].rpartition("/")[0]
    pattern = _parts(name, fixed)
    files = [file for file in _listing(storage, fixed) if _is_match(_parts(file.name, fixed), pattern)]
    if not files:
        raise UserError(f"config key '{key}': no file matches '{name}'")
    return files


def _listing(storage: Storage, folder: str) -> list[_File]:
    selector = fs.FileSelector(storage.path(folder), allow_not_found=True, recursive=True)
    infos = storage.remote[0].get_file_info(selector)
    files = [_of_info(storage, info) for info in infos if info.type == fs.FileType.File]
    return sorted(files)


def _of_info(storage: Storage, info: fs.FileInfo) -> _File:
    return _File(storage.name(info.path), -1 if info.size is None else info.size, info.mtime_ns or 0)


def _parts(name: str, folder: str) -> list[str]:
    return name[len(folder) :].strip("/").split("/")


def _is_hidden(part: str) -> bool:
    return part.startswith((".", "_"))


def _is_data(parts: Sequence[str]) -> bool:
    return parts[-1].endswith(".parquet") and not any(map(_is_hidden, parts))


def _is_match(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a glob matches a file, or a folder that holds it; wildcards match within a name, ** across folders."""
    if not pattern:
        return not parts or _is_data(parts)
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return _is_match(parts, rest) or (
            bool(parts) and not _is_hidden(parts[0]) and (_is_match(parts[1:], pattern) or _is_match(parts[1:], rest))
        )
    if not parts or (_is_hidden(parts[0]) and not _is_hidden(first)):
        return False
    return fnmatchcase(parts[0], first) and _is_match(parts[1:], rest)
