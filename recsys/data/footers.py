"""Footers of Parquet files: what they say about the wanted columns, read once each and quickly."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import add
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from recsys.data.conditions import BY_DATASET, KEY
from recsys.data.fields import Place, names, places
from recsys.data.storage import BadDataError, Files, Storage, partition_keys, reason
from recsys.data.thrift import Statistics, num_row_groups, num_values, schema_end, statistics, without_row_groups
from recsys.errors import UserError, nearest
from recsys.runtime.logs import logger

FileKey = tuple[str, int, int]

_TAIL_BYTES, _REMOTE_TAIL_BYTES = 16 << 10, 64 << 10  # read at once from a file's end; most footers are shorter
_IN_SOME = "data.optional_columns takes those that only some files have"
_ADVICE = {"config key 'data.seen_column'": "data.seen_column=null goes without, and leaves no items out"}
_THREADS = 16  # several, because servers and cold disks make them wait; many more would fight over the interpreter


@dataclass(frozen=True)
class Footer:
    """The parts of one footer that are used; each list has one entry for each row group.

    Attributes:
        layout: number in `FooterParser.layouts`.
        num_rows: rows. num_bytes: memory of the wanted columns in a window of the loader.
        digest: XXH3 of the end of the file, with the whole footer, as int64. It covers offsets, sizes and statistics,
            so that a rewritten file has another digest, and a copy the same.
        statistics: for each column of the filter (least, most, number of nulls), each None if unknown; empty if an
            earlier run has counted the matching rows.
        matching: how many rows match the filter, or None if they have not been counted.
    """

    layout: int
    num_rows: list[int]
    num_bytes: list[int]
    digest: int
    statistics: dict[str, list[Statistics]] = field(default_factory=dict)
    matching: list[int] | None = None


@dataclass(frozen=True)
class _Schema:
    """The columns wanted in one Parquet schema.

    Attributes:
        start: the bytes from the start of a footer to the end of the schema.
        layout: number in `FooterParser.layouts`.
        names: of all columns, for structs those of their fields. missing: names of wanted columns that are not there.
        flat: name of a column with one value per row, if there is one.
        elements: paths of the Parquet columns of the nested columns that windows hold.
        ordered: (name, path, type) of the columns whose statistics are wanted.
    """

    start: bytes
    layout: int
    names: list[str]
    missing: list[str]
    flat: str | None
    elements: list[list[str]]
    ordered: list[tuple[str, list[str], pa.DataType]]


class FooterParser:
    """Parses the wanted parts of footers; safe to call from several threads.

    Arrow parses only the first footer of each schema, and none of its row groups, which would take ten times the bytes
    of the footer: a gigabyte for many columns. The files of a dataset seldom have more than one schema.

    Args:
        key: config key that names the files.
        columns: needed column → config key that asks for it. filtered: the same for the columns of the filter.
        optional: columns that may be missing. layouts: those that an earlier run found.
        like: columns of other files; partition keys have the types that they have there.

    Attributes:
        layouts: schemas of the wanted columns in files, with plain types (see `plain_type`). The metadata of a field
            say where it is (see `Place.of`), and for strings the path of the Parquet column (`dictionary`) that is
            read as a dictionary.
    """

    def __init__(
        self,
        key: str,
        columns: Mapping[str, str],
        filtered: Mapping[str, str],
        optional: Sequence[str],
        layouts: Sequence[pa.Schema],
        like: pa.Schema | None,
    ) -> None:
        self.key, self.optional, self.layouts, self.like = key, optional, list(layouts), like
        self.wanted = {**filtered, **columns}
        self.columns, self.filtered = columns, filtered
        self._schemas: list[_Schema] = []
        self._lock = threading.Lock()

    def parse(self, name: str, tail: bytes) -> Footer:
        """Return the wanted parts of a footer; `tail` is what `read_footer` returns.

        Raises:
            UserError: a column is missing or occurs twice.
            OSError, pa.ArrowException: the footer is damaged.
        """
        content = footer_of(tail)
        schema_and_rows = self._rows_of_known(content)
        if schema_and_rows is None:
            with self._lock:  # so that other threads wait for the schema, and can then use it
                schema_and_rows = self._rows_of_known(content) or self._rows_of_any(name, content)
        schema, num_rows = schema_and_rows
        self._check_missing(name, schema)
        count = len(num_rows)
        numbers = [rows * len(self.columns) for rows in num_rows]  # partition keys and lengths of lists count too
        for path in schema.elements:
            numbers = list(map(add, numbers, num_values(content, path, count)))
        by_column = {column: statistics(content, path, count, dtype) for column, path, dtype in schema.ordered}
        sizes = [4 * number for number in numbers]
        return Footer(schema.layout, num_rows, sizes, digest_of(tail), by_column)

    def _rows_of_known(self, content: bytes) -> tuple[_Schema, list[int]] | None:
        """Return the schema and the rows of each row group, if it is known and has a column that gives the rows."""
        schema = next((seen for seen in reversed(self._schemas) if content.startswith(seen.start)), None)
        if schema is None or schema.flat is None:
            return None
        try:
            total, count = num_row_groups(content, len(schema.start))
            num_rows = num_values(content, [schema.flat], count)
        except OSError:  # damaged, or the column is encrypted
            return None
        return (schema, num_rows) if sum(num_rows) == total else None

    def _rows_of_any(self, name: str, content: bytes) -> tuple[_Schema, list[int]]:
        start = content[: schema_end(content)]
        schema = next((seen for seen in self._schemas if seen.start == start), None)
        if schema is None:
            self._schemas.append(schema := self._convert(name, start, parsed_footer(without_row_groups(start))))
            if known := self._rows_of_known(content):
                return known
        metadata = parsed_footer(content)
        num_rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if sum(num_rows) != metadata.num_rows or min(num_rows, default=0) < 0:
            raise OSError(f"it has {metadata.num_rows} rows, and {sum(num_rows)} in its row groups")
        return schema, num_rows

    def _convert(self, name: str, start: bytes, metadata: pq.FileMetaData) -> _Schema:
        arrow = schema_read(metadata)
        found, there = places(arrow, metadata.schema), dict[str, Place]()
        for column in self.wanted:
            if (place := found.get(column)) is None:
                continue
            outer = place.steps[0]
            if (count := arrow.names.count(outer)) > 1:
                raise UserError(f"{self.wanted[column]}: file '{name}' has {count} columns '{outer}'; keep only one")
            there[column] = place
        layout = pa.schema([_field(column, place) for column, place in there.items()])
        equals = (i for i, earlier in enumerate(self.layouts) if layout.equals(earlier, check_metadata=True))
        number = next(equals, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        nested = {field.name for field in layout if pa.types.is_nested(field.type)}
        return _Schema(
            start,
            number,
            list(names(arrow)),
            [column for column in self.wanted if column not in there],
            next((column.name for column in arrow if not pa.types.is_nested(column.type)), None),
            [path for name in self.columns if name in nested for path in there[name].parts()],
            [(n, there[n].steps, layout.field(n).type) for n in self.filtered if n in there.keys() - nested],
        )

    def _check_missing(self, name: str, schema: _Schema) -> None:
        keys = partition_keys(name) if schema.missing else {}
        for column in schema.missing:
            if column not in keys and column not in self.optional:
                beside = f"{column.partition('.')[0]}."  # for a field of a struct, list its other fields first
                have = sorted(dict.fromkeys([*schema.names, *keys]), key=lambda name: not name.startswith(beside))
                near = nearest(column, have)
                key = self.wanted[column]
                advice = "" if near else f"; {_ADVICE.get(key, _IN_SOME)}"
                advice += f"; {BY_DATASET}" if key.startswith(KEY) else ""
                there = f"(it has: {_listed(have)})"
                raise UserError(f"{key}: file '{name}' has no column '{column}'{near} {there}{advice}")


@lru_cache(maxsize=1024)
def plain_type(dtype: pa.DataType) -> pa.DataType:
    """Return a type without details of how its values are held: dictionaries, and the names of lists' elements."""
    if pa.types.is_dictionary(dtype):
        return plain_type(dtype.value_type)
    return pa.list_(plain_type(dtype.value_type)) if pa.types.is_list(dtype) else dtype


def _field(column: str, place: Place) -> pa.Field:
    dtype = plain_type(place.dtype)
    values = dtype.value_type if pa.types.is_list(dtype) else dtype
    strings = {"dictionary": place.paths[0]} if pa.types.is_string(values) or pa.types.is_binary(values) else {}
    return place.field(column, dtype, **strings)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def read_footers(
    files: Files, parser: FooterParser, max_bad: int, cached: Mapping[FileKey, Footer]
) -> tuple[list[Footer | None], list[str]]:
    """Read the footers of files, each once.

    Args:
        max_bad: how many files may be left out because their footer cannot be read.
        cached: footers of an earlier run, used for files that have not changed since.

    Returns:
        Footers in the order of the files, None for those left out; and the names of those left out.

    Raises:
        UserError: a column is missing or occurs twice.
        BadDataError: more than `max_bad` footers cannot be read.
    """
    # Without a time of change, a file of the same size may have changed, so its footer is read.
    footers = [cached.get(key) if key[2] else None for key in file_keys(files)]
    bad: dict[str, str] = {}
    for i, footer in _read_all(files, parser, [i for i, footer in enumerate(footers) if footer is None]):
        if isinstance(footer, Footer):
            footers[i] = footer
        else:
            bad[files.names[i]] = reason(footer)
    if len(bad) > max_bad:
        (first, why), more = next(iter(bad.items())), len(bad) - 1
        others = f", nor are {more} more, of {len(files.names)} files in all" if more else ""
        advice = f"or leave such files out with data.max_bad_files={len(bad)}"
        raise BadDataError(
            f"config key '{parser.key}': '{first}' is not a readable Parquet file ({why}){others}; write it again, "
            f"convert delimited text with `python -m recsys prepare csv`, {advice}",
            first,
        )
    for name, why in bad.items():
        logger.warning("config key '%s': left out '%s', not a readable Parquet file (%s)", parser.key, name, why)
    return footers, list(bad)


def file_keys(files: Files) -> list[FileKey]:
    """Return for each file a key that changes with the file: (name, size, time of the last change)."""
    return list(zip(files.names, files.sizes.tolist(), files.times.tolist(), strict=True))


def _read_all(files: Files, parser: FooterParser, numbers: list[int]) -> Iterator[tuple[int, Footer | Exception]]:
    """Yield file number and footer, or the error of reading it, in order."""

    def read(i: int) -> Footer | Exception:
        name, size = files.names[i], int(files.sizes[i])
        try:
            return parser.parse(name, files.storage.retried(read_footer)(files.storage, name, size))
        except MemoryError:  # Arrow's MemoryError is an ArrowException too, but not a fault of the file
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            return error

    step = max(1, min(64, len(numbers) // (4 * _THREADS)))
    chunks = [numbers[i : i + step] for i in range(0, len(numbers), step)]
    with ThreadPoolExecutor(_THREADS, "footers") as pool:
        yield from zip(
            numbers, chain.from_iterable(pool.map(lambda some: [read(i) for i in some], chunks)), strict=True
        )


def read_footer(storage: Storage, name: str, size: int) -> bytes:
    """Return the end of a file: the last 16 KiB (64 KiB of a remote one), or the whole footer if that is longer.

    Args:
        size: of the file in bytes, -1 if unknown.

    Raises:
        OSError: the file cannot be read, or does not end like a Parquet file.
    """
    if size == 0:
        raise OSError("it is empty")
    if storage.root:
        with storage.open(name) as file:
            return file_tail(file.size(), file.read_at, _REMOTE_TAIL_BYTES)
    with open(name, "rb", buffering=0) as local:
        number = local.fileno()
        return file_tail(size, lambda count, start: os.pread(number, count, start))


def parsed_footer(content: bytes) -> pq.FileMetaData:
    """Parse a footer, a FileMetaData of Parquet, by Arrow, with types from Parquet's schema alone.

    Before a row group is decoded, use only the schema and numbers of rows: see `recsys.data.thrift`.
    """
    # Arrow adds a schema of its own, which only adds how the writer held the values: as dictionaries, views, lists of
    # fixed size, extension types. Decoding it takes half as long as all the rest. So that Arrow does not find it, its
    # key is renamed here: a string of 12 bytes, followed by a string.
    content = content.replace(b"\x18\x0cARROW:schema\x18", b"\x18\x0carrow:schema\x18")
    return pq.read_metadata(pa.BufferReader(content + len(content).to_bytes(4, "little") + b"PAR1"))


def metadata_of(storage: Storage, name: str, size: int) -> pq.FileMetaData:
    """Read and parse the footer of a file; arguments and errors are those of `read_footer`."""
    return parsed_footer(footer_of(read_footer(storage, name, size)))


def opened(source: pa.NativeFile | str, footer: pq.FileMetaData, **options: Any) -> pq.ParquetFile:
    """Open a file with its footer from `parsed_footer`; `options` are those of pyarrow."""
    # INT96 is a day and a nanosecond in it, which Spark writes in microseconds. If Arrow reads it as nanoseconds, a day
    # outside the years 1677 to 2262, such as 9999-12-31 for `never`, silently becomes another day.
    return pq.ParquetFile(
        source, metadata=footer, coerce_int96_timestamp_unit="us", arrow_extensions_enabled=False, **options
    )


def schema_read(footer: pq.FileMetaData) -> pa.Schema:
    """Return the columns of a file with the types in which `opened` reads them."""
    return opened(pa.BufferReader(b""), footer).schema_arrow


def footer_of(tail: bytes) -> bytes:
    """Return the footer within the end of a file."""
    return tail[-8 - int.from_bytes(tail[-8:-4], "little") : -8]


def digest_of(tail: bytes) -> int:
    """Return the `Footer.digest` of a file; `tail` is what `file_tail` returns."""
    digest = xxhash.xxh3_64_digest(tail[-max(len(footer_of(tail)) + 8, _TAIL_BYTES) :])
    return int.from_bytes(digest, "little", signed=True)


def file_tail(size: int, read: Callable[[int, int], bytes], at_once: int = _TAIL_BYTES) -> bytes:
    """Return the end of a file, which has at least its footer. Errors are those of `read_footer`."""
    tail = read(min(size, at_once), max(0, size - at_once))
    if tail[-4:] == b"PARE":
        raise OSError("it is encrypted")
    if tail[-4:] != b"PAR1" or size < 12:
        begins = "it begins as one, but is cut off" if read(4, 0) == b"PAR1" else "it does not end as one does"
        raise OSError(begins)
    length = int.from_bytes(tail[-8:-4], "little")
    if length > size - 12:
        raise OSError("its footer is longer than the file")
    return tail if length + 8 <= len(tail) else read(length + 8, size - 8 - length)
