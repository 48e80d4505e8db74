"""Which row groups have rows that match a filter, and how many: by partitions, by statistics, then by counting."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.data.conditions import Bounds, Condition
from recsys.data.dataset import Dataset
from recsys.data.decode import Decoder
from recsys.data.footers import FileKey, Footer, FooterParser, Layout, file_keys, read_footer
from recsys.data.sources import Files, partition_keys, partition_type

logger = logging.getLogger("recsys")

Counter = Callable[[int, Callable[[int], int]], np.ndarray]
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


class CountRows:
    """Counts the rows of the i-th row group that match the filter. It can be pickled, to count on other ranks."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __reduce__(self) -> tuple[type, tuple[Dataset]]:
        return CountRows, (self._dataset,)

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self._dataset, [])

    def __call__(self, i: int) -> int:
        groups = self._dataset.row_groups
        return self._decoder.count(groups.paths[groups.file[i]], int(groups.index[i]))


def count_in_threads(num_row_groups: int, count_one: Callable[[int], int]) -> np.ndarray:
    """Return the counts of row groups 0 … `num_row_groups` - 1, int64, found in this process."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "count") as pool:
        return np.array(list(pool.map(count_one, range(num_row_groups))), np.int64)


def prune_by_path(
    files: Files, condition: Condition, parser: FooterParser, known: Mapping[FileKey, Footer]
) -> tuple[Files, dict[FileKey, Footer]]:
    """Leave out the files whose partition keys exclude a match, so that their footers need not be read.

    The first file's footer tells which columns are keys: those that it does not have.

    Returns:
        The other files, and the footers known by now.
    """
    keys = [partition_keys(name) for name in files.names]
    footers = dict(known)
    candidates = condition.columns() & set().union(*keys)
    if not candidates:
        return files, footers
    first = file_keys(files)[0]
    try:
        if first not in footers:
            content = read_footer(files.storage, files.names[0], int(files.sizes[0]))
            footers[first] = parser.parse(files.names[0], content)
    except (pa.ArrowException, OSError, UnicodeDecodeError):  # told by whoever reads all of them
        return files, footers
    candidates -= set(parser.layouts[footers[first].layout].schema.names)
    types = {column: partition_type(each[column] for each in keys if column in each) for column in candidates}
    schema = pa.schema([(column, types.get(column, pa.null())) for column in sorted(condition.columns())])
    bounds = {
        column: _bounds(
            [_of_path(each, column) for each in keys], np.ones(len(keys), np.int64), schema.field(column).type
        )
        for column in candidates
    }
    may_match = condition.bind(schema).outcomes(bounds, len(keys)).true
    return files.select(may_match), footers


def certain_rows(
    condition: Condition, schema: pa.Schema, files: Files, footers: Sequence[Footer], layouts: Sequence[Layout]
) -> np.ndarray:
    """Return the number of rows that match in each row group, int64, -1 where they have to be counted."""
    rows = np.array([count for footer in footers for count in footer.num_rows], np.int64)
    bounds = {}
    for field in schema:
        found = [
            _of_footer(footer, layouts[footer.layout], name, field)
            for footer, name in zip(footers, files.names, strict=True)
        ]
        bounds[field.name] = _bounds([each for some in found for each in some], rows, field.type)
    may = condition.outcomes(bounds, len(rows))
    matching = np.where(may.true, np.where(may.false | may.null, -1, rows), 0)
    counted = [footer.matching or [-1] * len(footer.num_rows) for footer in footers]
    known = np.array([count for some in counted for count in some], np.int64)
    return np.where(known >= 0, known, matching)


def count_rows(dataset: Dataset, count: Counter) -> np.ndarray:
    """Return how many rows of each row group of a dataset match its filter, int64."""
    num_row_groups = len(dataset.row_groups)
    logger.info("%s: counting the rows that match the filter in %d row groups", dataset.key, num_row_groups)
    counts = np.asarray(count(num_row_groups, CountRows(dataset)), np.int64)
    assert counts.shape == (num_row_groups,), counts.shape
    return counts


def _of_path(keys: Mapping[str, str | None], column: str) -> tuple[Any, Any, int | None]:
    if column not in keys:
        return None, None, None
    return keys[column], keys[column], int(keys[column] is None)


def _of_footer(footer: Footer, layout: Layout, name: str, field: pa.Field) -> list[tuple[Any, Any, int | None]]:
    """Return least, most and number of nulls in each row group, times in units of the field's type."""
    if field.name not in layout.schema.names:
        value = partition_keys(name)[field.name]
        return [(value, value, rows if value is None else 0) for rows in footer.num_rows]
    found = footer.statistics.get(field.name, [(None, None, None)] * len(footer.num_rows))
    kind = layout.schema.field(field.name).type
    if pa.types.is_timestamp(kind) and kind != field.type:
        factor = _NANOSECONDS[kind.unit] // _NANOSECONDS[field.type.unit]
        return [(low and low * factor, high and high * factor, nulls) for low, high, nulls in found]
    return found


def _bounds(found: Sequence[tuple[Any, Any, int | None]], rows: np.ndarray, kind: pa.DataType) -> Bounds:
    nulls = np.array([-1 if count is None else count for _, _, count in found], np.int64)
    ends = [_array([each[i] for each in found], kind) for i in (0, 1)]
    return Bounds(ends[0], ends[1], nulls != 0, nulls < rows)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        if pa.types.is_integer(kind) and any(isinstance(value, str) for value in values):  # of paths
            values = [None if value is None else int(value) for value in values]
        return pa.array(values, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):  # statistics that are no use: all unknown
        return pa.nulls(len(values), kind)
