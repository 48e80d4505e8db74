"""Which row groups have rows that match a filter, and how many: by partitions, then by statistics."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.data.conditions import Bounds, Condition
from recsys.data.fields import Place, places
from recsys.data.footers import FileKey, Footer, FooterParser, file_keys, metadata_of, schema_read
from recsys.data.storage import Files, partition_keys
from recsys.data.thrift import Statistics
from recsys.ids import NANOSECONDS


def prune_by_path(files: Files, condition: Condition, parser: FooterParser, known: Mapping[FileKey, Footer]) -> Files:
    """Leave out the files whose partition keys exclude a match, so that their footers need not be read.

    It then does not matter whether such a file can be read, or has the needed columns. A key of a path counts if the
    first readable file has no column of that name.

    Args:
        known: footers of an earlier run.
    """
    candidates = condition.columns() & set().union(*map(partition_keys, files.names))
    if not candidates or (stored := _stored_columns(files, parser, known)) is None:
        return files
    of_path = {name: files.partition_type(name, parser.like) for name in candidates - stored}
    schema = pa.schema([(name, of_path.get(name, pa.null())) for name in condition.columns()])
    # A file counts as one row; of its columns, only the keys are known.
    footer = Footer(0, [1], [0], 0)
    rows = certain_rows(condition, schema, files, [footer] * len(files.names), [pa.schema([])])
    return files.select(rows != 0)


def _stored_columns(files: Files, parser: FooterParser, known: Mapping[FileKey, Footer]) -> set[str] | None:
    """Return the columns of the first readable file, and fields inside them, or None if no file can be read."""
    for key in file_keys(files):
        if key in known:
            return set(parser.layouts[known[key].layout].names)
        name, size, _ = key
        with suppress(pa.ArrowException, OSError, UnicodeDecodeError):  # reading all footers will report it
            footer = metadata_of(files.storage, name, size)
            return set(places(schema_read(footer), footer.schema))
    return None


def certain_rows(
    condition: Condition, schema: pa.Schema, files: Files, footers: Sequence[Footer], layouts: Sequence[pa.Schema]
) -> np.ndarray:
    """Return how many rows match in each row group, int64; -1 where they must be counted."""
    rows = np.array([count for footer in footers for count in footer.num_rows], np.int64)
    condition, bounds = condition.bind(schema), {}
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


def _statistics(footer: Footer, layout: pa.Schema, name: str, field: pa.Field) -> list[Statistics]:
    """Return least, most and number of nulls in each row group; times are in units of the field's type."""
    if field.name not in layout.names and field.name in (keys := partition_keys(name)):
        value = keys[field.name]
        return [(value, value, rows if value is None else 0) for rows in footer.num_rows]
    read = footer.statistics.get(field.name, [(None, None, None)] * len(footer.num_rows))
    is_stored = field.name in layout.names
    if is_stored and len(Place.of(layout.field(field.name)).steps) > 1:
        read = [(low, high, None) for low, high, _ in read]  # some writers leave out the nulls of the struct
    dtype = layout.field(field.name).type if is_stored else field.type
    if pa.types.is_timestamp(dtype) and dtype != field.type:
        factor = NANOSECONDS[dtype.unit] // NANOSECONDS[field.type.unit]
        return [(low and low * factor, high and high * factor, nulls) for low, high, nulls in read]
    return read


def _bounds(read: Sequence[Statistics], rows: np.ndarray, dtype: pa.DataType) -> Bounds:
    least, most, counts = zip(*read, strict=True)
    nulls = np.array([-1 if count is None else count for count in counts], np.int64)
    return Bounds(_array(least, dtype), _array(most, dtype), nulls != 0, nulls < rows)


def _array(values: Sequence[Any], dtype: pa.DataType) -> pa.Array:
    try:
        if pa.types.is_integer(dtype) and any(isinstance(value, str) for value in values):  # texts are from paths
            values = [None if value is None else int(value) for value in values]
        return pa.array(values, dtype)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):  # useless statistics count as unknown
        return pa.nulls(len(values), dtype)
