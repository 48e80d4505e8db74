"""Parquet files: finding them, reading footers, checking columns, decoding pieces of row groups."""

import glob
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.order import RowGroup, Segment, fingerprint, limit_rows
from recsys.errors import UserError, nearest

_CACHED_ROW_GROUPS = 2


@dataclass(frozen=True)
class Dataset:
    """Files of one role (train, valid …), with what their footers say.

    Attributes:
        key: the config key that names the files, for messages.
        row_groups: of all files, in order; empty ones left out.
        schema: Arrow schema of the columns read, with types that hold those of every file.
        columns: names of the columns read.
    """

    key: str
    row_groups: tuple[RowGroup, ...]
    schema: pa.Schema
    columns: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return sum(group.num_rows for group in self.row_groups)

    @property
    def num_files(self) -> int:
        return len({group.path for group in self.row_groups})

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.row_groups)


def open_dataset(key: str, paths: str | Sequence[str], columns: dict[str, str], max_rows: int | None = None) -> Dataset:
    """Find files and read their footers, in threads.

    Args:
        key: config key of `paths`, for messages.
        paths: directory, glob, file, or a list of these.
        columns: needed column → config key that asks for it.
        max_rows: use the first rows only.

    Raises:
        UserError: nothing found, not Parquet, a column missing, types that do not go together, or no rows.
    """
    files = find_files(key, paths)
    names = tuple(columns)
    with ThreadPoolExecutor(min(16, len(files))) as pool:
        footers = list(pool.map(lambda path: _read_footer(key, path, columns), files))
    groups = [group for file_groups, _ in footers for group in file_groups if group.num_rows]
    if not groups:
        raise UserError(f"config key '{key}': the Parquet files of '{_show(paths)}' hold no rows")
    schema = _unify(key, [(path, schema) for path, (_, schema) in zip(files, footers, strict=True)])
    return Dataset(key, tuple(limit_rows(groups, max_rows)), schema, names)


def find_files(key: str, paths: str | Sequence[str]) -> list[str]:
    """Return the Parquet files of directories (searched in depth), globs and file names, sorted within each.

    Hidden files and those that begin with `_` (markers of other tools) are left out.

    Raises:
        UserError: a path that does not exist, a glob or directory without Parquet files, a file given twice.
    """
    files: list[str] = []
    for path in [paths] if isinstance(paths, str) else paths:
        files += _expand(key, os.path.expanduser(path))
    twice = [file for file, count in Counter(map(os.path.abspath, files)).items() if count > 1]
    if twice:
        raise UserError(f"config key '{key}' names the file '{min(twice)}' twice; name each file once")
    return files


def _expand(key: str, path: str) -> list[str]:
    if os.path.isdir(path):
        # Some writers name a folder of files like a file, hence the look at each.
        below = (p for p in Path(path).rglob("*.parquet") if not _hidden(p.relative_to(path)) and not p.is_dir())
        found = sorted(map(str, below))
        if not found:
            others = sorted(p.name for p in Path(path).iterdir())[:3]
            holds = f"it holds {', '.join(others)}" if others else "it is empty"
            raise UserError(f"config key '{key}': the folder '{path}' has no *.parquet file; {holds}")
        return found
    if os.path.isfile(path):
        return [path]
    if glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        if not os.path.basename(path).startswith("_"):
            matches = [match for match in matches if not os.path.basename(match).startswith("_")]
        found = [file for match in matches for file in _expand(key, match)]
        if not found:
            raise UserError(f"config key '{key}': no file matches '{path}'")
        return found
    wrong = "is no regular file" if os.path.exists(path) else "does not exist"
    raise UserError(f"config key '{key}': '{path}' {wrong}{_near_path(path)}")


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _near_path(path: str) -> str:
    # Name the deepest folder that exists, and what in it is most like the missing part.
    parent = Path(path)
    missing = parent.name
    while not os.path.exists(parent) and parent != parent.parent:
        missing, parent = parent.name, parent.parent
    names = [child.name for child in parent.iterdir()] if parent.is_dir() else []
    prefix = "" if str(parent) == "." else f"{parent}/"
    return nearest(missing, names, prefix)


def _show(paths: str | Sequence[str]) -> str:
    return paths if isinstance(paths, str) else ", ".join(paths)


def _unify(key: str, schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    unified = schemas[0][1]
    for path, schema in schemas:
        for column in schema.names if schema != unified else []:
            pair = [pa.schema([each.field(column)]) for each in (unified, schema)]
            try:
                merged = pa.unify_schemas(pair, promote_options="permissive")
            except pa.ArrowException as error:
                raise UserError(
                    f"config key '{key}': column '{column}' is {schema.field(column).type} in '{path}', but "
                    f"{unified.field(column).type} in the files before it; write it with one type"
                ) from error
            unified = unified.set(unified.get_field_index(column), merged.field(0))
    return unified


def _read_footer(key: str, path: str, columns: dict[str, str]) -> tuple[list[RowGroup], pa.Schema]:
    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"config key '{key}': '{path}' is not a readable Parquet file ({_first_sentence(error)}); write it anew, "
            f"or convert delimited text with scripts/prepare_data.py csv"
        ) from error
    for column, asks in columns.items():
        if column not in schema.names:
            raise UserError(
                f"{asks}: file '{path}' has no column '{column}'{nearest(column, schema.names)} "
                f"(it has: {', '.join(schema.names)})"
            )
        if schema.names.count(column) > 1:
            raise UserError(
                f"{asks}: file '{path}' has {schema.names.count(column)} columns '{column}', and may have one"
            )
    wanted = [i for i in range(metadata.num_columns) if _is_within(metadata.schema.column(i).path, columns)]
    groups = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        num_bytes = sum(group.column(i).total_uncompressed_size for i in wanted)
        groups.append(RowGroup(path, index, group.num_rows, num_bytes))
    return groups, pa.schema([schema.field(column) for column in columns])


def _is_within(path: str, columns: Iterable[str]) -> bool:
    # A list column's path is like history.list.element, and any column's name may hold a dot itself.
    return any(path == column or path.startswith(f"{column}.") for column in columns)


class SegmentReader:
    """Decodes segments; safe to call from several threads.

    The last few row groups are kept, because the streams of small files begin in the same row group.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._recent: OrderedDict[tuple[str, int], Future[pa.Table]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, segment: Segment) -> pa.Table:
        """Return the rows of a segment.

        Raises:
            UserError: names the file and row group that cannot be read.
        """
        return self._row_group(segment.path, segment.row_group).slice(segment.start, segment.num_rows)

    def _row_group(self, path: str, index: int) -> pa.Table:
        key = (path, index)
        with self._lock:
            future = self._recent.get(key)
            mine = future is None
            if future is None:
                future = self._recent[key] = Future()
                while len(self._recent) > _CACHED_ROW_GROUPS:
                    self._recent.popitem(last=False)
        if mine:
            try:
                future.set_result(self._decode(path, index))
            except Exception as error:
                future.set_exception(error)
        return future.result()

    def _decode(self, path: str, index: int) -> pa.Table:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                return file.read_row_group(index, columns=self._columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(index, path, error) from error


def read_head(dataset: Dataset, num_rows: int) -> pa.Table:
    """Return up to `num_rows` rows from the start of a dataset's first row group, without decoding more of it."""
    first = dataset.row_groups[0]
    try:
        with pq.ParquetFile(first.path) as file:
            batches = file.iter_batches(num_rows, row_groups=[first.index], columns=list(dataset.columns))
            return pa.Table.from_batches([next(batches)])
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(first.index, first.path, error) from error


def read_column(dataset: Dataset, column: str) -> pa.Array:
    """Return one whole column of a dataset, in file order."""
    reader = SegmentReader([column])
    pieces = [reader.read(Segment(group.path, group.index, 0, group.num_rows)) for group in dataset.row_groups]
    return pa.concat_arrays(pa.concat_tables(pieces, promote_options="permissive").column(column).chunks)


def _unreadable(index: int, path: str, error: Exception) -> UserError:
    return UserError(f"row group {index} of '{path}' cannot be read ({_first_sentence(error)}); write the file anew")


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")
