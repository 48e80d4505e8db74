"""What a Parquet footer says about single columns, read from its bytes.

pyarrow can read this too (`FileMetaData.row_group(i).column(j)`, and filters of `pyarrow.dataset`), but nothing there
catches exceptions of C++: if the footer is damaged, or the column encrypted, the process ends at once, without naming
the file. So Arrow parses only the schema, once for all files that share it, and the rest is read here.

The encoding is Thrift's compact protocol (thrift/doc/specs/thrift-compact-protocol.md), the structures are those of
parquet.thrift in https://github.com/apache/parquet-format.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

Statistics = tuple[Any, Any, int | None]  # least, most, number of nulls; each None if unknown

# Fields of FileMetaData, of SchemaElement, of RowGroup and ColumnChunk, of ColumnMetaData, and of Statistics.
_VERSION, _SCHEMA, _NUM_ROWS = 1, 2, 3
_NAME, _NUM_CHILDREN = 4, 5
_COLUMNS, _META_DATA = 1, 3
_PATH, _NUM_VALUES, _STATISTICS = 3, 5, 12
_NULL_COUNT, _MOST, _LEAST = 3, 5, 6
# Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_NO_ROWS = bytes([1 << 4 | _I64, 0])  # the field of a file's rows as 0, if nobody reads it


def schema_end(footer: bytes) -> int:
    """Return where the schema ends, which is the first part of a footer after the version.

    Raises:
        OSError: the footer is damaged.
    """
    with _damaged("the footer's schema is damaged"):
        return read_fields(footer, 0, 0, _SCHEMA)[1]


def num_row_groups(footer: bytes, at: int) -> tuple[int, int]:
    """Return how many rows and how many row groups a file has.

    Args:
        at: where the schema ends.

    Raises:
        OSError: the footer is damaged.
    """
    with _damaged("the footer does not say how many rows there are"):
        fields, at = read_fields(footer, at, _SCHEMA, _NUM_ROWS)
        if footer[at] != 1 << 4 | _LIST:  # the next field
            raise ValueError("no row groups")
        return fields[_NUM_ROWS], _list_header(footer, at + 1)[0]


def row_group_bounds(footer: bytes) -> list[int]:
    """Return where each row group of a footer begins, followed by where the last one ends.

    They are found by their last column: going through all columns would take longer than is saved by not parsing them.

    Raises:
        OSError: the footer is damaged, or a row group does not have the last column exactly once.
    """
    schema, message = schema_end(footer), "the row groups of the footer cannot be told apart"
    with _damaged(message):
        column = _path_field(_last_path(footer[:schema]))
        count, at = _list_header(footer, read_fields(footer, schema, _SCHEMA, _NUM_ROWS)[1] + 1)
        bounds = [at]
        while (place := footer.find(column, at)) >= 0:
            for field, start in ((_PATH, place + len(column)), (_META_DATA, None), (_COLUMNS, None)):
                at = read_fields(footer, at if start is None else start, field)[1]
            bounds.append(at)
    if len(bounds) != count + 1:
        raise OSError(message)
    return bounds


def with_one_row_group(head: bytes, row_group: bytes, rest: bytes) -> bytes:
    """Return a footer with only one of its row groups, which then has the number 0.

    Args:
        head: the footer up to the end of the schema. row_group: its bytes from one of `row_group_bounds` to the next.
        rest: the bytes after the last row group.
    """
    return head + _NO_ROWS + bytes([1 << 4 | _LIST, 1 << 4 | _STRUCT]) + row_group + rest


def without_row_groups(head: bytes) -> bytes:
    """Return the footer of a file without rows, by the `head` of another: to the end of the schema."""
    return head + _NO_ROWS + bytes([1 << 4 | _LIST, _STRUCT, 0])


@lru_cache(maxsize=64)
def _last_path(schema: bytes) -> tuple[str, ...]:
    """Return the names from the root to the last column; `schema` is the beginning of a footer."""
    count, at = _list_header(schema, read_fields(schema, 0, 0, _VERSION)[1] + 1)
    above: list[tuple[str, int]] = []  # the groups around the next column, and how many more children each has
    paths: list[tuple[str, ...]] = [()]  # of columns
    for _ in range(count):
        fields, at = read_fields(schema, at)
        while above and not above[-1][1]:
            above.pop()
        if above:
            above[-1] = above[-1][0], above[-1][1] - 1
        name, children = fields[_NAME].decode(), fields.get(_NUM_CHILDREN) or 0
        if children:
            above.append((name, children))
        else:
            paths.append((*(outer for outer, _ in above[1:]), name))
    if paths.index(paths[-1]) < len(paths) - 1:
        raise ValueError("two columns of one name")
    return paths[-1]


def num_values(footer: bytes, path: Sequence[str], num_row_groups: int) -> list[int]:
    """Return how many values a column has in each row group, counting nulls, and one for each empty list.

    Args:
        footer: bytes of FileMetaData, as in the file. path: names from the root of the schema to the column.

    Raises:
        OSError: the footer does not have the number exactly once for each row group.
    """
    counts = [_count(fields, _NUM_VALUES) for fields in _column(footer, path, num_row_groups, _NUM_VALUES)]
    if None in counts:
        raise OSError(f"the footer does not say how many values column '{'.'.join(path)}' has")
    return [count or 0 for count in counts]


def statistics(footer: bytes, path: Sequence[str], num_row_groups: int, dtype: pa.DataType) -> list[Statistics]:
    """Return the statistics of a column in each row group.

    Only the fields `min_value` and `max_value` are used, whose order is defined. Strings may be cut short in them, but
    are still bounds. Dates are days, times are counts of their unit. Decimals and other types have no bounds.

    Args:
        dtype: Arrow type of the column in this file. Other arguments and errors: as for `num_values`.
    """
    columns = [fields.get(_STATISTICS) for fields in _column(footer, path, num_row_groups, _STATISTICS)]
    read = [fields if isinstance(fields, dict) else {} for fields in columns]
    return [(_value(f.get(_LEAST), dtype), _value(f.get(_MOST), dtype), _count(f, _NULL_COUNT)) for f in read]


def read_fields(data: bytes, at: int, number: int = 0, last: int = 1 << 16) -> tuple[dict[int, Any], int]:
    """Return the fields of a structure up to field `last`, by number, and the place after them.

    Args:
        at: place of the first field to read. number: number of the field before that.

    Raises:
        IndexError, ValueError, RecursionError: the structure is damaged.
    """
    fields: dict[int, Any] = {}
    while number < last and (header := data[at]):  # 0 ends the structure
        at += 1
        if header >> 4:
            number += header >> 4
        else:
            number, at = _read(data, at, _I16)
        fields[number], at = _read(data, at, header & 15)
    return fields, at + (number < last)


def _read(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (_I16, _I32, _I64):
        value, at = _unsigned(data, at)
        return (value >> 1) ^ -(value & 1), at
    if kind == _BINARY:
        length, at = _unsigned(data, at)
        return data[at : at + length], at + length
    if kind == _STRUCT:
        return read_fields(data, at)
    if kind in (_TRUE, _FALSE):  # the value is in the header
        return kind == _TRUE, at
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    if kind not in (_LIST, _SET):
        raise ValueError(f"type {kind}")
    element, (length, at) = data[at] & 15, _list_header(data, at)
    if length > len(data):
        raise ValueError(f"list of {length}")
    for _ in range(length):
        _, at = _read(data, at, _BYTE if element in (_TRUE, _FALSE) else element)
    return None, at


def _list_header(data: bytes, at: int) -> tuple[int, int]:
    return _unsigned(data, at + 1) if data[at] >> 4 == 15 else (data[at] >> 4, at + 1)


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


@contextmanager
def _damaged(message: str) -> Iterator[None]:
    try:
        yield
    except (IndexError, ValueError, KeyError, RecursionError) as error:
        raise OSError(message) from error


def _count(fields: dict[int, Any], number: int) -> int | None:
    count = fields.get(number)
    return count if isinstance(count, int) and 0 <= count < 1 << 62 else None


def _column(footer: bytes, path: Sequence[str], num_row_groups: int, last: int) -> list[dict[int, Any]]:
    """Return the fields of a column's ColumnMetaData after its path, up to `last`, in each row group."""
    wanted, columns = _path_field(tuple(path)), []
    place = footer.find(wanted)
    with _damaged(message := f"the footer does not describe column '{'.'.join(path)}' once in each row group"):
        while place >= 0:
            fields, end = read_fields(footer, place + len(wanted), _PATH, last)
            columns.append(fields)
            place = footer.find(wanted, end)
    if len(columns) != num_row_groups:
        raise OSError(message)
    return columns


@lru_cache(maxsize=4096)
def _path_field(path: tuple[str, ...]) -> bytes:
    """Return a column's path as a footer encodes it: field 3 after field 2, a list of strings.

    No other part of a footer has these bytes.
    """
    names = [name.encode() for name in path]
    size = bytes([len(names) << 4 | _BINARY]) if len(names) < 15 else bytes([0xF0 | _BINARY]) + _varint(len(names))
    return bytes([1 << 4 | _LIST]) + size + b"".join(_varint(len(name)) + name for name in names)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _value(data: Any, dtype: pa.DataType) -> Any:
    """Decode a value of the statistics from Parquet's plain encoding; None if it is of no use."""
    if not isinstance(data, bytes) or pa.types.is_binary(dtype):
        return data if isinstance(data, bytes) else None
    if pa.types.is_string(dtype):
        try:
            return data.decode()
        except UnicodeDecodeError:  # cut within a character
            return None
    encoding = _plain_encoding(dtype)
    if encoding is None or len(data) != encoding.itemsize:
        return None
    value = np.frombuffer(data, encoding)[0].item()
    return None if value != value else value


@lru_cache(maxsize=64)
def _plain_encoding(dtype: pa.DataType) -> np.dtype | None:
    if pa.types.is_integer(dtype):
        return np.dtype(f"<{'i' if pa.types.is_signed_integer(dtype) else 'u'}{8 if dtype.bit_width == 64 else 4}")
    if pa.types.is_date32(dtype) or pa.types.is_timestamp(dtype):
        return np.dtype(f"<i{dtype.bit_width // 8}")
    if pa.types.is_floating(dtype):
        return np.dtype(f"<f{dtype.bit_width // 8}")
    return np.dtype(bool) if pa.types.is_boolean(dtype) else None
