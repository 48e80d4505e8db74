"""Retrieval data from interactions: rows to train on, queries for evaluation, and the items to find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsys.datasets.neighbours import neighbour_lists
from recsys.datasets.writer import ROW_GROUP_ROWS, write_parts
from recsys.errors import UserError
from recsys.runtime.loops import distinct

FILE_ROWS = 16 * ROW_GROUP_ROWS
HISTORY = 50
_VALUES_AT_ONCE = 1 << 22  # of lists in a table: Arrow's texts hold 2 GiB, and the lists need far more than the log
_RANDOM_SEED = 2020  # RecBole's


class Log(NamedTuple):
    """Interactions, one a row, with the features of users and items.

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
    """Chosen rows sorted by (user, time, order of the log), from which lists of items are cut.

    Args:
        log: whose rows these are.
        chosen: [rows] bool.
        most: items of a history.
    """

    def __init__(self, log: Log, chosen: np.ndarray, most: int = HISTORY) -> None:
        rows, self.most = np.flatnonzero(chosen), most
        self.rows = rows[np.lexsort((log.time[rows], log.user[rows]))]
        self._ids, self._item = log.items.column(0).combine_chunks(), log.item[self.rows]
        self.keys = time_key(log.user[self.rows], log.time[self.rows])

    def starts(self, user: np.ndarray) -> np.ndarray:
        """Starts of the rows of users, int64 [users]; the rows of a user end where those of the next number start."""
        return np.searchsorted(self.keys, time_key(user, np.zeros_like(user)))

    def lists(self, starts: np.ndarray, ends: np.ndarray, without: np.ndarray | None = None) -> pa.ListArray:
        """Lists of the item ids at positions from start to before end, each without one position."""
        offsets, positions = slices(starts, ends)
        if without is not None:
            lengths = ends - starts
            positions = positions[positions != np.repeat(without, lengths)]
            offsets = np.concatenate([[0], np.cumsum(lengths - ((starts <= without) & (without < ends)))])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), self._ids.take(pa.array(self._item[positions])))

    def history(self, user: np.ndarray, ends: np.ndarray) -> pa.ListArray:
        """The last items of each user before position ``ends``."""
        return self.lists(np.maximum(self.starts(user), ends - self.most), ends)

    def others(self, user: np.ndarray, positions: np.ndarray) -> pa.ListArray:
        """The last items of each user, without the one at the position of the row itself."""
        ends = self.starts(user + 1)
        starts = np.where(positions < ends - self.most, ends - self.most, ends - self.most - 1)
        return self.lists(np.maximum(self.starts(user), starts), ends, without=positions)


def slices(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of lists, int64 [lists + 1], and the positions in them, int64: from the start of each to before its end.

    Starts and ends are int64 [lists].
    """
    lengths = ends - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return offsets, np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)


def time_key(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """[rows] int64 that sort by user, then by time."""
    return (user << 32) | time


def split_random(user: np.ndarray) -> np.ndarray:
    """int8 per row, an index into SPLITS: all rows are shuffled, and those of each user cut 8:1:1.

    This is ``split_by_ratio`` of RecBole with its default seed: each held-out part is a tenth, rounded down, so users
    with fewer than ten rows have none. (RecBole has another rule for those.) With one user for all, all rows are cut.
    """
    order = shuffled(len(user))
    order = order[np.argsort(user[order], kind="stable")]
    return _cut_off(user, order, lambda count: count // 10)


def split_last(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """int8 per row, an index into SPLITS: the last row of a user is in test, the one before in valid.

    Users with fewer than three rows are only in train.
    """
    return _cut_off(user, np.lexsort((time, user)), lambda count: (count >= 3).astype(np.int64))


def split_time(time: np.ndarray) -> np.ndarray:
    """int8 per row, an index into SPLITS: the last tenth of all rows is in test, the tenth before in valid.

    Rows with the same time stay together, so all test rows are later than all rows of train.
    """
    number = len(time)
    first_valid, first_test = np.sort(time)[[number - 2 * (number // 10) - 1, number - number // 10 - 1]]
    return (time > first_valid).astype(np.int8) + (time > first_test)


def _cut_off(user: np.ndarray, order: np.ndarray, held_out: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the split of rows in order of their users: of each one's last rows so many are test, as many before valid.

    Args:
        held_out: function from the numbers of rows of users to how many of them each held-out part gets.
    """
    grouped = user[order]
    first, last = (np.searchsorted(grouped, grouped, side) for side in ("left", "right"))
    from_end, size = last - np.arange(len(grouped)), held_out(last - first)  # 1 for the last row of a user
    split = np.zeros(len(user), np.int8)
    split[order[from_end <= 2 * size]] = 1
    split[order[from_end <= size]] = 2
    return split


def shuffled(num_rows: int) -> np.ndarray:
    """The numbers below `num_rows`, int64 [num_rows], in the order that the default seed of RecBole gives."""
    import torch  # only the generator of torch reproduces it

    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(_RANDOM_SEED)).numpy()


def write_retrieval(
    folder: Path,
    log: Log,
    split: np.ndarray,
    last: bool,
    most: int = HISTORY,
    rows_of: str = "interactions",
    num_neighbours: int = 0,
) -> None:
    """Write ``train``, ``valid``, ``test`` and ``items`` below a folder; data/README.md lists their columns.

    If random rows are held out, train rows have the other items of their user, earlier and later ones, and histories of
    queries are cut from all of train. With only earlier items, a two-tower model learns which item comes next in a
    session: on MovieLens-100K, its recall@10 is then 0.15, and falls with the epochs, not 0.25.

    Args:
        split: [rows] int8, an index into SPLITS; a split without rows is not written.
        last: held-out rows are later than the rows of their user in train, and histories hold what came before.
        most: items of a history.
        rows_of: what a row of train is for: "interactions"; "users", with the history of all their items; or "windows",
            the same with several rows for a user with more items than `most`. The latter two have at least two items,
            and so must `most`.
        num_neighbours: number of neighbours to write for each item of such a history.

    Raises:
        UserError: no user has two items in train, and lists are wanted.
    """
    train, valid, test = (Timeline(log, split == index, most) for index in range(3))
    if rows_of == "interactions":
        write_files(_interactions(log, split, train, last), len(train.rows), folder / "train", files=4)
    else:
        lists = _lists_of_users(log, train, rows_of == "windows", num_neighbours)
        write_files([lists], len(lists), folder / "train", files=4)
    earlier = Timeline(log, split < 2, most)
    for name, held_out, seen in (("valid", valid, train), ("test", test, earlier)):
        user = distinct(log.user[held_out.rows])
        if len(user):
            queries = _queries(log, user, held_out, seen, seen if last else train)
            write_files(queries, len(user), folder / name, files=2)
    write_files([log.items], len(log.items), folder / "items", files=2)


def write_users(folder: Path, log: Log, most: int) -> None:
    """Write a row for each user to recommend to: the last ``most`` of all their items, and all of them as seen."""
    every = Timeline(log, np.ones(len(log.user), np.bool_), most)
    user = distinct(log.user)
    write_files(_queries(log, user, None, every, every), len(user), folder, files=2)


def _lists_of_users(log: Log, train: Timeline, is_cut: bool, num_neighbours: int) -> pa.Table:
    """One row for each user with two items or more, or with `is_cut` as many as the items fill.

    The last item of a row is then the first of the next one of the user: each item except the first follows another
    once. Raises UserError if no user has two.
    """
    user = distinct(log.user[train.rows])
    counts = train.starts(user + 1) - train.starts(user)
    user, counts = user[counts > 1], counts[counts > 1]
    if not len(user):
        raise UserError(
            "no user has 2 items in train, as many as --train-rows users and windows take of each; take in more rows, "
            "or give --train-rows interactions"
        )
    step = train.most - 1
    rows = -(-(counts - 1) // step) if is_cut else np.ones_like(counts)
    user, ends = user.repeat(rows), train.starts(user + 1).repeat(rows)
    from_last = rows.cumsum().repeat(rows) - 1 - np.arange(len(user))
    columns = {**columns_of(log.users.take(pa.array(user))), "history": train.history(user, ends - step * from_last)}
    if num_neighbours:
        columns["neighbours"], columns["neighbour_weights"] = neighbour_lists(columns["history"], num_neighbours)
    return pa.table(columns)


def _interactions(log: Log, split: np.ndarray, train: Timeline, last: bool) -> Iterator[pa.Table]:
    """One row for each row of train, with the other items of its user, or those before it; some rows at a time."""
    position = np.empty(len(split), np.int64)
    position[train.rows] = np.arange(len(train.rows))
    for rows in _parts(np.flatnonzero(split == 0), train.most):
        user = log.user[rows]
        history = train.history(user, position[rows]) if last else train.others(user, position[rows])
        users, items = log.users.take(pa.array(user)), log.items.take(pa.array(log.item[rows]))
        columns = {**columns_of(users.select([0])), **columns_of(items.select([0]))}
        if log.kept is not None:
            columns |= columns_of(log.kept.take(pa.array(rows)))
        columns |= {**columns_of(users), **columns_of(items), "history": history}
        yield pa.table(columns)


def _parts(rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Chunks of an array, each with so many rows that their lists of ``most`` values fit into a table."""
    step = max(1, _VALUES_AT_ONCE // most)
    return (rows[start : start + step] for start in range(0, len(rows), step))


def columns_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The columns of a table by name."""
    return dict(zip(table.column_names, table.columns, strict=True))


def _queries(
    log: Log, users: np.ndarray, held_out: Timeline | None, seen: Timeline, known: Timeline
) -> Iterator[pa.Table]:
    """One row for each user, with targets if something is held out; some rows at a time.

    ``seen`` follows the full-sort evaluation of RecBole (``Sampler.get_used_ids``): the items of all earlier splits, so
    test masks those of valid too.
    """
    for user in _parts(users, known.most):
        columns = columns_of(log.users.take(pa.array(user)))
        columns["history"] = known.history(user, known.starts(user + 1))
        for name, timeline in (("targets", held_out), ("seen", seen)):
            if timeline is not None:
                columns[name] = timeline.lists(timeline.starts(user), timeline.starts(user + 1))
        yield pa.table(columns)


def write_files(tables: Iterable[pa.Table], num_rows: int, folder: Path, files: int) -> None:
    """Write at least some files of four row groups each, even if these are small, so that every rank has its own."""
    rows_per_file = min(-(-num_rows // files), FILE_ROWS)
    write_parts(tables, folder, min(-(-rows_per_file // 4), ROW_GROUP_ROWS), rows_per_file)
