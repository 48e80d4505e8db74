"""Histories: a Parquet log whose rows have lists of the earlier values of their user, for models that read a history.

1. `_Log` reads the times of all files, and cuts them into stretches of about a million rows.
2. The rows of one stretch after the other are read and put in order.
3. `Stretch` finds a row's lists among what is carried over of its user, and the earlier rows of the stretch.
4. The newest values of each user are carried over to the next stretch; the last ones are a file, which `--after` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.fields import advice
from recsys.data.filters import written
from recsys.datasets.logs import LogFiles, id_column, joined, time_values
from recsys.datasets.retrieval import FILE_ROWS, HISTORY
from recsys.datasets.stretch import Stretch, carried_schema
from recsys.datasets.writer import (
    ROW_GROUP_ROWS,
    WHERE_HELP,
    PartWriter,
    check_bounds,
    columns_where,
    is_true,
    option,
    read_marker,
    replacing,
    rows_where,
)
from recsys.errors import UserError
from recsys.runtime.arguments import names
from recsys.runtime.files import naming

KIND = "histories"
USERS = "_users.parquet"  # in the folder that is written; readers of Parquet folders skip names that begin like this
STRETCH_ROWS = 1 << 20
SAMPLED = 1 << 10  # one of this many sorted times is kept, to find where to cut
GROUP_VALUES = 1 << 22  # most values of a list column in a row group, unless that leaves fewer than a thousand rows
_OFTEN = 4  # a note is printed if a row is read this many times


@dataclass
class HistoryOptions:
    """Columns of a log by role, and the rows that histories are made of."""

    user: str = option("user_id", "column of users; a row without one has an empty history", metavar="COLUMN")
    item: str = option("item_id", "column whose values are listed", metavar="COLUMN")
    time: str = option("timestamp", "column of times; rows of one moment do not see each other", metavar="COLUMN")
    columns: list[str] = option(
        [], "further columns of the same rows, each with a list of its own, NAME_COLUMN", type=names, metavar="A,B"
    )
    name: str = option("history", "column of the lists that are written", metavar="NAME")
    history: int = option(HISTORY, "most values of a list; the newest are kept", least=1, most=10_000)
    history_where: str | None = option(
        None, 'rows that histories are made of, such as "label == 1"; all rows are written', metavar="FILTER"
    )
    where: str | None = option(None, WHERE_HELP, metavar="FILTER")
    after: Path | None = option(
        None,
        "folder that this command wrote for earlier rows, such as the day before; histories continue from there",
        type=Path,
        metavar="FOLDER",
    )

    @property
    def lists(self) -> dict[str, str]:
        """Columns by the names of the lists of their values."""
        return {self.name: self.item} | {f"{self.name}_{column}": column for column in self.columns}


def convert_histories(inputs: Sequence[Path], out: Path, options: HistoryOptions, overwrite: bool = False) -> None:
    """Write the rows of Parquet files, globs or folders of them, in order of time, with lists of what came before.

    Rows of one moment are in the order of the files. Memory holds a million rows or, if they are more, those of one
    moment, and the newest values of all users so far.

    Raises:
        UserError: a column is missing, null or of a type that does not fit, or the folder of earlier rows does not fit.
    """
    check_bounds(options)
    log = _Log(inputs, options)
    carried, kinds = _carried(options, log)
    marker = {"kind": KIND, "inputs": list(map(str, inputs)), "options": asdict(options), "until": _json(log.until)}
    group_rows = max(1000, min(ROW_GROUP_ROWS, GROUP_VALUES // options.history))
    num_unknown = 0
    with replacing(out, marker, overwrite) as folder:
        with PartWriter(folder, group_rows, FILE_ROWS) as writer:
            for rows, time in log.stretches():
                users, counts = id_column(rows, options.user, nulls=True), _counting(rows, options.history_where)
                columns = {name: rows[column] for name, column in options.lists.items()}
                stretch = Stretch(users, time, counts, columns, carried, kinds, options.history)
                for start in range(0, len(rows), group_rows):
                    part = rows.select(log.columns).slice(start, group_rows)
                    for name, lists in stretch.lists(start, start + group_rows).items():
                        part = part.append_column(name, lists)
                    writer.write(part)
                carried = stretch.carried(group_rows)
                num_unknown += users.null_count
        with naming(folder / USERS):
            pq.write_table(carried, folder / USERS, group_rows, compression="zstd", write_page_checksum=True)
    if num_unknown:
        print(f"note: {num_unknown:,} rows have no {options.user}, and an empty history", file=sys.stderr)


def _counting(rows: pa.Table, where: str | None) -> np.ndarray:
    """Return the rows that histories are made of, [rows] bool."""
    if where is None:
        return np.ones(len(rows), bool)
    return np.asarray(is_true(rows, where, "--history-where").fill_null(False))


class _Log:
    """The rows of a log, in order of time.

    Attributes:
        schema: of the columns of all files, then the fields of structs that options name.
        columns: those of all files.
        until: the last time.
    """

    def __init__(self, inputs: Sequence[Path], options: HistoryOptions) -> None:
        self._files, self._options = LogFiles("INPUT", inputs), options
        named = [options.user, options.time, *options.lists.values()]
        named += [*columns_where(options.history_where, "--history-where"), *columns_where(options.where)]
        self.columns, self._num_groups, rows = list[str](), list[int](), pa.table({})
        for file in self._files:
            self.columns = list(dict.fromkeys([*self.columns, *file.columns]))
            self._num_groups.append(file.num_row_groups)
            head = file.read(list(dict.fromkeys([*file.columns, *named])), [])
            places = ["files before it", f"'{file.name}'"]
            rows = joined([rows, head], places) if head.schema != rows.schema else rows
        self.schema = pa.schema([(field.name, field.type) for field in rows.schema])
        self.user_kind = id_column(rows, options.user, nulls=True).type
        self._check(rows)
        self._survey()

    def _check(self, empty: pa.Table) -> None:
        """Raise a UserError for lists and conditions that do not fit the columns of `empty`, a table without rows."""
        options = self._options
        written = [options.name, *(f"{options.name}_{column}" for column in options.columns)]
        for name in written:
            if name in self.schema.names or written.count(name) > 1:
                raise UserError(f"there would be two columns {name!r}; call the lists otherwise, as in --name clicked")
        for column in options.lists.values():
            if pa.types.is_nested(kind := self.schema.field(column).type):
                raise UserError(f"column {column!r} is {kind}; a history is of single values{advice(column, kind)}")
        for flag, where in (("--history-where", options.history_where), ("--where", options.where)):
            if where is not None:
                is_true(empty, where, flag)

    def _survey(self) -> None:
        """Read the first and last time of each row group, and choose where to cut into stretches."""
        numbers, sizes, bounds, samples = list[int](), list[int](), list[np.ndarray](), list[np.ndarray]()
        for number, table in self._row_groups([self._options.time]):
            if len(table):
                times = np.sort(time_values(table, self._options.time))
                numbers.append(number)
                sizes.append(len(times))
                bounds.append(times[[0, -1]])
                samples.append(times[::SAMPLED])
        if not numbers:
            where = self._options.where
            raise UserError(f"--where: no row of INPUT matches {where!r}" if where else "INPUT has no rows")
        self._groups, (self._first, self._last) = np.array(numbers), np.array(bounds).T
        self.since, self.until = self._first.min(), self._last.max()
        self._cuts = np.unique(np.sort(np.concatenate(samples))[:: max(1, STRETCH_ROWS // SAMPLED)])
        first, last = (np.searchsorted(self._cuts, times, "right") for times in (self._first, self._last))
        if (reads := np.average(1 + last - first, weights=sizes)) > _OFTEN:
            print(
                f"note: the log is not in the order of {self._options.time}, so each row is read {reads:.0f} times; "
                f"of a log in that order, once",
                file=sys.stderr,
            )

    def stretches(self) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield the rows of each stretch of time, sorted by time, and their times."""
        for place, least in enumerate(self._cuts):
            below = self._cuts[place + 1] if place + 1 < len(self._cuts) else None
            has_some = self._last >= least
            if below is not None:
                has_some &= self._first < below
            tables, times = [], []
            for _, table in self._row_groups(self.schema.names, set(self._groups[has_some].tolist())):
                time = time_values(table, self._options.time)
                inside = time >= least if below is None else (time >= least) & (time < below)
                tables.append(table.filter(pa.array(inside)))
                times.append(time[inside])
            time = np.concatenate(times)
            order = np.argsort(time, kind="stable")
            yield pa.concat_tables(tables).take(pa.array(order)), time[order]

    def _row_groups(self, names: Sequence[str], chosen: set[int] | None = None) -> Iterator[tuple[int, pa.Table]]:
        """Yield the numbers of row groups, in the order of the files, and columns of their rows that match."""
        wanted = list(dict.fromkeys([*names, *columns_where(self._options.where)]))
        like = pa.schema([self.schema.field(name) for name in wanted]).empty_table()
        first = 0
        for number, count in enumerate(self._num_groups):
            groups = [group for group in range(count) if chosen is None or first + group in chosen]
            if groups:
                file = self._files.open(number)
                there = [name for name in wanted if file.has(name)]
                for group in groups:
                    places = ["all files together", f"'{file.name}'"]
                    table = joined([like, file.read(there, [group])], places)
                    if self._options.where is not None:
                        table = rows_where(table, self._options.where)
                    yield first + group, table.select(names)
            first += count


def _carried(options: HistoryOptions, log: _Log) -> tuple[pa.Table, pa.Schema]:
    """Return the lists before the first row of a log, and the types of users and of values, both for `Stretch`.

    Raises:
        UserError: the folder of `--after` was written with other options, or has rows that are not earlier.
    """
    kinds = pa.schema(
        [(options.user, log.user_kind), *((n, log.schema.field(c).type) for n, c in options.lists.items())]
    )
    if options.after is None:
        return carried_schema(kinds).empty_table(), kinds
    _check_after(options, options.after, log)
    before = LogFiles("--after", [options.after / USERS]).open(0).read(kinds.names)
    flat = pa.schema([before.schema.field(0), *((f.name, f.type.value_type) for f in list(before.schema)[1:])])
    try:
        kinds = joined([flat.empty_table(), kinds.empty_table()]).schema
    except UserError as error:
        raise error.within(f"--after {options.after}") from None
    return before.cast(carried_schema(kinds)), kinds


def _check_after(options: HistoryOptions, folder: Path, log: _Log) -> None:
    """Raise a UserError if rows of a log do not follow those of an earlier folder."""
    marker = read_marker(folder)
    if marker is None or marker.get("kind") != KIND:
        raise UserError(f"--after: {folder} was not written by `recsys prepare histories`")
    for key in ("user", "item", "time", "columns", "name", "history", "history_where"):
        before, now = marker["options"][key], getattr(options, key)
        if before != now:
            flag = key.replace("_", "-")
            raise UserError(
                f"--after: {folder} was written with --{flag} {before!r}, and this is {now!r}; give the same"
            )
    until, since = marker["until"], _json(log.since)
    if isinstance(until, str) != isinstance(since, str):
        raise UserError(
            f"--after: {folder} ends at {options.time} {until!r}, which does not compare with {since!r} of INPUT"
        )
    if not log.since > (np.datetime64(until) if isinstance(until, str) else until):
        raise UserError(
            f"--after: {folder} has rows up to {options.time} {until!r}, and INPUT begins at {since!r}; all rows "
            f'are to come after: --where "{written(options.time)} > {until!r}" leaves out others'
        )


def _json(time: np.generic) -> str | int | float:
    """Return a time as a JSON value, with all its digits."""
    return str(time) if isinstance(time, np.datetime64) else time.item()
