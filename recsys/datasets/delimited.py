"""Delimited text, plain or compressed, to Parquet by the contract of data/README.md, in constant memory."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from recsys.data.filters import written
from recsys.datasets.delimited_errors import (
    CONVERT,
    beyond_int64,
    check_header,
    check_names,
    check_quotes,
    check_start,
    note_zeros,
    told,
)
from recsys.datasets.tokens import TOKENS_HELP, split_list, tokenize
from recsys.datasets.writer import (
    ROW_GROUP_ROWS,
    SPLITS,
    WHERE_HELP,
    PartWriter,
    check_bounds,
    check_column,
    is_true,
    option,
    replacing,
    rows_where,
    telling_odd,
)
from recsys.errors import UserError
from recsys.ids import hash_column, hash_uniform, is_text, raw_times
from recsys.runtime.arguments import names

TYPES = {name: pa.type_for_alias(name) for name in ("int8", "int32", "int64", "float32", "float64", "string")}
TYPES["timestamp"] = pa.timestamp("us")
LABEL = "label"
BLOCK_BYTES = 1 << 22  # of text, parsed at a time; types are inferred from the first block
_APART = "convert files of other columns to a folder of their own, and name those in data.optional_columns"
TIME_SAMPLE = 1 << 22  # values kept to find where a split by time cuts: exact for fewer rows


def _unescape(text: str) -> str:
    return "\t" if text in ("\\t", "tab") else text


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TYPE")
    return name, value


def _list_column(text: str) -> tuple[str, tuple[str, str]]:
    match = re.fullmatch(r"([^=]+)=(.+?)(?::([a-z]+[0-9]*))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SEPARATOR or NAME=SEPARATOR:TYPE")
    return match[1], (_unescape(match[2]), match[3] or "string")


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers separated by commas") from None


@dataclass
class CsvOptions:
    """How to read delimited files and what to make of them.

    ``types`` maps a column to a key of TYPES; ``lists`` maps one to (separator, key of TYPES). ``where`` and ``label``
    are filters. ``time_format`` is one of strptime. ``split`` has up to three shares of SPLITS.
    """

    delimiter: str = option(",", "one character; '\\t' is a tab", type=_unescape)
    quote: str | None = option(
        None, "sign around quoted fields; default: '\"'; '' if none are quoted, as often with tabs", metavar="SIGN"
    )
    columns: list[str] = option([], "names of columns, if the files have no header", type=names, metavar="A,B,C")
    types: dict[str, str] = option(
        {}, f"TYPE: {', '.join(TYPES)}", type=_pair, action="extend", nargs="+", metavar="NAME=TYPE"
    )
    lists: dict[str, tuple[str, str]] = option(
        {},
        "split a column into a list, such as 'genres=|' or 'items= :int64'; TYPE is string if not given",
        flag="list",
        type=_list_column,
        action="append",
        metavar="NAME=SEP[:TYPE]",
    )
    tokens: list[str] = option([], TOKENS_HELP, type=names, metavar="A,B")
    where: str | None = option(None, WHERE_HELP, metavar="FILTER")
    label: str | None = option(None, "add an int8 column 'label' from a filter: 'rating>=4'", metavar="FILTER")
    split: tuple[float, ...] = option((), "shares of train,valid,test: 0.8,0.1,0.1", type=_shares, metavar="SHARES")
    split_by: str = option(
        "random",
        "random: by row; time:COLUMN: later rows go to later splits; user:COLUMN: rows with one value stay together",
        metavar="RULE",
    )
    null_values: list[str] = option([], "further texts to read as null", type=names, metavar="A,B")
    time_format: str | None = option(None, "if times are not in ISO 8601: '%%d.%%m.%%Y %%H:%%M'", metavar="FORMAT")
    decimal_point: str = option(".", "sign in numbers: '.', or ',' as in 1,50", choices=(".", ","), metavar="SIGN")
    seed: int = option(0, "seed of the split")
    row_group_rows: int = option(ROW_GROUP_ROWS, "rows per row group", least=1)
    rows_per_file: int = option(16 * ROW_GROUP_ROWS, "rows per file", least=1)


def convert_csv(inputs: list[Path], out: Path, options: CsvOptions, overwrite: bool = False) -> None:
    """Write the rows of all files, in order, below ``out``: ``part-*.parquet``, or a folder a split.

    Types that are not given are inferred from the first block of the first file that has rows, and apply to all files.
    Empty fields and ``null_values`` become null. Raises UserError for what a user can mend: a missing file or column, a
    value that does not fit its type, files of different columns, a split without rows.
    """
    _check(options)
    reader = _Reader(inputs, options)
    cut = _Splitter(reader, options)
    marker = {"kind": "csv", "inputs": [str(path) for path in inputs], "columns": reader.names}
    with replacing(out, marker, overwrite) as folder:
        counts = _write(reader, cut, folder, options)
        for name, count in counts.items():
            if not count:
                why = "the input has too few rows" if options.where is None else "too few rows match --where"
                raise UserError(f"no row fell into {name or 'the output'}; {why}")


def _write(reader: _Reader, cut: _Splitter, folder: Path, options: CsvOptions) -> dict[str, int]:
    """Write all rows; return how many went to each split."""
    writers = {name: PartWriter(folder / name, options.row_group_rows, options.rows_per_file) for name in cut.names}
    with ExitStack() as stack:
        for writer in writers.values():
            stack.enter_context(writer)
        first_row = 0
        for batch in telling_odd(reader.batches()):
            splits = cut(batch, first_row)
            for index, writer in enumerate(writers.values()):
                writer.write(batch if len(writers) == 1 else batch.filter(pa.array(splits == index)))
            first_row += batch.num_rows
    return {name: writer.num_rows for name, writer in writers.items()}


def _check(options: CsvOptions) -> None:
    check_bounds(options)
    if len(options.delimiter.encode()) != 1:
        raise UserError(
            f"--delimiter must be one ASCII character, got {options.delimiter!r}; put one in its place in the files, "
            f"as by sed 's/{options.delimiter or '::'}/\\t/g'"
        )
    if len((options.quote or "").encode()) > 1:
        raise UserError(f"--quote must be one ASCII character, or '' for none, got {options.quote!r}")
    for name, dtype in [*options.types.items(), *((n, k) for n, (_, k) in options.lists.items())]:
        if dtype not in TYPES:
            raise UserError(f"type {dtype!r} of column {name!r} is unknown; allowed are {', '.join(TYPES)}")
    if both := options.types.keys() & {*options.lists, *options.tokens}:
        raise UserError(f"--types has {min(both)!r}, which is split; the type in a list is --list NAME=SEPARATOR:TYPE")
    if options.split and (len(options.split) > 3 or min(options.split) <= 0 or not abs(sum(options.split) - 1) <= 1e-6):
        raise UserError(f"--split takes up to three positive shares that add up to 1, got {options.split}")
    if options.split_by != "random" and not options.split:
        raise UserError(f"--split-by {options.split_by!r} has nothing to split; add shares, as in --split 0.8,0.1,0.1")


class _Reader:
    """Reads the input files, in the order given, as batches of the output schema."""

    def __init__(self, inputs: list[Path], options: CsvOptions):
        self.inputs, self.options = inputs, options
        self.types = {name: TYPES[dtype] for name, dtype in options.types.items()}
        self.types.update({name: pa.string() for name in [*options.lists, *options.tokens]})
        for path in inputs:
            check_start(path)
        self._first = next(filter(self._has_rows, inputs), inputs[0])  # a header alone, as Spark writes, shows no types
        head, self.names = self._open(self._first)
        self._check_names()
        found = {column.name: column.type for column in head.schema if column.name not in self.types}
        integers, floats = ([name for name in found if found[name] == kind] for kind in (pa.int64(), pa.float64()))
        self.types |= dict.fromkeys(integers + floats, pa.string())
        rows = self._first_rows(self._first)
        note_zeros(rows.select(integers))
        texts = dict.fromkeys(beyond_int64(rows.select(floats)), pa.string())
        self.types = {column.name: self._type(column) for column in head.schema} | texts
        if options.time_format and not any(map(pa.types.is_temporal, self.types.values())):
            raise UserError(
                f"--time-format {options.time_format!r} fits no column of {self._first}; correct it, or if the times "
                f"are digits alone, which are taken for numbers, name their column by --types NAME=timestamp"
            )
        if options.label and LABEL in self.names:
            raise UserError(f"the input has a column {LABEL!r} already; leave --label out to keep it")
        empty = pa.RecordBatch.from_pylist([], pa.schema(self.types))
        if options.where is not None:
            rows_where(empty, options.where)
        self.schema = self._convert(empty, self._first).schema

    def _has_rows(self, path: Path) -> bool:
        rows = self._first_rows(path)
        if rows.num_rows and self.options.columns:
            check_header(rows, path)
        return rows.num_rows > 0

    def _first_rows(self, path: Path) -> pa.RecordBatch:
        with self._open(path)[0] as reader, told(path):
            return next((rows for rows in reader if rows.num_rows), pa.RecordBatch.from_pylist([], reader.schema))

    def _check_names(self) -> None:
        if not self.options.columns:
            check_names(self.names, self._first, self.options.delimiter)
        if repeated := {name for name in self.names if self.names.count(name) > 1}:
            raise UserError(f"{self._first} has more than one column {sorted(repeated)[0]!r}")
        for name in [*self.options.types, *self.options.lists, *self.options.tokens]:
            check_column(name, self.names)

    def _type(self, column: pa.Field) -> pa.DataType:
        if pa.types.is_binary(column.type):
            raise UserError(f"{self._first}: column {column.name!r} is not UTF-8; {CONVERT}")
        if pa.types.is_timestamp(column.type) and column.type.unit == "s":  # later ones may have fractions
            return pa.timestamp(TYPES["timestamp"].unit, column.type.tz)
        return pa.string() if pa.types.is_null(column.type) else column.type  # nulls show no type; text fits all

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows of all files."""
        for path in self.inputs:
            for batch in self._raw(path, self.names):
                yield self._convert(batch, path)

    def column(self, name: str) -> Iterator[pa.Array]:
        """A single column, as it is read, batch by batch."""
        for path in self.inputs:
            for batch in self._raw(path, [name]):
                yield batch[name]

    def _raw(self, path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
        reader, names_in_file = self._open(path)
        if sorted(names_in_file) != sorted(self.names):
            columns, expected = ", ".join(names_in_file), ", ".join(self.names)
            raise UserError(f"{path} has columns {columns}, but {self._first} has {expected}; {_APART}")
        with reader, told(path):
            for batch in reader:
                if self.options.quote is None:
                    check_quotes(batch, path, self.options.delimiter)
                rows = batch if self.options.where is None else rows_where(batch, self.options.where)
                yield rows.select(names)

    def _open(self, path: Path) -> tuple[pa.csv.CSVStreamingReader, list[str]]:
        """Open a file; return what reads it, and the names of its columns."""
        options = self.options
        with told(path):
            reader = pa.csv.open_csv(
                path,
                # Without threads Arrow can name the row of a bad value.
                pa.csv.ReadOptions(column_names=options.columns, use_threads=False, block_size=BLOCK_BYTES),
                pa.csv.ParseOptions(
                    delimiter=options.delimiter,
                    quote_char='"' if options.quote is None else options.quote or False,
                    newlines_in_values=True,
                ),
                pa.csv.ConvertOptions(
                    column_types=self.types,
                    null_values=["", *options.null_values],
                    strings_can_be_null=True,
                    decimal_point=options.decimal_point,
                    timestamp_parsers=[pa.csv.ISO8601, *([options.time_format] if options.time_format else [])],
                ),
            )
            return reader, reader.schema.names

    def _convert(self, batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name, (separator, dtype) in self.options.lists.items():
            try:
                columns[name] = split_list(columns[name], separator, TYPES[dtype])
            except pa.ArrowInvalid as error:
                raise UserError(f"{path}: column {name!r} as list of {dtype}: {error}") from None
        columns |= {name: tokenize(columns[name], name) for name in self.options.tokens}
        if self.options.label:
            columns[LABEL] = is_true(batch, self.options.label, "--label").cast(pa.int8())
        return pa.RecordBatch.from_pydict(columns)


class _Splitter:
    """Assigns the rows of a batch to splits, by the number of the row or by one column."""

    def __init__(self, reader: _Reader, options: CsvOptions):
        self.names = SPLITS[: len(options.split)] or ("",)
        self.seed = options.seed
        self.shares = np.cumsum(options.split)[:-1]
        self.rule, _, self.column = options.split_by.partition(":")
        if self.rule not in ("random", "time", "user") or (self.rule == "random") != (not self.column):
            raise UserError(f"--split-by {options.split_by!r} is not random, time:COLUMN or user:COLUMN")
        if self.column:
            check_column(self.column, reader.names)
            if self.column in [*options.lists, *options.tokens]:
                raise UserError(f"--split-by cannot use column {self.column!r}, which is a list")
        if self.rule == "time" and len(self.names) > 1:
            self.cuts = self._time_cuts(reader)

    def __call__(self, batch: pa.RecordBatch, first_row: int) -> np.ndarray:
        """The index into ``names`` for each row; ``first_row`` is the number of the first row of the batch."""
        if len(self.names) == 1:
            return np.zeros(batch.num_rows, np.int64)
        if self.rule == "time":
            # side="right": all rows of the moment in which a split begins belong to it.
            return np.searchsorted(self.cuts, self._times(batch[self.column]), side="right")
        if self.rule == "random":
            keys = first_row + np.arange(batch.num_rows)
        else:
            keys = hash_column(pc.fill_null(batch[self.column].cast(pa.string()), ""))
        return np.searchsorted(self.shares, hash_uniform(keys, self.seed), side="right")

    def _times(self, column: pa.Array) -> np.ndarray:
        if column.null_count:
            raise UserError(f"column {self.column!r} holds nulls, so rows cannot be split by it as time")
        if pa.types.is_temporal(column.type):
            return raw_times(column)
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            hint = "; --time-format FORMAT reads times that are not in ISO 8601" if is_text(column.type) else ""
            raise UserError(
                f"column {self.column!r} is {column.type}; to split by time it must be a number or a time{hint}"
            )
        times = column.to_numpy(zero_copy_only=False)
        if np.isnan(times).any():
            leave_out = f'leave these out: --where "{written(self.column)} > 0"'
            raise UserError(f"column {self.column!r} holds NaN, which is not a time; {leave_out}")
        return times

    def _time_cuts(self, reader: _Reader) -> np.ndarray:
        """The first moments of valid and of test: quantiles of a sample of the rows, chosen by hash."""
        kept, kept_hash, limit, first_row = np.empty(0), np.empty(0), 1.0, 0
        for column in reader.column(self.column):
            times = self._times(column)
            chance = hash_uniform(first_row + np.arange(len(times)), self.seed)
            first_row += len(times)
            kept = np.concatenate([kept, times[chance < limit]])
            kept_hash = np.concatenate([kept_hash, chance[chance < limit]])
            if len(kept) > TIME_SAMPLE:
                limit /= 2
                kept, kept_hash = kept[kept_hash < limit], kept_hash[kept_hash < limit]
        if not len(kept):
            raise UserError("the input has no rows")
        return np.quantile(kept, self.shares, method="higher")
