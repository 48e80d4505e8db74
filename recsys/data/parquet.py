"""Opening the Parquet files of a dataset, and reading their first rows or whole columns."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.config import DataConfig
from recsys.data.conditions import BY_DATASET, KEY, Condition
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.fields import names
from recsys.data.filters import parse_filter
from recsys.data.footer_cache import CachedFooters, load_footers, save_footers
from recsys.data.footers import Footer, FooterParser, file_keys, metadata_of, read_footers
from recsys.data.made import Made
from recsys.data.order import RowGroups
from recsys.data.selection import certain_rows, prune_by_path
from recsys.data.sources import find_files
from recsys.data.storage import BadDataError, Files, partition_keys, reason
from recsys.errors import UserError, counted
from recsys.runtime.cgroups import num_cores
from recsys.runtime.live import Task
from recsys.runtime.logs import logger

_SAMPLED_ROWS = 4096  # in which ids of texts are counted


def open_dataset(
    key: str,
    paths: str | Sequence[str],
    columns: Mapping[str, str],
    max_rows: int | None = None,
    filter: str | None = None,
    options: DataConfig | None = None,
    cache: Path | None = None,
    like: pa.Schema | None = None,
) -> Dataset:
    """Find files, read their footers, and count the rows that match the filter.

    A column that a file lacks may be a Hive partition key in its path (…/day=2026-11-01/part-0.parquet), or optional.

    Args:
        key: config key of `paths`, for messages. paths: directory, glob, file, URI, or a list of these: `find_files`.
        columns: needed column → config key that asks for it. max_rows: use only this many matching rows, the first.
        filter: expression that rows must match; see `parse_filter`. options: section `data`; only how to read is used.
        cache: file that keeps footers and counts, so that a resumed run reads only files that have changed.
        like: columns of the data that these belong to: a partition key that is text there is text here.

    Raises:
        UserError: there are no files or (matching) rows, a column is missing, or types or filter do not fit.
        BadDataError: a footer or row group cannot be read.
    """
    options = options or DataConfig()
    condition = None if filter is None else parse_filter(filter)
    shown = paths if isinstance(paths, str) else ", ".join(paths)
    of_filter = dict.fromkeys(sorted(condition.columns()), f"{KEY} (for {key})") if condition else {}
    read_for = [*columns, *(name for name in options.optional_columns if name in {**columns, **of_filter})]
    cached = CachedFooters() if cache is None else load_footers(cache, read_for, filter)
    parser = FooterParser(key, columns, of_filter, options.optional_columns, cached.layouts, like)
    files, footers, dataset = _read(find_files(key, paths, options.retries), parser, condition, options, cached)
    matching, dataset = dataset.stored_rows, replace(dataset, filter=filter)
    if not matching.any():
        raise UserError(_no_rows(key, shown, filter))
    if condition is not None:
        matching, footers = _counted(condition, dataset, files, footers)
    facts = dict(zip(file_keys(files), footers, strict=True))
    if cache is not None and (facts != cached.footers or dataset.schema != cached.schema):
        current = CachedFooters(facts, dataset.layouts, dataset.filter_schema, dataset.schema)
        save_footers(cache, read_for, filter, current)
    if not matching.any():
        raise UserError(f"{KEY}: no row of the Parquet files of '{shown}' ({key}) matches '{filter}'; {BY_DATASET}")
    return _with_readable_head(narrowed(dataset, matching, max_rows))


def _no_rows(key: str, shown: str, filter: str | None) -> str:
    some = "" if filter is None else f" that can match '{filter}' (data.filter) by their path"
    advice = "" if filter is None else f"; {BY_DATASET}"
    return f"config key '{key}': the Parquet files of '{shown}'{some} hold no rows{advice}"


def _counted(
    condition: Condition, dataset: Dataset, files: Files, footers: Sequence[Footer]
) -> tuple[np.ndarray, list[Footer]]:
    """Return how many rows of each row group match, int64, counting if footers do not say; and footers that do.

    If unreadable rows are left out, all rows of a row group that cannot be counted match: training then reads and
    leaves them out, and counts them. Footers do not keep that, so that another start with other options counts again.
    """
    schema = dataset.filter_schema
    matching = certain_rows(condition, schema, files, footers, dataset.layouts)
    unknown = np.flatnonzero(matching < 0)
    if len(unknown):
        logger.info(
            "%s: counting the rows that match the filter in %s", dataset.key, counted(len(unknown), "row group")
        )
        task, reader = Task("counting rows", len(unknown), "row groups"), SegmentReader(dataset, [])

        def count(group: int) -> int:
            with suppress(*dataset.skipped):
                return reader.count(group)
            return -1

        with task, ThreadPoolExecutor(min(16, num_cores()), "count") as pool:
            for group, num_rows in zip(unknown, pool.map(count, unknown.tolist()), strict=True):
                matching[group] = num_rows
                task.done += 1
    by_file = np.split(matching, np.cumsum([len(footer.num_rows) for footer in footers])[:-1])
    footers = [
        replace(footer, matching=rows.tolist() if (rows >= 0).all() else None)
        for footer, rows in zip(footers, by_file, strict=True)
    ]
    return np.where(matching < 0, dataset.stored_rows, matching), footers


def _with_readable_head(dataset: Dataset) -> Dataset:
    """Let the head be the first row group that can be read, if up to `data.max_bad_rows` others may be left out."""
    left = dataset.options.max_bad_rows
    for number in dataset.heads().tolist() if dataset.skipped else ():
        with suppress(*dataset.skipped):
            SegmentReader(dataset).row_group(number)
            return replace(dataset, head_number=number)
        left -= dataset.row_groups.segment(number).num_rows
        if left < 0:
            break
    return dataset


def _read(
    files: Files, parser: FooterParser, condition: Condition | None, options: DataConfig, cache: CachedFooters
) -> tuple[Files, list[Footer], Dataset]:
    """Return the readable files that may have matching rows, their footers, and a dataset of all their rows."""
    candidates = files if condition is None else prune_by_path(files, condition, parser, cache.footers)
    read, bad = read_footers(candidates, parser, options.max_bad_files, cache.footers)
    readable = candidates.select(np.array([footer is not None for footer in read], np.bool_))
    footers = [footer for footer in read if footer is not None]
    types = _types(files, readable, footers, parser)
    schema, filter_schema = (
        pa.schema([(column, types[column]) for column in columns if footers])
        for columns in (parser.columns, parser.filtered)
    )
    if condition is not None and filter_schema != cache.filter_schema:
        # Earlier counts may have compared with literals of other types.
        footers = [replace(footer, matching=None) for footer in footers]
    counts = [len(footer.num_rows) for footer in footers]
    groups = RowGroups(
        readable.names,
        np.repeat(np.arange(len(footers), dtype=np.int32), counts),
        np.array([i for count in counts for i in range(count)], np.int32),
        np.array([rows for footer in footers for rows in footer.num_rows], np.int64),
        np.array([size for footer in footers for size in footer.num_bytes], np.int64),
    )
    dataset = Dataset(
        key=parser.key,
        row_groups=groups,
        schema=schema,
        columns=tuple(parser.columns),
        filter=None,
        options=options,
        bad_files=tuple(bad),
        filter_schema=filter_schema,
        storage=files.storage,
        layouts=tuple(parser.layouts),
        file_layouts=np.array([footer.layout for footer in footers], np.int64),
        file_sizes=readable.sizes,
        file_digests=np.array([footer.digest for footer in footers], np.int64),
        stored_rows=groups.num_rows,
    )
    return readable, footers, dataset


def _types(files: Files, readable: Files, footers: Sequence[Footer], parser: FooterParser) -> dict[str, pa.DataType]:
    """Return types for the wanted columns that can hold the values of every file, and of partition keys in paths."""
    first: dict[int, str] = {}
    for name, footer in zip(readable.names, footers, strict=True):
        first.setdefault(footer.layout, name)
    types: dict[str, pa.DataType] = {}
    for number, name in first.items():
        layout = parser.layouts[number]
        for column in parser.wanted:
            dtype = layout.field(column).type if column in layout.names else files.partition_type(column, parser.like)
            before = types.setdefault(column, dtype)
            try:
                types[column] = unified(before, dtype)
            except pa.ArrowException as error:
                raise UserError(
                    f"config key '{parser.key}': column '{column}' is {dtype} in '{name}', but {before} in the files "
                    f"before it; write it with the same type"
                ) from error
    return types


def unified(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a type that the values of two can be cast to. Raises pa.ArrowException if there is none."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(unified(one.value_type, other.value_type))
    dtypes = [one, other]
    if any(map(pa.types.is_decimal, dtypes)):
        dtypes = [_beside_decimals(dtype) for dtype in dtypes]
    schemas = [pa.schema([("", dtype)]) for dtype in dtypes]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _beside_decimals(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(dtype):  # Arrow would unify it with decimals to a digit less than its cast needs
        return pa.decimal128(len(str(2**dtype.bit_width)), 0)
    return pa.float64() if pa.types.is_floating(dtype) else dtype  # Arrow would put decimals into halves


def narrowed(dataset: Dataset, num_rows: np.ndarray, max_rows: int | None = None) -> Dataset:
    """Cut a dataset to `num_rows` rows of each row group, `max_rows` in all at most, without empty groups and files."""
    if max_rows is not None:
        num_rows = np.clip(max_rows - (np.cumsum(num_rows) - num_rows), 0, num_rows)
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


def with_made(dataset: Dataset, made: Mapping[str, Made]) -> Dataset:
    """Return a dataset with columns that are made of its own, whose lists count towards the bytes of its row groups.

    Footers do not tell how many ids are in texts: as many as in the first rows.

    Raises:
        UserError: a column has a type that does not fit, or texts that are not UTF-8.
        BadDataError: see `SegmentReader.read`.
    """
    dataset = dataset.with_made(made)
    if not (lists := [*dataset.split]):
        return dataset
    dataset = _with_readable_head(dataset)  # texts that can be read may not be split
    head = SegmentReader(dataset, lists).head(dataset.head.number, min(_SAMPLED_ROWS, dataset.head.num_rows))
    of_head = sum(
        (8 if made[name].integers else 4) * (pc.sum(pc.list_value_length(column)).as_py() or 0)
        for name, column in zip(lists, head.columns, strict=True)
    )
    groups = dataset.row_groups
    num_bytes = groups.num_bytes + groups.num_rows * of_head // max(1, head.num_rows)
    return replace(dataset, row_groups=replace(groups, num_bytes=num_bytes))


def column_names(key: str, paths: str | Sequence[str], retries: int) -> set[str]:
    """Return the names of the columns in the first of some files; for structs, those of their fields.

    Arguments are those of `open_dataset`.

    Raises:
        UserError: there is no file. BadDataError: its footer cannot be read.
    """
    files = find_files(key, paths, retries)
    name = files.names[0]
    try:
        footer = metadata_of(files.storage, name, int(files.sizes[0]))
        return {*names(footer.schema.to_arrow_schema()), *partition_keys(name)}
    except (pa.ArrowException, OSError) as error:
        problem = f"'{name}' is not a readable Parquet file ({reason(error)}); write it again"
        raise BadDataError(f"config key '{key}': {problem}", name) from error


def read_head(dataset: Dataset, num_rows: int) -> pa.Table:
    """Return up to `num_rows` rows from the start of the row group `Dataset.head`, decoding no more of it.

    Raises:
        BadDataError: see `SegmentReader.read`.
    """
    return SegmentReader(dataset).head(dataset.head.number, min(num_rows, dataset.head.num_rows))


def read_column(dataset: Dataset, column: str) -> pa.Array:
    """Return one whole column of a dataset, in file order and in the type of its schema.

    Raises:
        BadDataError: see `SegmentReader.read`.
    """
    dtype = dataset.schema.field(column).type
    columns = [table.column(column).cast(dtype) for table in SegmentReader(dataset, [column]).tables()]
    return pa.concat_arrays([chunk for values in columns for chunk in values.chunks])
