"""Which row groups have rows that match a filter, and how many: by partitions, by statistics, then by counting."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.data.conditions import Bounds, Condition
from recsys.data.dataset import Dataset
from recsys.data.decode import Decoder
from recsys.data.footers import FileKey, Footer, FooterParser, file_keys, read_footer
from recsys.data.sources import Files, partition_keys
from recsys.data.thrift import Statistics

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
    footers, first = dict(known), file_keys(files)[0]
    candidates = condition.columns() & set().union(*map(partition_keys, files.names))
    if not candidates:
        return files, footers
    try:
        if first not in footers:
            content = read_footer(files.storage, files.names[0], int(files.sizes[0]))
            footers[first] = parser.parse(files.names[0], content)
    except (pa.ArrowException, OSError, UnicodeDecodeError):  # told by whoever reads all of them
        return files, footers
    candidates -= set(parser.layouts[footers[first].layout].names)
    schema = pa.schema(
        [(name, files.partition_type(name) if name in candidates else pa.null()) for name in condition.columns()]
    )
    # A file counts as one row, of whose columns only the keys are known.
    each = Footer(0, [1], [0], 0)
    rows = certain_rows(condition.bind(schema), schema, files, [each] * len(files.names), [pa.schema([])])
    return files.select(rows != 0), footers


def certain_rows(
    condition: Condition, schema: pa.Schema, files: Files, footers: Sequence[Footer], layouts: Sequence[pa.Schema]
) -> np.ndarray:
    """Return the number of rows that match in each row group, int64, -1 where they have to be counted."""
    rows = np.array([count for footer in footers for count in footer.num_rows], np.int64)
    bounds = {}
    for field in schema:
        known = [
            _statistics(footer, layouts[footer.layout], name, field)
            for footer, name in zip(footers, files.names, strict=True)
        ]
        bounds[field.name] = _bounds(list(chain.from_iterable(known)), rows, field.type)
    may = condition.outcomes(bounds, len(rows))
    matching = np.where(may.true, np.where(may.false | may.null, -1, rows), 0)
    counted = [footer.matching or [-1] * len(footer.num_rows) for footer in footers]
    before = np.array(list(chain.from_iterable(counted)), np.int64)
    return np.where(before >= 0, before, matching)


def count_rows(dataset: Dataset, count: Counter) -> np.ndarray:
    """Return how many rows of each row group of a dataset match its filter, int64."""
    num_row_groups = len(dataset.row_groups)
    logger.info("%s: counting the rows that match the filter in %d row groups", dataset.key, num_row_groups)
    counts = np.asarray(count(num_row_groups, CountRows(dataset)), np.int64)
    assert counts.shape == (num_row_groups,), counts.shape
    return counts


def _statistics(footer: Footer, layout: pa.Schema, name: str, field: pa.Field) -> list[Statistics]:
    """Return least, most and number of nulls in each row group, times in units of the field's type."""
    if field.name not in layout.names and field.name in (keys := partition_keys(name)):
        value = keys[field.name]
        return [(value, value, rows if value is None else 0) for rows in footer.num_rows]
    read = footer.statistics.get(field.name, [(None, None, None)] * len(footer.num_rows))
    kind = layout.field(field.name).type if field.name in layout.names else field.type
    if pa.types.is_timestamp(kind) and kind != field.type:
        factor = _NANOSECONDS[kind.unit] // _NANOSECONDS[field.type.unit]
        return [(low and low * factor, high and high * factor, nulls) for low, high, nulls in read]
    return read


def _bounds(read: Sequence[Statistics], rows: np.ndarray, kind: pa.DataType) -> Bounds:
    least, most, counts = zip(*read, strict=True) if read else ((), (), ())
    nulls = np.array([-1 if count is None else count for count in counts], np.int64)
    return Bounds(_array(least, kind), _array(most, kind), nulls != 0, nulls < rows)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        if pa.types.is_integer(kind) and any(isinstance(value, str) for value in values):  # of paths
            values = [None if value is None else int(value) for value in values]
        return pa.array(values, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):  # statistics that are no use: all unknown
        return pa.nulls(len(values), kind)
