"""Writes Parquet like different writers do: encodings, pages and row groups of any kind, and equivalent types."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_NOT_WRITTEN = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OSError)
_ENCODINGS: list[tuple[Callable[[pa.DataType], bool], list[str]]] = [
    (lambda kind: pa.types.is_integer(kind) and kind.bit_width >= 32, ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"]),
    (pa.types.is_floating, ["BYTE_STREAM_SPLIT"]),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_binary(kind), ["DELTA_BYTE_ARRAY"]),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), ["DELTA_LENGTH_BYTE_ARRAY"]),
    (pa.types.is_boolean, ["RLE"]),
]
_INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
# Test of a type, and other types that may hold the same values.
_ALIKE: list[tuple[Callable[[pa.DataType], bool], list[pa.DataType]]] = [
    (lambda kind: kind == pa.uint64(), []),  # other types hash values beyond int64 to other rows, or do not fit it
    (pa.types.is_integer, [*_INTEGERS, *_INTEGERS, pa.decimal128(22, 2), pa.decimal256(40, 0), pa.float64()]),
    (pa.types.is_floating, [pa.float64(), pa.float32(), pa.float16(), pa.int32(), pa.decimal128(30, 4)]),
    (pa.types.is_decimal, [pa.decimal128(38, 5), pa.decimal256(50, 3), pa.decimal128(18, 2), pa.int64()]),
    (pa.types.is_string, [pa.string(), pa.large_string(), pa.string_view()]),
    (pa.types.is_large_string, [pa.string(), pa.large_string(), pa.string_view()]),
    (pa.types.is_binary, [pa.large_binary(), pa.binary_view()]),
    (pa.types.is_date, [pa.date32(), pa.date64()]),
    (pa.types.is_timestamp, [pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")]),
    (pa.types.is_time, [pa.time64("us"), pa.time64("ns"), pa.time32("s"), pa.time32("ms")]),
]


def write(path: Path, table: pa.Table, group_sizes: list[int], dice: random.Random) -> None:
    """Write a file with row groups of these sizes, which may be 0, with random options."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(50):
        try:
            with pq.ParquetWriter(path, table.schema, **_options(table.schema, dice)) as writer:
                start = 0
                for rows in group_sizes:
                    writer.write_table(table.slice(start, rows), row_group_size=max(rows, 1))
                    start += rows
            return
        except _NOT_WRITTEN:  # some options do not fit each other: draw again
            if attempt == 49:
                raise


def _options(schema: pa.Schema, dice: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        **{"compression": dice.choice(["none", "snappy", "gzip", "brotli", "zstd", "lz4"])},
        **{"data_page_version": dice.choice(["1.0", "2.0"]), "write_statistics": dice.random() < 0.7},
        **{"write_page_checksum": dice.random() < 0.5, "write_page_index": dice.random() < 0.3},
    }
    has_lists = any("list" in str(field.type) for field in schema)
    if dice.random() < 0.4 and not has_lists:  # pyarrow 26 may read no rows of lists if each row is a page
        options |= {"data_page_size": dice.choice([1, 64, 1000]), "write_batch_size": dice.choice([1, 7, 64])}
    if dice.random() < 0.3:
        options["dictionary_pagesize_limit"] = dice.choice([16, 200])  # the rest of a column is plain
    columns = [column for field in schema for column in _columns(field.type, field.name)]
    how = dice.choice(["all", "some", "none"])
    if how == "some":
        options["use_dictionary"] = [name for name, _ in columns if dice.random() < 0.5]
    elif how == "none":
        of = {name: [e for fits, some in _ENCODINGS if fits(kind) for e in some] for name, kind in columns}
        options["use_dictionary"] = False
        options["column_encoding"] = {name: dice.choice(["PLAIN", *encodings]) for name, encodings in of.items()}
    return options


def _columns(kind: pa.DataType, name: str) -> Iterator[tuple[str, pa.DataType]]:
    """Yield name and type of the Parquet columns in which a type is written."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _columns(field.type, f"{name}.{field.name}")
    elif pa.types.is_map(kind):
        yield from [(f"{name}.key_value.key", kind.key_type), (f"{name}.key_value.value", kind.item_type)]
    elif pa.types.is_nested(kind):
        yield from _columns(kind.value_type, f"{name}.list.element")
    else:
        yield name, kind  # for dictionaries, pyarrow only reads the dictionary encoding and plain


def alike(array: pa.Array, dice: random.Random, floats: bool, views: bool = True) -> pa.Array:
    """Return an array of the same values, perhaps with another type, which may occur in another file of a data set.

    Args:
        floats: whether integers may become floats. views: whether the type may be a view, which pyarrow cannot write in
            a struct that is null somewhere.
    """
    if pa.types.is_struct(array.type):
        parts = zip(array.type, array.flatten(), strict=True)
        fields = {field.name: alike(part, dice, floats, False) for field, part in parts}
        names = dice.sample([*fields], len(fields))
        return pa.StructArray.from_arrays([fields[name] for name in names], names, mask=array.is_null())
    if array.null_count == len(array) and dice.random() < 0.5:
        return pa.nulls(len(array))  # pandas writes a column without values like this
    kinds = [kind for kind in _kinds(array.type) if views or "view" not in str(kind)]
    for kind in dice.sample(kinds, min(4, len(kinds))):
        try:
            changed = array.cast(kind)
            is_same = changed.cast(array.type).equals(array) and (floats or "double" not in str(kind))
        except _NOT_WRITTEN:
            continue
        if is_same:
            in_dictionary = not pa.types.is_nested(kind) and "view" not in str(kind) and dice.random() < 0.2
            return changed.dictionary_encode() if in_dictionary else changed
    return array


def _kinds(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_list(kind):
        return [of(k) for of in (pa.list_, pa.large_list, pa.list_view) for k in [*_kinds(kind.value_type)][:9]]
    flat = kind.value_type if pa.types.is_dictionary(kind) else kind
    return next((kinds for fits, kinds in _ALIKE if fits(flat)), []) or [flat]


def _fits_float(array: pa.Array) -> bool:
    """Whether values are not numbers, or are numbers that floats can hold exactly, so that ids stay different."""
    if pa.types.is_nested(array.type):
        parts = array.flatten()
        return all(map(_fits_float, parts)) if isinstance(parts, list) else _fits_float(parts)
    if not (pa.types.is_integer(array.type) or pa.types.is_decimal(array.type)):
        return True
    most = pc.max(pc.abs(array.cast(pa.float64(), safe=False))).as_py()
    return most is None or most < 2**53


def rewrite(source: Path, out: Path, dice: random.Random) -> None:
    """Write the rows of a folder's files with other types and options; the row groups stay as they are."""
    files = {path: pq.ParquetFile(path) for path in sorted(source.rglob("*.parquet"))}
    tables = {path: [file.read_row_group(n) for n in range(file.num_row_groups)] for path, file in files.items()}
    columns = [(name, rows[name]) for groups in tables.values() for rows in groups for name in rows.column_names]
    large = {name for name, column in columns if not all(map(_fits_float, column.chunks))}  # float in no file, then
    for path, groups in tables.items():
        rows = pa.concat_tables(groups) if groups else files[path].schema_arrow.empty_table()
        others = {name: alike(_joined(rows[name]), dice, name not in large) for name in rows.column_names}
        others["junk"] = pa.array([{"a": [1, 2]}] * len(rows), pa.struct([("a", pa.list_(pa.int8()))]))
        names = dice.sample([*others], len(others))
        write(out / path.relative_to(source), pa.table({n: others[n] for n in names}), [*map(len, groups)], dice)


def _joined(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
