"""A Parquet log of interactions as retrieval data: its rows read, an existing split, or one made, and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.datasets.retrieval import Log, split_last, split_per_user, write_retrieval
from recsys.datasets.writer import SPLITS, columns_where, replacing, rows_where
from recsys.errors import UserError, nearest

WRITTEN = ("history", "targets", "seen")
HOLD_OUT = ("last", "random")
_SPLIT_VALUES = {"train": 0, "valid": 1, "test": 2, "0": 0, "1": 1, "2": 2, "false": 0, "true": 2}


class Columns(NamedTuple):
    """What is what in a log: the names of its columns; `time` is None where the rows are in order."""

    user: str
    item: str
    time: str | None = None
    user_features: Sequence[str] = ()
    item_features: Sequence[str] = ()


class HoldOut(NamedTuple):
    """Which rows are held out.

    Attributes:
        rule: one of HOLD_OUT, where nothing else is given.
        column: of the log, with train, valid or test in each row, or 0, 1 or 2, or whether it is of test.
        valid, test: files, or folders of them, of the rows that are held out; the other inputs are all of train.
    """

    rule: str = HOLD_OUT[0]
    column: str | None = None
    valid: Sequence[Path] = ()
    test: Sequence[Path] = ()


def convert_log(
    inputs: Sequence[Path],
    out: Path,
    columns: Columns,
    hold_out: HoldOut,
    where: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the interactions of Parquet files, or folders of them, below ``out`` as `write_retrieval` does.

    Of a user's rows with one item the first counts; of an existing split, the first of the first part. Features are
    those of the user's, or item's, last row. The columns are held in memory, histories too: some 900 bytes a row.

    Args:
        where: a filter of the log's rows, see ``parse_filter``.

    Raises:
        UserError: a column that is not there, is null somewhere or is no time; nothing to hold out.
    """
    names = [columns.user, columns.item, *filter(None, [columns.time])]
    features = [*columns.user_features, *columns.item_features]
    repeated = {name for name in [*names, *features] if [*names, *features, *WRITTEN].count(name) > 1}
    if repeated:
        raise UserError(f"column {min(repeated)!r} is named twice, or is one of those written: {', '.join(WRITTEN)}")
    wanted = list(dict.fromkeys([*names, *features, *filter(None, [hold_out.column])]))
    parts = [_read(paths, wanted, where) for paths in (inputs, hold_out.valid, hold_out.test) if paths]
    table = _joined(parts)
    log, split = _log(table, columns, _given_split(table, hold_out, [part.num_rows for part in parts]))
    last = hold_out.rule == "last" if split is None else _held_out_last(log, split)
    if split is None:
        split = split_last(log.user, log.time) if last else split_per_user(log.user)
        if not (split == 1).any():
            raise UserError(f"no user has {3 if last else 10} different items, as many as it takes to hold some out")
    marker = {
        "kind": "retrieval",
        "inputs": [str(path) for path in inputs],
        "hold_out": _told(hold_out),
        "where": where,
    }
    with replacing(out, marker, overwrite) as folder:
        write_retrieval(folder, log, split, last)


def _told(hold_out: HoldOut) -> str | dict[str, Any]:
    if hold_out.column is not None:
        return {"column": hold_out.column}
    files = {name: [str(path) for path in getattr(hold_out, name)] for name in SPLITS[1:]}
    return files if any(files.values()) else hold_out.rule


def _given_split(table: pa.Table, hold_out: HoldOut, sizes: Sequence[int]) -> np.ndarray | None:
    """Return the split that the log has already, int8 [rows], an index into SPLITS."""
    if hold_out.column is not None:
        values = pc.cast(table[hold_out.column], pa.string())
        places = pc.index_in(values, pa.array(_SPLIT_VALUES))
        if places.null_count:
            other = values.filter(pc.is_null(places))[0]
            raise UserError(
                f"column {hold_out.column!r} holds {other}; a split is train, valid and test, or 0, 1 "
                f"and 2, or whether a row is of test (true or false)"
            )
        split = np.array(list(_SPLIT_VALUES.values()))[places.to_numpy()]
    elif hold_out.valid or hold_out.test:
        numbers = [i for i, given in enumerate((True, hold_out.valid, hold_out.test)) if given]
        split = np.repeat(numbers, sizes)
    else:
        return None
    if not ((split == 0).any() and (split > 0).any()):
        raise UserError("the split has rows of train alone, or none; rows to train on and rows to evaluate are needed")
    return split.astype(np.int8)


def _read(inputs: Sequence[Path], names: list[str], where: str | None) -> pa.Table:
    files = [file for path in inputs for file in (sorted(path.rglob("*.parquet")) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"there is no .parquet file in {', '.join(map(str, inputs))}")
    tables = []
    for file in files:
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as opened:
                present = opened.schema_arrow.names
                wanted = list(dict.fromkeys([*names, *columns_where(where)]))
                missing = [name for name in wanted if name not in present]
                if missing:
                    others = f"only {', '.join(present)}{nearest(missing[0], present)}"
                    raise UserError(f"{file} has no column {missing[0]!r}, {others}")
                table = opened.read(wanted)
        except (OSError, pa.ArrowInvalid) as error:
            hint = "; `python -m recsys prepare csv` makes Parquet of delimited files"
            raise UserError(f"{file} cannot be read as Parquet ({error}){hint}") from None
        tables.append((table if where is None else rows_where(table, where)).select(names))
    return _joined(tables)


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UserError(f"the files' columns are of different types: {error}") from None


def _log(table: pa.Table, columns: Columns, split: np.ndarray | None) -> tuple[Log, np.ndarray | None]:
    """Return each user's first row with each item, and the split of these rows, where there is one."""
    user, users = _numbered(table, columns.user)
    item, items = _numbered(table, columns.item)
    time = np.arange(len(table)) if columns.time is None else _ranks(table, columns.time)
    order = np.argsort(time, kind="stable")
    first_order = order if split is None else order[np.argsort(split[order], kind="stable")]
    _, first = np.unique(user[first_order] * len(items[0]) + item[first_order], return_index=True)
    rows = np.sort(first_order[first])
    for codes, known, names in ((user, users, columns.user_features), (item, items, columns.item_features)):
        latest = np.empty(len(known[0]), np.int64)
        latest[codes[order]] = order  # of several the last stays
        known += [table[name].take(pa.array(latest)) for name in names]
    kept = table.select([columns.time]).take(pa.array(rows)) if columns.time else None
    log = Log(
        user[rows],
        item[rows],
        time[rows],
        kept,
        pa.table(users, [columns.user, *columns.user_features]),
        pa.table(items, [columns.item, *columns.item_features]),
    )
    return log, None if split is None else split[rows]


def _numbered(table: pa.Table, name: str) -> tuple[np.ndarray, list[pa.Array]]:
    """Return for each row the number of its id, int64, and the ids in the order in which they come."""
    kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)
    column = _whole_column(table, name, kinds, "an id", "an integer or a string")
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), [encoded.dictionary]


def _ranks(table: pa.Table, name: str) -> np.ndarray:
    """Return the place of each row's time among all times, int64."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_temporal)
    column = _whole_column(table, name, kinds, "a time", "a number, a date or a timestamp")
    return np.unique(column.to_numpy(), return_inverse=True)[1]


def _whole_column(
    table: pa.Table, name: str, kinds: Sequence[Callable[[pa.DataType], bool]], what: str, allowed: str
) -> pa.ChunkedArray:
    """Return a column of one of some kinds that has a value in each row; UserError for another."""
    column = table[name]
    if not any(fits(column.type) for fits in kinds):
        raise UserError(f"column {name!r} is {column.type}; {what} is {allowed}")
    if column.null_count:
        raise UserError(f"column {name!r} holds {column.null_count:,} nulls; every row needs {what}")
    return column


def _held_out_last(log: Log, split: np.ndarray) -> bool:
    """Whether no row that is held out came before one of its user's in train."""
    latest = np.full(log.users.num_rows, -1)
    np.maximum.at(latest, log.user[split == 0], log.time[split == 0])
    return bool((log.time[split > 0] >= latest[log.user[split > 0]]).all())
