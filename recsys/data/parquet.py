"""Parquet files of a dataset: opening them all, and reading pieces of row groups."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from recsys.data.conditions import BY_DATASET, KEY, Condition
from recsys.data.dataset import Dataset, ReadOptions
from recsys.data.decode import Decoder
from recsys.data.filters import parse_filter
from recsys.data.footer_cache import Known, load_footers, save_footers
from recsys.data.footers import Footer, FooterParser, Layout, file_keys, read_footers
from recsys.data.order import RowGroups, Segment, limit_rows
from recsys.data.selection import Counter, certain_rows, count_in_threads, count_rows, prune_by_path
from recsys.data.sources import BadDataError, Files, find_files, partition_keys, partition_type
from recsys.errors import UserError

__all__ = ["BadDataError", "Dataset", "ReadOptions", "SegmentReader", "open_dataset", "read_column", "read_head"]

CACHED_ROW_GROUPS = 2  # by a reader, of those that are read in parts


def open_dataset(
    key: str,
    paths: str | Sequence[str],
    columns: Mapping[str, str],
    max_rows: int | None = None,
    filter: str | None = None,
    options: ReadOptions | None = None,
    count: Counter = count_in_threads,
    cache: Path | None = None,
) -> Dataset:
    """Find files, read their footers, and count the rows that match the filter.

    A column that a file does not have may be a Hive partition key in its path (…/day=2026-11-01/part-0.parquet).

    Args:
        key: config key of `paths`, for messages.
        paths: directory, glob, file, URI, or a list of these; see `find_files`.
        columns: needed column → config key that asks for it.
        max_rows: use the first rows only, of those that match the filter.
        filter: expression that rows must match; see `parse_filter`.
        options: how to read.
        count: called as count(n, count_one), returns count_one(0) … count_one(n - 1) as int64 [n]. `count_one` can be
            pickled, so the row groups may be counted on other ranks.
        cache: file that keeps what the footers say and the counts, so that a resumed run reads only footers of files
            that have changed. One for each dataset.

    Raises:
        UserError: nothing found, a column missing, types that do not go together, a filter that does not fit, or no
            rows (that match).
        BadDataError: a footer or row group that cannot be read.
    """
    options = options or ReadOptions()
    condition = None if filter is None else parse_filter(filter)
    files = find_files(key, paths, options.retries)
    known = Known() if cache is None else load_footers(cache, list(columns), filter)
    found = _read(key, files, columns, condition, options, known)
    if condition is not None and known.footers and known.filter_schema != found.filter_schema:
        # What was counted may have been counted with literals of other types.
        known = Known()
        found = _read(key, files, columns, condition, options, known)
    shown = paths if isinstance(paths, str) else ", ".join(paths)
    if not any(sum(footer.num_rows) for footer in found.footers):
        some = f" that can match '{filter}' (data.filter) by their path" if condition else ""
        advice = f"; {BY_DATASET}" if condition else ""
        raise UserError(f"config key '{key}': the Parquet files of '{shown}'{some} hold no rows{advice}")
    dataset = _dataset(key, found, columns, filter, options)
    matching = dataset.row_groups.num_rows
    if condition is not None:
        matching = _match(condition, found, dataset, count)
    if cache is not None:
        _save(cache, found, matching, list(columns), filter)
    if not matching.any():
        raise UserError(f"{KEY}: no row of the Parquet files of '{shown}' ({key}) matches '{filter}'; {BY_DATASET}")
    return _with_rows(dataset, matching, max_rows)


@dataclass(frozen=True)
class _Found:
    """Footers of the files that are left, with the types of all columns."""

    files: Files
    footers: list[Footer]
    layouts: tuple[Layout, ...]
    bad: tuple[str, ...]
    types: dict[str, pa.DataType]
    filter_schema: pa.Schema
    known: Known


def _read(
    key: str,
    files: Files,
    columns: Mapping[str, str],
    condition: Condition | None,
    options: ReadOptions,
    known: Known,
) -> _Found:
    of_filter = dict.fromkeys(sorted(condition.columns()), f"{KEY} (for {key})") if condition else {}
    parser = FooterParser(key, columns, of_filter, known.layouts)
    footers_known = dict(known.footers)
    left = files
    if condition is not None:
        left, footers_known = prune_by_path(files, condition, parser, footers_known)
    read, bad = read_footers(left, parser, options.max_bad_files, footers_known)
    left = left.select(np.array([footer is not None for footer in read], np.bool_))
    footers = [footer for footer in read if footer is not None]
    types = _types(key, files, left, footers, parser)
    filter_schema = pa.schema([(column, types[column]) for column in of_filter if column in types])
    return _Found(left, footers, tuple(parser.layouts), tuple(bad), types, filter_schema, known)


def _types(
    key: str, files: Files, left: Files, footers: Sequence[Footer], parser: FooterParser
) -> dict[str, pa.DataType]:
    """Return types of the columns wanted that hold those of every file, and of the partition keys in all paths."""
    first: dict[int, str] = {}
    for name, footer in zip(left.names, footers, strict=True):
        first.setdefault(footer.layout, name)
    types: dict[str, pa.DataType] = {}
    for number, name in first.items():
        schema = parser.layouts[number].schema
        for column in parser.wanted:
            if column in schema.names:
                kind = schema.field(column).type
            else:
                keys = map(partition_keys, files.names)
                kind = partition_type(each[column] for each in keys if column in each)
            types[column] = _unified(key, column, name, kind, types.get(column, kind))
    return types


def _unified(key: str, column: str, path: str, kind: pa.DataType, before: pa.DataType) -> pa.DataType:
    if kind == before:
        return kind
    pair = [pa.schema([(column, each)]) for each in (before, kind)]
    try:
        return pa.unify_schemas(pair, promote_options="permissive").field(0).type
    except pa.ArrowException as error:
        raise UserError(
            f"config key '{key}': column '{column}' is {kind} in '{path}', but {before} in the files before it; write "
            f"it with one type"
        ) from error


def _dataset(key: str, found: _Found, columns: Mapping[str, str], filter: str | None, options: ReadOptions) -> Dataset:
    """Return all row groups, with the rows that are stored."""
    footers = found.footers
    counts = [len(footer.num_rows) for footer in footers]
    groups = RowGroups(
        found.files.names,
        np.repeat(np.arange(len(footers), dtype=np.int32), counts),
        np.array([i for count in counts for i in range(count)], np.int32),
        np.array([rows for footer in footers for rows in footer.num_rows], np.int64),
        np.array([size for footer in footers for size in footer.num_bytes], np.int64),
    )
    return Dataset(
        key=key,
        row_groups=groups,
        schema=pa.schema([(column, found.types[column]) for column in columns]),
        columns=tuple(columns),
        filter=filter,
        options=options,
        bad_files=found.bad,
        filter_schema=found.filter_schema,
        storage=found.files.storage,
        layouts=found.layouts,
        file_layouts=np.array([footer.layout for footer in footers], np.int64),
        file_sizes=found.files.sizes,
        file_digests=np.array([footer.digest for footer in footers], np.int64),
        stored_rows=groups.num_rows,
    )


def _match(condition: Condition, found: _Found, dataset: Dataset, count: Counter) -> np.ndarray:
    schema = found.filter_schema
    matching = certain_rows(condition.bind(schema), schema, found.files, found.footers, found.layouts)
    open_questions = np.flatnonzero(matching < 0)
    if len(open_questions):
        matching[open_questions] = count_rows(_chosen(dataset, open_questions), count)
    return matching


def _chosen(dataset: Dataset, chosen: np.ndarray) -> Dataset:
    """Return a dataset of some row groups, whose numbers ascend, and of the files that hold them."""
    groups = dataset.row_groups
    used, file = np.unique(groups.file[chosen], return_inverse=True)
    paths = tuple(groups.paths[i] for i in used.tolist())
    return replace(
        dataset,
        row_groups=RowGroups(
            paths,
            file.astype(np.int32),
            groups.index[chosen],
            groups.num_rows[chosen],
            groups.num_bytes[chosen],
        ),
        file_layouts=dataset.file_layouts[used],
        file_sizes=dataset.file_sizes[used],
        file_digests=dataset.file_digests[used],
        stored_rows=dataset.stored_rows[chosen],
    )


def _with_rows(dataset: Dataset, matching: np.ndarray, max_rows: int | None) -> Dataset:
    groups = dataset.row_groups
    num_bytes = groups.num_bytes * matching // np.maximum(groups.num_rows, 1)
    matched = replace(dataset, row_groups=replace(groups, num_rows=matching, num_bytes=num_bytes))
    kept = _chosen(matched, np.flatnonzero(matching))
    limited = limit_rows(kept.row_groups, max_rows)
    files = len(limited.paths)
    return replace(
        kept,
        row_groups=limited,
        file_layouts=kept.file_layouts[:files],
        file_sizes=kept.file_sizes[:files],
        file_digests=kept.file_digests[:files],
        stored_rows=kept.stored_rows[: len(limited)],
    )


def _save(cache: Path, found: _Found, matching: np.ndarray, columns: list[str], filter: str | None) -> None:
    ends = np.cumsum([len(footer.num_rows) for footer in found.footers]).tolist()
    by_file = [part.tolist() for part in np.split(matching, ends[:-1])]
    footers = {
        key: footer if filter is None else replace(footer, matching=counts)
        for key, footer, counts in zip(file_keys(found.files), found.footers, by_file, strict=True)
    }
    if footers != found.known.footers:
        save_footers(cache, columns, filter, Known(footers, found.layouts, found.filter_schema))


class SegmentReader:
    """Decodes segments of a dataset; safe to call from several threads.

    The last few row groups that are read in parts are kept, because the streams of small files begin in the same one.

    Args:
        columns: the columns to return; all of the dataset by default.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str] | None = None) -> None:
        self._decoder = Decoder(dataset, dataset.columns if columns is None else columns)
        self._decoded_once = len(dataset.row_groups) <= CACHED_ROW_GROUPS
        self._recent: OrderedDict[tuple[str, int], Future[pa.Table]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, segment: Segment) -> pa.Table:
        """Return the rows of a segment; rows are counted without those that the filter leaves out.

        Raises:
            BadDataError: names file, row group and column that cannot be read, or the file that has changed.
        """
        path, index = segment.path, segment.row_group
        is_whole = segment.num_rows == self._decoder.num_rows(path, index)  # no other segment wants any of it
        table = self._decoder.table(path, index) if is_whole else self._row_group(path, index)
        return table.slice(segment.start, segment.num_rows)

    def _row_group(self, path: str, index: int) -> pa.Table:
        key = (path, index)
        with self._lock:
            future = self._recent.get(key)
            mine = future is None
            if future is None:
                future = self._recent[key] = Future()
                while len(self._recent) > CACHED_ROW_GROUPS:
                    self._recent.popitem(last=False)
        if mine:
            try:
                future.set_result(self._decoder.table(path, index))
                if self._decoded_once:  # what that took is not wanted again, and may be several times the table
                    pa.default_memory_pool().release_unused()
            except Exception as error:
                future.set_exception(error)
        return future.result()


def read_head(dataset: Dataset, num_rows: int) -> pa.Table:
    """Return up to `num_rows` rows from the start of a dataset's first row group, without decoding more of it.

    Raises:
        BadDataError: as `SegmentReader.read`.
    """
    groups = dataset.row_groups
    first = min(num_rows, int(groups.num_rows[0]))
    return Decoder(dataset, dataset.columns).head(groups.paths[0], int(groups.index[0]), first)


def read_column(dataset: Dataset, column: str) -> pa.Array:
    """Return one whole column of a dataset, in file order and in the type of its schema.

    Raises:
        BadDataError: as `SegmentReader.read`.
    """
    reader, groups = SegmentReader(dataset, [column]), dataset.row_groups
    kind = dataset.schema.field(column).type
    pieces = [reader.read(groups.segment(i)).column(column).cast(kind) for i in range(len(groups))]
    return pa.concat_arrays([chunk for piece in pieces for chunk in piece.chunks])
