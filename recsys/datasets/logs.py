"""Reading of a Parquet log by converters: its files, columns of row groups, ids and times of any type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.arrays import cast
from recsys.data.fields import names as names_in
from recsys.data.fields import places
from recsys.data.filters import written
from recsys.data.footers import metadata_of, opened, schema_read
from recsys.data.parquet import unified
from recsys.data.sources import find_files
from recsys.data.storage import Storage, partition_column, partition_keys, reason
from recsys.errors import UserError, counted, in_words, nearest
from recsys.ids import is_text, raw_times, read_keys

_TIMES = (
    "a number, a date, a timestamp or a text such as '2026-11-05 18:30'; `recsys prepare csv --time-format FORMAT` "
    "reads other texts"
)
LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}  # of more bytes in one array than these:
_TEXT_BYTES = 2**31
_SMALL_VALUES, _SMALL_BYTES = 1 << 18, 1 << 21  # of a row group
_ID_KINDS = (pa.types.is_integer, is_text, pa.types.is_decimal, pa.types.is_floating)
_TIME_KINDS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_temporal, pa.types.is_string)


class LogFiles:
    """The files of a log: paths, globs or folders, listed as training lists them (see `find_files`).

    Args:
        flag: the option that named the paths, for messages.
    """

    def __init__(self, flag: str, paths: Sequence[Path | str]) -> None:
        with in_words({f"config key '{flag}'": flag}):
            self._files = find_files(flag, list(map(str, paths)))
        keys = {key for name in self._files.names for key in partition_keys(name)}
        self._key_kinds = {key: self._files.partition_type(key) for key in keys}
        self._num_row_groups: dict[int, int] = {}  # by file, of those that were opened

    def __len__(self) -> int:
        return len(self._files.names)

    def __iter__(self) -> Iterator[LogFile]:
        return map(self.open, range(len(self)))

    def open(self, number: int) -> LogFile:
        """Open a file and read its footer. Raises UserError if it is no Parquet file."""
        name = self._files.names[number]
        with _told(name):
            footer = metadata_of(self._files.storage, name, int(self._files.sizes[number]))
        self._num_row_groups[number] = footer.num_row_groups
        return LogFile(name, self._files.storage, footer, self._key_kinds)

    def row_groups(self) -> list[tuple[int, int]]:
        """Return of all row groups the number of the file, and theirs in it; files not yet opened are."""
        for number in range(len(self)):
            if number not in self._num_row_groups:
                self.open(number)
        return [(number, i) for number, count in sorted(self._num_row_groups.items()) for i in range(count)]


class LogFile:
    """A file of a log: columns in the types of Parquet, fields of structs, and keys in its path.

    Attributes:
        name: its path.
        columns: all that it has, without fields; those of the path come last.
        leaves: the same, but with fields instead of structs. names: of all these, structs and fields inside them.
        num_row_groups: number of its row groups.
    """

    def __init__(self, name: str, storage: Storage, footer: pq.FileMetaData, key_kinds: dict[str, pa.DataType]) -> None:
        self.name, self._storage, self._footer, self._key_kinds = name, storage, footer, key_kinds
        self._keys, self._arrow = partition_keys(name), schema_read(footer)
        self._stored = places(self._arrow, footer.schema)
        self.columns = list(dict.fromkeys([*self._arrow.names, *self._keys]))
        self.leaves = list(dict.fromkeys([*names_in(self._arrow), *self._keys]))
        self.names = self._stored.keys() | self._keys.keys()
        self.num_row_groups = footer.num_row_groups

    @cached_property
    def _opened(self) -> pq.ParquetFile:
        return opened(self._storage.open(self.name), self._footer, page_checksum_verification=True)

    def has(self, column: str) -> bool:
        """Return whether the file has a column, a field of a struct or a key in its path with this name."""
        return column in self.names

    def dtype(self, column: str) -> pa.DataType:
        """Return the type of a column of the file."""
        return self._stored[column].dtype if column in self._stored else self._key_kinds[column]

    def num_rows(self, row_group: int) -> int:
        """Return the number of rows of a row group."""
        return int(self._footer.row_group(row_group).num_rows)

    def is_small(self, row_group: int) -> bool:
        """Return whether all columns of a row group may well be read at once, which takes less time than one by one."""
        part = self._footer.row_group(row_group)
        return int(part.num_rows) * len(self.leaves) < _SMALL_VALUES and int(part.total_byte_size) < _SMALL_BYTES

    def read(self, names: Sequence[str], row_groups: Sequence[int] | None = None) -> pa.Table:
        """Return columns of some row groups, or of all. Raises UserError for one that is missing or occurs twice."""
        stored = {column: self._stored[column] for column in names if column in self._stored}
        for outer in (place.steps[0] for place in stored.values()):
            if (count := self._arrow.names.count(outer)) > 1:
                raise UserError(f"{self.name} has {count} columns {outer!r}; keep only one")
        if missing := [column for column in names if not self.has(column)]:
            others = f"only {', '.join(self.leaves)}{nearest(missing[0], self.leaves)}"
            raise UserError(f"{self.name} has no column {missing[0]!r}, {others}")
        numbers = range(self.num_row_groups) if row_groups is None else row_groups
        with _told(self.name):
            table = self._opened.read_row_groups(numbers, [path for place in stored.values() for path in place.paths])
        columns = {}
        for column in names:
            if column in stored:
                columns[column] = stored[column].take(table)
            else:
                kind = self._key_kinds[column]
                columns[column] = partition_column(self._keys[column], kind, table.num_rows).cast(kind)
        return pa.table(columns)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn errors of Arrow and the system on a file into a UserError."""
    try:
        yield
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        hint = "; `python -m recsys prepare csv` makes Parquet of delimited files"
        raise UserError(f"{name} cannot be read as Parquet ({reason(error)}){hint}") from None


def joined(tables: Sequence[pa.Table], places: Sequence[str] = ()) -> pa.Table:
    """Concatenate tables, in types that hold all values; a column that a table lacks is null there.

    Args:
        places: where each table comes from, for messages.

    Raises:
        UserError: a column has values in one table that its type in the others cannot hold, as training joins them.
    """
    names = dict.fromkeys(chain.from_iterable(table.column_names for table in tables))
    return pa.table({name: _joined(tables, name, places) for name in names})


def _joined(tables: Sequence[pa.Table], name: str, places: Sequence[str]) -> pa.Array:
    columns = [
        table[name] if name in table.column_names else pa.chunked_array([pa.nulls(len(table))]) for table in tables
    ]
    dtypes = list(dict.fromkeys(column.type for column in columns if not pa.types.is_null(column.type)))
    try:
        dtype = reduce(unified, dtypes or [pa.null()])
        values = pa.chunked_array([cast(chunk, dtype) for column in columns for chunk in column.chunks], dtype)
        return (values if values.nbytes < _TEXT_BYTES else values.cast(LARGE.get(dtype, dtype))).combine_chunks()
    except pa.ArrowException as error:
        first = [next(i for i, column in enumerate(columns) if column.type == dtype) for dtype in dtypes]
        shown = [f"{dtype} in {places[i]}" if places else str(dtype) for i, dtype in zip(first, dtypes, strict=True)]
        raise UserError(
            f"the files' columns are of different types: {name!r} is {' and '.join(shown)}, and no one type "
            f"holds all its values ({reason(error)}); write it with the same type"
        ) from None


def id_column(table: pa.Table, name: str, nulls: bool = False) -> pa.Array:
    """Return ids, with decimals and whole floats as integers; UserError for other types, and for nulls.

    Args:
        nulls: whether nulls are allowed; they stay.
    """
    column = _checked(table, name, _ID_KINDS, nulls, "an id", "a whole number, a string or bytes")
    if pa.types.is_integer(column.type) or is_text(column.type):
        return column
    integers, valid = _integers(column.drop_null(), name), np.asarray(column.is_valid())
    return integers.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _integers(column: pa.Array, name: str) -> pa.Array:
    """Return whole decimals or floats, which pandas makes of integers with nulls, as int64."""
    try:
        keys = read_keys(column)
    except UserError as error:
        raise UserError(f"column {name!r}: {error}") from error
    if len(keys.texts):
        raise UserError(f"column {name!r} holds {keys.texts[0].as_py().decode()}; ids of decimals are below 2**63")
    return pa.array(keys.numbers if keys.indices is None else keys.numbers[keys.indices])


def time_values(table: pa.Table, name: str) -> np.ndarray:
    """Return times as numbers or datetime64 [rows], which compare; UserError for other types, nulls and NaN."""
    column = _checked(table, name, _TIME_KINDS, False, "a time", _TIMES)
    if pa.types.is_string(column.type):
        try:
            column = column.cast(pa.timestamp("us"))
        except pa.ArrowInvalid as error:
            raise UserError(f"column {name!r} holds other texts than times ({error}); a time is {_TIMES}") from None
    values = raw_times(column) if pa.types.is_time(column.type) else column.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise UserError(
            f'column {name!r} holds NaN, which is not a time; leave these out: --where "{written(name)} > 0"'
        )
    return values


def _checked(
    table: pa.Table, name: str, kinds: Sequence[Callable[[pa.DataType], bool]], nulls: bool, what: str, allowed: str
) -> pa.Array:
    """Return a column, if it has one of some kinds of types, and no nulls unless it may."""
    column = table[name]
    if not any(fits(column.type) for fits in kinds):
        raise UserError(f"column {name!r} is {column.type}; {what} is {allowed}")
    if column.null_count and not nulls:
        raise UserError(
            f"column {name!r} holds {counted(column.null_count, 'null')}; every row needs {what}, so leave these out: "
            f'--where "{written(name)} is not None"'
        )
    return column.combine_chunks()
