"""What a Parquet footer says of single columns, taken from its bytes.

pyarrow has this too (`FileMetaData.row_group(i).column(j)`), but nothing there takes an exception of C++: if the footer
is damaged, or the column encrypted, the process ends at once, without a word about which file it was. So only the
schema is left to Arrow, once for all files that have it, and the rest is read here.

The encoding is Thrift's compact protocol (thrift/doc/specs/thrift-compact-protocol.md), the structures are those of
parquet.thrift in https://github.com/apache/parquet-format.
"""

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa

Statistics = tuple[Any, Any, int | None]  # least, most, number of nulls; each None where unknown

# Fields of FileMetaData, of ColumnMetaData, and of Statistics.
_SCHEMA, _NUM_ROWS = 2, 3
_PATH, _NUM_VALUES, _STATISTICS = 3, 5, 12
_NULL_COUNT, _MOST, _LEAST = 3, 5, 6
# Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


def schema_end(footer: bytes) -> int:
    """Return where a footer's schema ends, which is the first part of it, after the version.

    Raises:
        OSError: the footer is damaged.
    """
    try:
        return _fields(footer, 0, 0, _SCHEMA)[1]
    except (IndexError, ValueError, RecursionError) as error:
        raise OSError("the footer's schema is damaged") from error


def num_row_groups(footer: bytes, at: int) -> tuple[int, int]:
    """Return how many rows a file has, and how many row groups.

    Args:
        at: where the schema ends.

    Raises:
        OSError: the footer is damaged.
    """
    try:
        fields, at = _fields(footer, at, _SCHEMA, _NUM_ROWS)
        if footer[at] != 1 << 4 | _LIST:  # the next field
            raise ValueError("no row groups")
        count = footer[at + 1] >> 4
        return fields[_NUM_ROWS], _unsigned(footer, at + 2)[0] if count == 15 else count
    except (IndexError, ValueError, KeyError, RecursionError) as error:
        raise OSError("the footer does not say how many rows there are") from error


def num_values(footer: bytes, path: Sequence[str], num_row_groups: int) -> list[int]:
    """Return how many values a column has in each row group, nulls included; of a list also one for each empty list.

    Args:
        footer: FileMetaData as it is in the file. path: names from the root of the schema to the column.

    Raises:
        OSError: the footer does not say it once for each row group.
    """
    found = [_count(fields, _NUM_VALUES) for fields in _column(footer, path, num_row_groups, _NUM_VALUES)]
    if None in found:
        raise OSError(f"the footer does not say how many values column '{'.'.join(path)}' has")
    return [count or 0 for count in found]


def statistics(footer: bytes, path: Sequence[str], num_row_groups: int, kind: pa.DataType) -> list[Statistics]:
    """Return the statistics of a column in each row group.

    Only the fields `min_value` and `max_value` are used, whose order is defined; strings may be cut short there, and
    are bounds all the same. Dates are days, times are numbers of their unit. Decimals and others have no bounds.

    Args:
        kind: Arrow type of the column in this file. Other arguments and errors: as for `num_values`.
    """
    found = []
    for fields in _column(footer, path, num_row_groups, _STATISTICS):
        known = fields.get(_STATISTICS)
        known = known if isinstance(known, dict) else {}
        least, most = (_value(known.get(end), kind) for end in (_LEAST, _MOST))
        found.append((least, most, _count(known, _NULL_COUNT)))
    return found


def _count(fields: dict[int, Any], number: int) -> int | None:
    count = fields.get(number)
    return count if isinstance(count, int) and 0 <= count < 1 << 62 else None


def _column(footer: bytes, path: Sequence[str], num_row_groups: int, last: int) -> list[dict[int, Any]]:
    """Return the fields of a column's ColumnMetaData after its path, up to `last`, in each row group."""
    wanted, found = _path_field(tuple(path)), []
    place = footer.find(wanted)
    try:
        while place >= 0:
            fields, end = _fields(footer, place + len(wanted), _PATH, last)
            found.append(fields)
            place = footer.find(wanted, end)
    except (IndexError, ValueError, RecursionError):
        found.clear()
    if len(found) != num_row_groups:
        raise OSError(f"the footer does not describe column '{'.'.join(path)}' once in each row group")
    return found


@lru_cache(maxsize=4096)
def _path_field(path: tuple[str, ...]) -> bytes:
    """Return a column's path as it stands in a footer: a list of strings, the third field after the second.

    Nothing else in a footer looks so.
    """
    names = [name.encode() for name in path]
    size = bytes([len(names) << 4 | _BINARY]) if len(names) < 15 else bytes([0xF0 | _BINARY]) + _varint(len(names))
    return bytes([1 << 4 | _LIST]) + size + b"".join(_varint(len(name)) + name for name in names)


def _fields(data: bytes, at: int, number: int, last: int) -> tuple[dict[int, Any], int]:
    """Return fields of a structure up to field `last`, by number, and the place after them.

    Integers, strings and structures only; other fields are skipped.

    Args:
        at: place of the first field. number: of the field before it.
    """
    found: dict[int, Any] = {}
    while number < last:
        header = data[at]
        at += 1
        if header == 0:  # the end of the structure
            break
        kind = header & 15
        if header >> 4:
            number += header >> 4
        else:
            number, at = _integer(data, at)
        if kind in (_I16, _I32, _I64):
            found[number], at = _integer(data, at)
        elif kind == _BINARY:
            length, at = _unsigned(data, at)
            found[number] = data[at : at + length]
            at += length
        elif kind == _STRUCT:
            found[number], at = _fields(data, at, 0, 1 << 16)
        else:
            at = _skip(data, at, kind)
    return found, at


def _skip(data: bytes, at: int, kind: int) -> int:
    if kind in (_TRUE, _FALSE):  # the value is in the header
        return at
    if kind in (_BYTE, _DOUBLE):
        return at + (1 if kind == _BYTE else 8)
    if kind not in (_LIST, _SET):
        raise ValueError(f"type {kind}")
    header, at = data[at], at + 1
    length, element = header >> 4, header & 15
    if length == 15:
        length, at = _unsigned(data, at)
    if length > len(data):
        raise ValueError(f"list of {length}")
    for _ in range(length):
        if element in (_I16, _I32, _I64):
            _, at = _unsigned(data, at)
        elif element == _BINARY:
            size, at = _unsigned(data, at)
            at += size
        elif element == _STRUCT:
            _, at = _fields(data, at, 0, 1 << 16)
        else:  # a bool in a list takes a byte
            at = at + 1 if element in (_TRUE, _FALSE) else _skip(data, at, element)
    return at


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(value: int) -> bytes:
    head = b""
    while value > 127:
        head += bytes([value & 127 | 128])
        value >>= 7
    return head + bytes([value])


def _value(data: Any, kind: pa.DataType) -> Any:
    """Return a value of the statistics, in Parquet's plain encoding, or None if it is no use."""
    if not isinstance(data, bytes):
        return None
    if pa.types.is_string(kind):
        try:
            return data.decode()
        except UnicodeDecodeError:  # cut within a character
            return None
    if pa.types.is_binary(kind):
        return data
    if pa.types.is_boolean(kind) and len(data) == 1:
        return data != b"\0"
    if pa.types.is_integer(kind) and len(data) == (8 if kind.bit_width == 64 else 4):
        return int.from_bytes(data, "little", signed=pa.types.is_signed_integer(kind))
    if (pa.types.is_date32(kind) and len(data) == 4) or (pa.types.is_timestamp(kind) and len(data) == 8):
        return int.from_bytes(data, "little", signed=True)
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        width = kind.bit_width // 8
        value = struct.unpack("<f" if width == 4 else "<d", data)[0] if len(data) == width else math.nan
        return None if math.isnan(value) else value
    return None
