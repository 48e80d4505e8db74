"""Parquet files of a dataset: opening them all, and reading pieces of row groups."""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from recsys.data.conditions import BY_DATASET, KEY, Condition
from recsys.data.dataset import Dataset, ReadOptions
from recsys.data.decode import Decoder
from recsys.data.filters import parse_filter
from recsys.data.footer_cache import Known, load_footers, save_footers
from recsys.data.footers import Footer, FooterParser, file_keys, read_footers
from recsys.data.order import RowGroups, Segment
from recsys.data.selection import certain_rows, prune_by_path
from recsys.data.sources import find_files
from recsys.data.storage import BadDataError, Files
from recsys.errors import UserError

__all__ = ["BadDataError", "Dataset", "ReadOptions", "SegmentReader", "open_dataset", "read_column", "read_head"]

logger = logging.getLogger("recsys")

CACHED_ROW_GROUPS = 2  # by a reader, of those that are read in parts


def open_dataset(
    key: str,
    paths: str | Sequence[str],
    columns: Mapping[str, str],
    max_rows: int | None = None,
    filter: str | None = None,
    options: ReadOptions | None = None,
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
    dataset, files_left, footers = _read(key, files, columns, filter, condition, options, known)
    if condition is not None and known.footers and known.filter_schema != dataset.filter_schema:
        # What was counted may have been counted with literals of other types.
        known = Known()
        dataset, files_left, footers = _read(key, files, columns, filter, condition, options, known)
    shown = paths if isinstance(paths, str) else ", ".join(paths)
    matching = dataset.stored_rows
    if not matching.any():
        some = f" that can match '{filter}' (data.filter) by their path" if condition else ""
        advice = f"; {BY_DATASET}" if condition else ""
        raise UserError(f"config key '{key}': the Parquet files of '{shown}'{some} hold no rows{advice}")
    if condition is not None:
        matching = _matching(condition, dataset, files_left, footers)
        by_file = np.split(matching, np.cumsum([len(footer.num_rows) for footer in footers])[:-1])
        footers = [replace(each, matching=rows.tolist()) for each, rows in zip(footers, by_file, strict=True)]
    found = dict(zip(file_keys(files_left), footers, strict=True))
    if cache is not None and found != known.footers:
        save_footers(cache, list(columns), filter, Known(found, dataset.layouts, dataset.filter_schema))
    if not matching.any():
        raise UserError(f"{KEY}: no row of the Parquet files of '{shown}' ({key}) matches '{filter}'; {BY_DATASET}")
    if max_rows is not None:
        matching = np.clip(max_rows - (np.cumsum(matching) - matching), 0, matching)
    return _narrowed(dataset, matching)


def _matching(condition: Condition, dataset: Dataset, files: Files, footers: Sequence[Footer]) -> np.ndarray:
    """Return how many rows of each row group match, int64, counting where the footers do not tell."""
    schema, groups = dataset.filter_schema, dataset.row_groups
    matching = certain_rows(condition.bind(schema), schema, files, footers, dataset.layouts)
    unknown = np.flatnonzero(matching < 0)
    if len(unknown):
        logger.info("%s: counting the rows that match the filter in %d row groups", dataset.key, len(unknown))
        decoder = Decoder(dataset, [])
        paths = [groups.paths[file] for file in groups.file[unknown]]
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "count") as pool:
            matching[unknown] = list(pool.map(decoder.count, paths, groups.index[unknown].tolist()))
    return matching


def _read(
    key: str,
    files: Files,
    columns: Mapping[str, str],
    filter: str | None,
    condition: Condition | None,
    options: ReadOptions,
    known: Known,
) -> tuple[Dataset, Files, list[Footer]]:
    """Return a dataset of all rows that are stored, with the files that are left and their footers."""
    of_filter = dict.fromkeys(sorted(condition.columns()), f"{KEY} (for {key})") if condition else {}
    parser = FooterParser(key, columns, of_filter, known.layouts)
    left, footers_known = files, known.footers
    if condition is not None:
        left, footers_known = prune_by_path(files, condition, parser, footers_known)
    read, bad = read_footers(left, parser, options.max_bad_files, footers_known)
    left = left.select(np.array([footer is not None for footer in read], np.bool_))
    footers = [footer for footer in read if footer is not None]
    types = _types(files, left, footers, parser)
    counts = [len(footer.num_rows) for footer in footers]
    groups = RowGroups(
        left.names,
        np.repeat(np.arange(len(footers), dtype=np.int32), counts),
        np.array([i for count in counts for i in range(count)], np.int32),
        np.array([rows for footer in footers for rows in footer.num_rows], np.int64),
        np.array([size for footer in footers for size in footer.num_bytes], np.int64),
    )
    dataset = Dataset(
        key=key,
        row_groups=groups,
        schema=pa.schema([(column, types[column]) for column in columns if footers]),
        columns=tuple(columns),
        filter=filter,
        options=options,
        bad_files=tuple(bad),
        filter_schema=pa.schema([(column, types[column]) for column in of_filter if column in types]),
        storage=files.storage,
        layouts=tuple(parser.layouts),
        file_layouts=np.array([footer.layout for footer in footers], np.int64),
        file_sizes=left.sizes,
        file_digests=np.array([footer.digest for footer in footers], np.int64),
        stored_rows=groups.num_rows,
    )
    return dataset, left, footers


def _types(files: Files, left: Files, footers: Sequence[Footer], parser: FooterParser) -> dict[str, pa.DataType]:
    """Return types of the columns wanted that hold those of every file, and of the partition keys in all paths."""
    first: dict[int, str] = {}
    for name, footer in zip(left.names, footers, strict=True):
        first.setdefault(footer.layout, name)
    types: dict[str, pa.DataType] = {}
    for number, name in first.items():
        layout = parser.layouts[number]
        for column in parser.wanted:
            kind = layout.field(column).type if column in layout.names else files.partition_type(column)
            before = types.setdefault(column, kind)
            pair = [pa.schema([(column, each)]) for each in (before, kind)]
            try:
                types[column] = pa.unify_schemas(pair, promote_options="permissive").field(0).type
            except pa.ArrowException as error:
                raise UserError(
                    f"config key '{parser.key}': column '{column}' is {kind} in '{name}', but {before} in the files "
                    f"before it; write it with one type"
                ) from error
    return types


def _narrowed(dataset: Dataset, num_rows: np.ndarray) -> Dataset:
    """Return a dataset of so many rows of each row group, and of the row groups and files that have any."""
    groups, chosen = dataset.row_groups, np.flatnonzero(num_rows)
    used, file = np.unique(groups.file[chosen], return_inverse=True)
    num_bytes = groups.num_bytes * num_rows // np.maximum(groups.num_rows, 1)
    paths = tuple(groups.paths[i] for i in used.tolist())
    return replace(
        dataset,
        row_groups=RowGroups(paths, file.astype(np.int32), groups.index[chosen], num_rows[chosen], num_bytes[chosen]),
        file_layouts=dataset.file_layouts[used],
        file_sizes=dataset.file_sizes[used],
        file_digests=dataset.file_digests[used],
        stored_rows=dataset.stored_rows[chosen],
    )


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
