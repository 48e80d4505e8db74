"""Retrieval data from a Parquet log of interactions: reading, an existing or a new split, and writing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.datasets.catalogue import described
from recsys.datasets.logs import LogFiles, id_column, joined, time_values
from recsys.datasets.retrieval import HISTORY, Log, split_last, split_random, split_time, write_retrieval, write_users
from recsys.datasets.tokens import TOKENS_HELP, tokenize
from recsys.datasets.writer import WHERE_HELP, check_bounds, columns_where, is_true, option, replacing, rows_where
from recsys.errors import UserError, counted
from recsys.runtime.arguments import names

WRITTEN = ("history", "targets", "seen", "neighbours", "neighbour_weights")
_FILES_HELP = ", as files or folders; all of INPUT is then train"
_TABLE_HELP = ": its id, in a column named as in the log, and"
_PATHS: dict[str, Any] = {"type": Path, "nargs": "+", "metavar": "PATH"}
_SPLIT_VALUES = {"train": 0, "valid": 1, "test": 2, "0": 0, "1": 1, "2": 2, "false": 0, "true": 2}


@dataclass
class LogOptions:
    """Columns of a log by role, and the rows to hold out: by a rule, or as split by the log or its files."""

    user: str = option("user_id", "column of users", metavar="COLUMN")
    item: str = option("item_id", "column of items, or of lists of items in order of time", metavar="COLUMN")
    time: str | None = option(None, "column of times; without it, rows are assumed to be in order", metavar="COLUMN")
    user_features: list[str] = option([], "columns of the log, or of --users", type=names, metavar="A,B")
    item_features: list[str] = option([], "columns of the log, or of --items", type=names, metavar="A,B")
    users: list[Path] = option([], f"a row for each user{_TABLE_HELP} --user-features", **_PATHS)
    items: list[Path] = option(
        [], f"a row for each item{_TABLE_HELP} --item-features; items that no user has count too", **_PATHS
    )
    tokens: list[str] = option([], TOKENS_HELP, type=names, metavar="A,B")
    where: str | None = option(None, WHERE_HELP, metavar="FILTER")
    train_rows: str = option(
        "interactions",
        "interactions: each with the earlier items of its user, without repeats of an item; users: each with a list of "
        "items, for sequence models; windows: the same, but lists longer than --history are cut up",
        choices=("interactions", "users", "windows"),
    )
    history: int = option(HISTORY, "most items of a history; the newest are kept", least=1)
    neighbours: int = option(
        0,
        "with --train-rows users, for UltraGCN: add columns neighbours and neighbour_weights, for this many items that "
        "occur most often with each item of the history",
        least=0,
    )
    hold_out: str = option(
        "last",
        "last: the last item of each user is in test, the one before in valid; random: a tenth of the items of each "
        "user is in each, as in RecBole; time: the last tenth of all rows by time is in test, the tenth before in "
        "valid; none: all are in train",
        choices=("last", "random", "time", "none"),
    )
    split_column: str | None = option(
        None, "column with the split of a row: train, valid or test; 0, 1 or 2; or true for test", metavar="COLUMN"
    )
    valid_where: str | None = option(None, "rows of valid, as in --where; all others are train", metavar="FILTER")
    test_where: str | None = option(None, "rows of test, as in --where; all others are train", metavar="FILTER")
    valid: list[Path] = option([], f"rows of valid{_FILES_HELP}", **_PATHS)
    test: list[Path] = option([], f"rows of test{_FILES_HELP}", **_PATHS)


def convert_log(inputs: Sequence[Path], out: Path, options: LogOptions, overwrite: bool = False) -> None:
    """Write what `write_retrieval` and `write_users` make of a log of Parquet files, globs or folders of them.

    If a user has several rows with one item, the first counts, unless users are the rows of train; in an existing
    split, the first in the first part. Features come from the last row of the user or item, or from a table of their
    own. Memory holds the columns, some 150 bytes a row for integer ids, and lists for some rows at a time.

    Raises:
        UserError: a column is missing, has nulls or is no time, or there is nothing to hold out.
    """
    wanted = _wanted_columns(options)
    parts = [
        _one_item_a_row(_read(flag, paths, wanted, options.where), options.item)
        for flag, paths in (("INPUT", inputs), ("--valid", options.valid), ("--test", options.test))
        if paths
    ]
    table = joined(parts)
    if not len(table):
        raise UserError("INPUT holds no items")
    log, split = _log(table, options, _given_split(table, options, [part.num_rows for part in parts]))
    log = log._replace(users=_tokenized(log.users, options.tokens), items=_tokenized(log.items, options.tokens))
    last = options.hold_out != "random" if split is None else _held_out_last(log, split)
    if split is None:
        split = _new_split(log, options.hold_out)
    marker = {"kind": "retrieval", "inputs": list(map(str, inputs)), "options": asdict(options)}
    with replacing(out, marker, overwrite) as folder:
        write_retrieval(folder, log, split, last, options.history, options.train_rows, options.neighbours)
        write_users(folder / "users", log, options.history)
    _tell_left_out(len(table), len(log.user))
    _tell_repeats(log, split)


def _wanted_columns(options: LogOptions) -> list[str]:
    """Return the columns to read of a log. Raises UserError for options that do not go together."""
    check_bounds(options)
    wheres = {"--valid-where": options.valid_where, "--test-where": options.test_where}
    ways_to_split = [options.valid or options.test, options.split_column, options.hold_out != LogOptions().hold_out]
    if sum(map(bool, [*ways_to_split, any(wheres.values())])) > 1:
        raise UserError(
            "--valid and --test are a split by themselves, as are --valid-where and --test-where, --split-column, and "
            "--hold-out; give one of them"
        )
    if options.train_rows != "interactions" and options.history < 2:
        raise UserError(
            f"--history {options.history} leaves one item of each list of --train-rows {options.train_rows}, and "
            f"nothing that follows it; it must be at least 2"
        )
    if options.neighbours and options.train_rows != "users":
        raise UserError("--neighbours are those of a user's list of items; it goes with --train-rows users")
    columns = [options.user, options.item, *filter(None, [options.time])]
    columns += [*options.user_features, *options.item_features]
    if unread := {*options.tokens} - {*options.user_features, *options.item_features}:
        raise UserError(
            f"--tokens: {min(unread)!r} is not a feature; name it in --item-features or --user-features too"
        )
    repeated = {name for name in columns if [*columns, *WRITTEN].count(name) > 1}
    if repeated:
        raise UserError(f"column {min(repeated)!r} is named twice, or is one of those written: {', '.join(WRITTEN)}")
    elsewhere = {*(options.user_features if options.users else ()), *(options.item_features if options.items else ())}
    columns = [name for name in columns if name not in elsewhere] + [*filter(None, [options.split_column])]
    columns += [name for flag, where in wheres.items() for name in columns_where(where, flag)]
    return list(dict.fromkeys(columns))


def _tokenized(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return a table of users or items in which the texts of its columns among `names` are lists of words."""
    for place, name in enumerate(table.column_names):
        table = table.set_column(place, name, tokenize(table[name], name)) if name in names else table
    return table


def _tell_left_out(num_rows: int, num_kept: int) -> None:
    """Print how many rows were left out because their user had the item before."""
    if repeated := num_rows - num_kept:
        print(
            f"note: {repeated:,} of {num_rows:,} rows have an item that their user has in another row, too, and are "
            f"left out. If people choose items again, --train-rows users keeps these rows, for models that read lists",
            file=sys.stderr,
        )


def _tell_repeats(log: Log, split: np.ndarray) -> None:
    """Print how many held-out rows have items that their users had before, and that are therefore never found."""
    pair = log.user * len(log.items) + log.item
    for number, name in ((1, "valid"), (2, "test")):
        held_out = pair[split == number]
        if again := np.isin(held_out, pair[split < number]).sum():
            print(
                f"note: {again:,} of {len(held_out):,} targets of {name} are items that their users had before; these "
                f"are among 'seen', which no list holds, so they count as missed. Train with data.seen_column=null to "
                f"have them ranked, too",
                file=sys.stderr,
            )


def _new_split(log: Log, hold_out: str) -> np.ndarray:
    """Return the split of `--hold-out`. Raises UserError if it should hold rows out and would not."""
    if hold_out == "none":
        return np.zeros(len(log.user), np.int8)
    if hold_out == "last":
        split, why = split_last(log.user, log.time), "no user has 3 different items"
    elif hold_out == "random":
        split, why = split_random(log.user), "no user has 10 different items"
    else:
        split, why = split_time(log.time), "the log has fewer than 10 rows, or all are of one time"
    if not (split == 1).any():
        raise UserError(f"{why}, as many as it takes to hold some out")
    return split


def _given_split(table: pa.Table, options: LogOptions, sizes: Sequence[int]) -> np.ndarray | None:
    """Return the split that the log has already, int8 [rows], an index into SPLITS."""
    if options.split_column is not None:
        values = pc.cast(table[options.split_column], pa.string())
        places = pc.index_in(values, pa.array(_SPLIT_VALUES))
        if places.null_count:
            other = values.filter(pc.is_null(places))[0]
            raise UserError(
                f"column {options.split_column!r} holds {other}; a split is train, valid and test, or 0, 1 "
                f"and 2, or whether a row is of test (true or false)"
            )
        split = np.array(list(_SPLIT_VALUES.values()))[places.to_numpy()]
    elif options.valid_where or options.test_where:
        split = np.zeros(len(table), np.int8)
        for number, condition in enumerate((options.valid_where, options.test_where), start=1):
            if condition is not None:
                flag = ("--valid-where", "--test-where")[number - 1]
                split[is_true(table, condition, flag).fill_null(False).to_numpy(zero_copy_only=False)] = number
    elif options.valid or options.test:
        numbers = [i for i, given in enumerate((True, options.valid, options.test)) if given]
        split = np.repeat(numbers, sizes)
    else:
        return None
    if not ((split == 0).any() and (split > 0).any()):
        raise UserError("the split has rows of train alone, or none; rows to train on and rows to evaluate are needed")
    return split.astype(np.int8)


def _read(flag: str, inputs: Sequence[Path], names: list[str], where: str | None) -> pa.Table:
    """Return columns of the rows of files that match, as training reads them: see `find_files` and `parsed_footer`."""
    wanted = list(dict.fromkeys([*names, *columns_where(where)]))
    tables, places = [], []
    for file in LogFiles(flag, inputs):
        table = file.read(wanted)
        places.append(f"'{file.name}'")
        tables.append((table if where is None else rows_where(table, where)).select(names))
    if where is not None and not any(map(len, tables)):
        raise UserError(f"--where: no row of {flag} matches {where!r}")
    return joined(tables, places)


def _one_item_a_row(table: pa.Table, item: str) -> pa.Table:
    """Return the rows of a log, with a row for each item if the items of a user, or a session, are a list."""
    column = table[item]
    if not pa.types.is_list(column.type):
        return table
    items = pc.list_flatten(column)
    if items.null_count:  # no --where can leave these out
        raise UserError(
            f"the lists of column {item!r} hold {counted(items.null_count, 'null')}, and every item needs an id; "
            f"write the lists without them"
        )
    rows = table.drop_columns([item]).take(pc.list_parent_indices(column))
    return rows.append_column(item, items)


def _log(table: pa.Table, columns: LogOptions, split: np.ndarray | None) -> tuple[Log, np.ndarray | None]:
    """Return the first row of each user with each item, or all rows, and their split, if there is one."""
    (user, users), (item, items) = _numbered(table, columns.user), _numbered(table, columns.item)
    time = np.arange(len(table)) if columns.time is None else _ranks(table, columns.time)
    order = np.argsort(time, kind="stable")
    first_order = order if split is None else order[np.argsort(split[order], kind="stable")]
    _, first = np.unique(user[first_order] * len(items) + item[first_order], return_index=True)
    rows = np.sort(first_order[first]) if columns.train_rows == "interactions" else np.arange(len(table))
    of_user, of_item = [columns.user, *columns.user_features], [columns.item, *columns.item_features]
    if columns.users:
        of_users = described("--users", _read("--users", columns.users, of_user, None), users, all_of_them=False)
    else:
        of_users = _featured(table, order, user, users, of_user)
    if columns.items:
        of_items = described("--items", _read("--items", columns.items, of_item, None), items, all_of_them=True)
    else:
        of_items = _featured(table, order, item, items, of_item)
    kept = table.select([columns.time]).take(pa.array(rows)) if columns.time else None
    log = Log(user[rows], item[rows], time[rows], kept, of_users, of_items)
    return log, None if split is None else split[rows]


def _featured(table: pa.Table, order: np.ndarray, numbers: np.ndarray, ids: pa.Array, names: list[str]) -> pa.Table:
    """Return ids, under the first of `names`, with the features of the last row of each; `numbers`: of ids, by row."""
    latest = np.empty(len(ids), np.int64)
    latest[numbers[order]] = order  # the last of several stays
    return pa.table([ids, *(table[name].take(pa.array(latest)) for name in names[1:])], names)


def _numbered(table: pa.Table, name: str) -> tuple[np.ndarray, pa.Array]:
    """Return the number of the id of each row, int64 [rows], and the ids in the order of their first rows."""
    encoded = id_column(table, name).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary


def _ranks(table: pa.Table, name: str) -> np.ndarray:
    """Return the place of the time of each row among all times, int64."""
    return np.unique(time_values(table, name), return_inverse=True)[1]


def _held_out_last(log: Log, split: np.ndarray) -> bool:
    """Whether no held-out row came before a row of its user in train."""
    latest = np.full(log.users.num_rows, -1)
    np.maximum.at(latest, log.user[split == 0], log.time[split == 0])
    return bool((log.time[split > 0] >= latest[log.user[split > 0]]).all())
