"""Logs of interactions as rows to train retrieval on, queries to evaluate it with, and the items to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.prepare import ROW_GROUP_ROWS, replacing, write_parts
from recsys.errors import UserError, nearest

WRITTEN = ("history", "targets", "seen")
HOLD_OUT = ("last", "random")
HISTORY = 50
FILE_ROWS = 16 * ROW_GROUP_ROWS
_RANDOM_SEED = 2020  # RecBole's


class Log(NamedTuple):
    """Interactions, one a row, and what is known of those who took part.

    Attributes:
        user, item: [rows] int64, rows of `users` and of `items`.
        time: [rows] int64, at least 0 and less than 2**32; rows of one time are in order.
        kept: [rows] further columns of training rows, if any.
        users, items: the ids in the first column, features in others.
    """

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    kept: pa.Table | None
    users: pa.Table
    items: pa.Table


class Timeline:
    """Chosen rows sorted by (user, time, order of the log), to cut lists of items out of.

    Args:
        item_ids: of every row of the log.
        chosen: [rows] bool.
    """

    def __init__(self, user: np.ndarray, item_ids: pa.Array, time: np.ndarray, chosen: np.ndarray) -> None:
        rows = np.flatnonzero(chosen)
        self.rows = rows[np.lexsort((time[rows], user[rows]))]
        self.items = item_ids.take(pa.array(self.rows))
        self.keys = time_key(user[self.rows], time[self.rows])

    def starts(self, user: np.ndarray) -> np.ndarray:
        """Where each user's rows begin; those of user + 1 begin where they end."""
        return np.searchsorted(self.keys, time_key(user, np.zeros_like(user)))

    def lists(self, starts: np.ndarray, ends: np.ndarray, without: np.ndarray | None = None) -> pa.ListArray:
        """Lists of the item ids at positions start to end, end excluded, and one position of each left out."""
        lengths = ends - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        if without is not None:
            positions = positions[positions != np.repeat(without, lengths)]
            offsets = np.concatenate([[0], np.cumsum(lengths - ((starts <= without) & (without < ends)))])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), self.items.take(pa.array(positions)))

    def history(self, user: np.ndarray, ends: np.ndarray) -> pa.ListArray:
        """The last HISTORY items of each user before position ``ends``."""
        return self.lists(np.maximum(self.starts(user), ends - HISTORY), ends)

    def others(self, user: np.ndarray, positions: np.ndarray) -> pa.ListArray:
        """The last HISTORY items of each user, the one at the row's own position left out."""
        ends = self.starts(user + 1)
        starts = np.where(positions < ends - HISTORY, ends - HISTORY, ends - HISTORY - 1)
        return self.lists(np.maximum(self.starts(user), starts), ends, without=positions)


def time_key(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """[rows] int64 that sort by user, then by time."""
    return (user << 32) | time


def split_per_user(user: np.ndarray) -> np.ndarray:
    """int8 per row, an index into SPLITS: shuffle all rows, cut each user's rows 8:1:1.

    RecBole's ``split_by_ratio(group_by=user)`` with its default seed: each held-out part is a tenth, rounded down,
    so that of users with fewer than ten nothing is. (RecBole has another rule for those.)
    """
    order = shuffled(len(user))
    order = order[np.argsort(user[order], kind="stable")]
    from_end, count = _from_end(user[order])
    tenth = count // 10
    split = np.zeros(len(user), np.int8)
    split[order[from_end <= 2 * tenth]] = 1
    split[order[from_end <= tenth]] = 2
    return split


def split_last(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """int8 per row, an index into SPLITS: a user's last row is of test, the one before of valid.

    Users of fewer than three rows are trained on alone.
    """
    order = np.lexsort((time, user))
    from_end, count = _from_end(user[order])
    split = np.zeros(len(user), np.int8)
    split[order[(from_end == 2) & (count >= 3)]] = 1
    split[order[(from_end == 1) & (count >= 3)]] = 2
    return split


def _from_end(grouped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of sorted users: the row's number from its user's end, 1 for the last, and that user's number of rows."""
    first = np.searchsorted(grouped, grouped, side="left")
    last = np.searchsorted(grouped, grouped, side="right")
    return last - np.arange(len(grouped)), last - first


def shuffled(num_rows: int) -> np.ndarray:
    """The numbers below `num_rows` in the order of RecBole's default seed."""
    import torch  # only torch's generator reproduces it

    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(_RANDOM_SEED)).numpy()


def write_retrieval(folder: Path, log: Log, hold_out: str) -> None:
    """Write ``train``, ``valid``, ``test`` and ``items`` below a folder; data/README.md lists their columns.

    Where random rows are held out, train rows know the user's other items, whether they came before or after, and a
    query's history is cut from all of train. From rows with only what came before them a two-tower model learns which
    item comes next in a session: on MovieLens-100K its recall@10 is 0.15 then, and falls with the epochs, not 0.25.

    Args:
        hold_out: one of HOLD_OUT.

    Raises:
        UserError: no user has items enough.
    """
    last = hold_out == "last"
    split = split_last(log.user, log.time) if last else split_per_user(log.user)
    if not (split == 1).any():
        raise UserError(f"no user has {3 if last else 10} different items, as many as it takes to hold some out")
    item_ids = log.items.column(0).combine_chunks().take(pa.array(log.item))
    train, valid, test = (Timeline(log.user, item_ids, log.time, split == index) for index in range(3))
    rows = np.flatnonzero(split == 0)
    position = np.empty(len(split), np.int64)
    position[train.rows] = np.arange(len(train.rows))
    user = log.user[rows]
    history = train.history(user, position[rows]) if last else train.others(user, position[rows])
    users, items = log.users.take(pa.array(user)), log.items.take(pa.array(log.item[rows]))
    columns = {**_columns(users.select([0])), **_columns(items.select([0]))}
    if log.kept is not None:
        columns |= _columns(log.kept.take(pa.array(rows)))
    columns |= {**_columns(users), **_columns(items), "history": history}
    write_files(pa.table(columns), folder / "train", files=4)
    earlier = Timeline(log.user, item_ids, log.time, split < 2)
    for name, held_out, seen in (("valid", valid, train), ("test", test, earlier)):
        queries = _queries(log, held_out, seen, seen if last else train)
        write_files(queries, folder / name, files=2)
    write_files(log.items, folder / "items", files=2)


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _queries(log: Log, held_out: Timeline, seen: Timeline, known: Timeline) -> pa.Table:
    """One row for each user with something held out.

    ``seen`` follows RecBole's full-sort evaluation (``Sampler.get_used_ids``): the items of all earlier splits, so the
    test masks those of valid too.
    """
    user = np.unique(log.user[held_out.rows])
    return pa.table(
        {
            **_columns(log.users.take(pa.array(user))),
            "history": known.history(user, known.starts(user + 1)),
            "targets": held_out.lists(held_out.starts(user), held_out.starts(user + 1)),
            "seen": seen.lists(seen.starts(user), seen.starts(user + 1)),
        }
    )


def write_files(table: pa.Table, folder: Path, files: int) -> None:
    """Write at least so many files of four row groups each: small ones too, so that every rank has its own to read."""
    rows_per_file = min(-(-table.num_rows // files), FILE_ROWS)
    write_parts([table], folder, min(-(-rows_per_file // 4), ROW_GROUP_ROWS), rows_per_file)


class Columns(NamedTuple):
    """What is what in a log: the names of its columns; `time` is None where the rows are in order."""

    user: str
    item: str
    time: str | None = None
    user_features: Sequence[str] = ()
    item_features: Sequence[str] = ()


def convert_log(inputs: list[Path], out: Path, columns: Columns, hold_out: str, overwrite: bool = False) -> None:
    """Write the interactions of Parquet files, or folders of them, below ``out`` as `write_retrieval` does.

    Of a user's rows with one item the first counts. Features are those of the user's, or item's, last row. The columns
    are held in memory, histories too: some 900 bytes a row.

    Raises:
        UserError: a column that is not there, is null somewhere or is no time; nothing to hold out.
    """
    names = [columns.user, columns.item, *filter(None, [columns.time])]
    features = [*columns.user_features, *columns.item_features]
    repeated = {name for name in [*names, *features] if [*names, *features, *WRITTEN].count(name) > 1}
    if repeated:
        raise UserError(f"column {min(repeated)!r} is named twice, or is one of those written: {', '.join(WRITTEN)}")
    log = _log(_read(inputs, [*names, *features]), columns)
    marker = {"kind": "retrieval", "inputs": [str(path) for path in inputs], "hold_out": hold_out}
    with replacing(out, marker, overwrite) as folder:
        write_retrieval(folder, log, hold_out)


def _read(inputs: list[Path], names: list[str]) -> pa.Table:
    files = [file for path in inputs for file in (sorted(path.rglob("*.parquet")) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"there is no .parquet file in {', '.join(map(str, inputs))}")
    tables = []
    for file in files:
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as opened:
                present = opened.schema_arrow.names
                missing = [name for name in names if name not in present]
                if missing:
                    others = f"only {', '.join(present)}{nearest(missing[0], present)}"
                    raise UserError(f"{file} has no column {missing[0]!r}, {others}")
                tables.append(opened.read(names))
        except (OSError, pa.ArrowInvalid) as error:
            hint = "; prepare_data.py csv makes Parquet of delimited files"
            raise UserError(f"{file} cannot be read as Parquet ({error}){hint}") from None
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UserError(f"the files' columns are of different types: {error}") from None


def _log(table: pa.Table, columns: Columns) -> Log:
    user, users = _numbered(table, columns.user)
    item, items = _numbered(table, columns.item)
    time = np.arange(len(table)) if columns.time is None else _ranks(table, columns.time)
    order = np.argsort(time, kind="stable")
    _, first = np.unique(user[order] * len(items[0]) + item[order], return_index=True)
    rows = np.sort(order[first])
    for codes, known, names in ((user, users, columns.user_features), (item, items, columns.item_features)):
        latest = np.empty(len(known[0]), np.int64)
        latest[codes[order]] = order  # of several the last stays
        known += [table[name].take(pa.array(latest)) for name in names]
    kept = table.select([columns.time]).take(pa.array(rows)) if columns.time else None
    return Log(
        user[rows],
        item[rows],
        time[rows],
        kept,
        pa.table(users, [columns.user, *columns.user_features]),
        pa.table(items, [columns.item, *columns.item_features]),
    )


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
