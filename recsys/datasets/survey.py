"""What the columns of a log hold: types, nulls, distinct values, ends, lengths of lists."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cached_property, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.arrays import cast
from recsys.data.made import lists_in
from recsys.data.parquet import unified
from recsys.datasets import column_names
from recsys.datasets.logs import LogFile, LogFiles
from recsys.ids import IdKeys, IdStatistics, is_text, read_keys
from recsys.runtime.live import Task

_MOST_COUNTED = 1 << 16  # distinct values; if there are more, a sample is kept
_MOST_TIMES = 1 << 18  # kept of a column; if there are more, every second one, then every fourth and so on
_TEXTS_OF_A_ROW_GROUP = 1000
# By what stands between them: texts that may be lists of ids. Commas are in prose and in numbers too.
_IN_TEXTS = {
    "|": r"^[^|]+(\|[^|]+)+$",
    ";": r"""^[^;|()\[\]{}"]+(;[^;|()\[\]{}"]+)+$""",
    ",": r"""^[^\s,.()\[\]{}"]+(,[^\s,.()\[\]{}"]+)+$""",
    " > ": r"""^[^<>|;"]+( > [^<>|;"]+)+$""",
    " ": r"^[\w-]+( +[\w-]+)+$",
}
LEVELS = " > "  # divides the levels of a tree, as in Home > Garden, which may be as many in each text
_WITH_DIGITS = r"^\s*([\w-]*\d[\w-]*(\s+|$))*$"  # spaces divide ids if each has a digit, otherwise they may be words
_WITH_COMMA = r"^-?\d+,\d+$|^-?\d{1,3}(,\d{3})+$"  # 1,50 and 1,234,567
_MANY_IN_TEXTS = 0.1
ALIKE = 0.5  # columns with a larger `Column.likeness` hold the same ids
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_UNITS = (1, 10**3, 10**6, 10**9)  # of a second
_SINCE, _UNTIL = (int(datetime(year, 1, 1, tzinfo=timezone.utc).timestamp()) for year in (1990, 2100))


class Column:
    """What a column of a log holds; the values of lists are those inside them.

    Attributes:
        name: its name; for a field of a struct, with that of the struct, as in `device.os`.
        dtype: a type that holds the values of all files, as Parquet has it; null without values.
        problem: why it cannot be read; None: it can be.
        is_in_all: no file lacks it.
        num_rows, num_nulls: how many rows were added (of a column with a problem, all), and how many have no value.
        num_odd: values that are NaN or infinite; what follows does not count them.
        values: counter of distinct values.
        least, greatest: of the values; None if there are none, or if their type has no order.
        total: sum of the values, of integers and floats.
        is_whole: no value is a number with a fraction.
        lengths: how many rows have a list of each length, int64 [longest + 1].
        separator: what stands between the ids in its texts, whose lists are what the rest is about; None: nothing does.
        integers: these ids are integers; `problem` if one is not.
    """

    def __init__(
        self,
        name: str,
        dtype: pa.DataType,
        problem: str | None = None,
        separator: str | None = None,
        integers: bool = False,
    ) -> None:
        self.name, self.dtype, self.problem, self.separator = name, dtype, problem, separator
        self.integers = integers
        self.is_list = pa.types.is_list(dtype) or separator is not None
        self.element = pa.int64() if integers else dtype.value_type if pa.types.is_list(dtype) else dtype
        if problem is None and pa.types.is_nested(self.element):
            self.problem = f"values of type {dtype} are not read"
        self.is_in_all = True
        self.num_rows = self.num_nulls = self.num_odd = 0
        self.values = IdStatistics(_MOST_COUNTED)
        self.least: Any = None
        self.greatest: Any = None
        self.is_whole = True
        self.total = 0.0
        self.lengths = np.zeros(1, np.int64)
        self._times: list[pa.Array] = []
        self._num_texts, self._num_divided = 0, dict.fromkeys(_IN_TEXTS, 0)
        self._num_times, self._every = 0, 1

    def add(self, rows: pa.Array) -> None:
        """Add rows of a file, of a type that `dtype` holds."""
        rows = self._lists(cast(rows, self.dtype))
        if self.problem is not None:
            return
        self.num_rows += len(rows)
        self.num_nulls += rows.null_count
        rows = rows.drop_null()
        if self.is_list:
            counts = np.bincount(pc.list_value_length(rows).to_numpy(), minlength=len(self.lengths))
            counts[: len(self.lengths)] += self.lengths
            self.lengths, rows = counts, rows.flatten().drop_null()
        if pa.types.is_floating(self.element):
            rows = rows.cast(pa.float64())  # Arrow finds no least and greatest half
            finite = pc.is_finite(rows)
            self.num_odd += len(rows) - pc.sum(finite, min_count=0).as_py()
            rows = rows.filter(finite)
        if len(rows):
            self._add_values(rows)

    def _lists(self, rows: pa.Array) -> pa.Array:
        """Return the lists in texts, if there are any."""
        lists = rows if self.separator is None else lists_in(rows, self.separator)
        try:
            return lists.cast(pa.list_(self.element)) if self.integers else lists
        except pa.ArrowInvalid as error:
            self.problem = str(error)
            return lists

    def _add_values(self, values: pa.Array) -> None:
        if pa.types.is_floating(self.element):
            numbers = values.to_numpy()
            self.is_whole = self.is_whole and bool((numbers == np.rint(numbers)).all())
            keys = IdKeys(numbers.view(np.int64))
        else:
            keys = read_keys(values)
            self.is_whole = self.is_whole and not (pa.types.is_decimal(self.element) and len(keys.texts))
        for _, chunk in keys.hash_chunks(0):
            self.values.add_hashes(chunk)
        if not pa.types.is_fixed_size_binary(self.element):  # which Arrow does not compare
            ends = pc.min_max(values).as_py()
            self.least = ends["min"] if self.least is None else min(self.least, ends["min"])
            self.greatest = ends["max"] if self.greatest is None else max(self.greatest, ends["max"])
        if pa.types.is_integer(self.element) or pa.types.is_floating(self.element):
            self.total += pc.mean(values).as_py() * len(values)
        if pa.types.is_string(self.element):
            texts = values[:_TEXTS_OF_A_ROW_GROUP]
            self._num_texts += len(texts)
            for separator in self._num_divided:
                divided = pc.match_substring_regex(texts, _IN_TEXTS[separator])
                if separator == ",":
                    divided = pc.and_not(divided, pc.match_substring_regex(texts, _WITH_COMMA))
                self._num_divided[separator] += pc.sum(divided).as_py()
            if not pc.all(pc.match_substring_regex(texts, _WITH_DIGITS)).as_py():
                self._num_divided.pop(" ", None)
        if self.is_time:
            self._keep_times(values)

    def _keep_times(self, values: pa.Array) -> None:
        """Keep every so many-th of all values that are times, so that each row group has its share."""
        self._times.append(values.take(pa.array(np.arange(-self._num_times % self._every, len(values), self._every))))
        self._num_times += len(values)
        if self._num_times > self._every * _MOST_TIMES:
            times = pa.concat_arrays(self._times)
            self._times, self._every = [times.take(pa.array(np.arange(0, len(times), 2)))], 2 * self._every

    @property
    def is_time(self) -> bool:
        """Whether the values are points of time: by their type, as texts that begin with a date, or as integers that
        count from 1970 in a column with the name of a time."""
        if pa.types.is_date(self.element) or pa.types.is_timestamp(self.element):
            return True
        if is_text(self.element):
            return all(isinstance(end, str) and _DATE.match(end) for end in (self.least, self.greatest))
        if not (pa.types.is_integer(self.element) and column_names.TIME.search(self.name)) or self.least is None:
            return False
        return any(_SINCE * unit <= self.least and self.greatest < _UNTIL * unit for unit in _UNITS)

    @property
    def possible_separator(self) -> str | None:
        """What divides many texts of a sample, if anything does."""
        separator, number = max(self._num_divided.items(), key=lambda pair: pair[1])
        return separator if number > _MANY_IN_TEXTS * self._num_texts and not self.is_list else None

    @property
    def is_of_lists(self) -> bool:
        """Whether the parts of its texts look like ids: they are there again, and not as many in each text.

        Parts of an id such as `auth0|5f7c` are as many in each.
        """
        num_ids = int(self.lengths @ np.arange(len(self.lengths)))
        may_be_ids = self.separator == LEVELS or int(np.count_nonzero(self.lengths[1:])) > 1
        return may_be_ids and 2 * self.num_distinct < num_ids

    @cached_property
    def num_distinct(self) -> int:
        """Number of distinct values; if there are many, an estimate of three digits."""
        hashes, limit = self.values.kept()
        return int(float(f"{len(hashes) * 2.0**64 / limit:.3g}")) if limit < 2**64 else len(hashes)

    def likeness(self, other: Column) -> float:
        """Return how many distinct values both columns have, as a share of those that either has."""
        (own, limit), (others, other_limit) = self.values.kept(), other.values.kept()
        last = np.uint64(min(limit, other_limit) - 1)
        own, others = own[own <= last], others[others <= last]
        shared = len(np.intersect1d(own, others, assume_unique=True))
        return shared / max(1, len(own) + len(others) - shared)

    def time_after(self, share: float) -> Any:
        """Return a time, as a Python value, before which about this share of the rows is."""
        times = pa.chunked_array(self._times, self.element).combine_chunks()
        return times.take(pc.array_sort_indices(times))[int(share * len(times))].as_py()


def survey(files: LogFiles) -> dict[str, Column]:
    """Read a log, one column of a row group at a time, or a small row group at once; return its columns by name, with
    fields instead of structs.

    A column that a file lacks is null in its rows. Raises UserError if a file cannot be read.
    """
    dtypes, leaves, num_rows = defaultdict[str, Counter[pa.DataType]](Counter), dict[str, None](), 0
    for file in files:
        num_rows += sum(map(file.num_rows, range(file.num_row_groups)))
        leaves |= dict.fromkeys(file.leaves)
        for name in file.names:
            dtypes[name][file.dtype(name)] += 1
    columns = {name: _column(name, list(dtypes[name])) for name in leaves}
    for name, column in columns.items():
        column.is_in_all = dtypes[name].total() == len(files)
        column.num_rows = 0 if column.problem is None else num_rows
    _read([column for column in columns.values() if column.problem is None], files)
    return columns | _split(columns, files)


def _split(columns: Mapping[str, Column], files: LogFiles) -> dict[str, Column]:
    """Read a log again; return the columns of texts that hold lists of ids, as such lists.

    The ids are integers if a column of integers has mostly the same ones.
    """
    texts, integers = dict[str, Column](), dict[str, Column]()
    for name, column in columns.items():
        separator = None if column.is_time else column.possible_separator
        if separator is not None:
            texts[name] = Column(name, column.dtype, separator=separator)
            integers[name] = Column(name, column.dtype, separator=separator, integers=True)
            texts[name].is_in_all = integers[name].is_in_all = column.is_in_all
    _read([*texts.values(), *integers.values()], files)
    alone = [column for column in columns.values() if pa.types.is_integer(column.dtype)]
    for name, column in integers.items():
        if column.problem is None and any(column.likeness(other) > ALIKE for other in alone):
            texts[name] = column
    return {name: column for name, column in texts.items() if column.is_of_lists}


def _read(columns: Sequence[Column], files: LogFiles) -> None:
    """Add all rows to columns."""
    if not columns:
        return
    with Task("reading the log", len(files.row_groups()), "row groups") as task:
        for file in files:
            for group in range(file.num_row_groups):
                _add(columns, file, group)
                task.done += 1


def _add(columns: Sequence[Column], file: LogFile, group: int) -> None:
    """Add the rows of a row group to columns."""
    names = [column.name for column in columns if file.has(column.name)]
    rows = file.read(names, [group]) if file.is_small(group) else None
    for column in columns:
        if not file.has(column.name):
            column.add(pa.nulls(file.num_rows(group)))
        else:
            part = file.read([column.name], [group]) if rows is None else rows
            column.add(part[column.name].combine_chunks())


def _column(name: str, dtypes: Sequence[pa.DataType]) -> Column:
    try:
        return Column(name, reduce(unified, dtypes))
    except pa.ArrowException:
        return Column(name, dtypes[0], f"it is {' and '.join(map(str, dtypes))}, by file")
