"""Histories of the rows of a stretch of time, from these rows and from lists carried over from earlier ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.datasets.logs import LARGE
from recsys.datasets.retrieval import slices, time_key


def carried_schema(kinds: pa.Schema) -> pa.Schema:
    """Return the schema of carried lists: the type of users, and lists of each type of values."""
    user, *values = kinds
    return pa.schema([user, *((value.name, pa.list_(value.type)) for value in values)])


class Stretch:
    """The rows of a stretch of time, in order of time, and the lists of their users.

    Args:
        users: of each row, null where unknown.
        time: [rows]; rows of one time do not see each other.
        counts: [rows] bool, whether the row may be in lists.
        columns: columns whose values are listed, by the names of the lists.
        before: users, each once, and lists of the values of their newest earlier rows, the oldest first.
        kinds: types of users, and of the values of each list.
        most: values of a list; the newest.
    """

    def __init__(
        self,
        users: pa.Array,
        time: np.ndarray,
        counts: np.ndarray,
        columns: Mapping[str, pa.ChunkedArray],
        before: pa.Table,
        kinds: pa.Schema,
        most: int,
    ) -> None:
        ids = users.cast(kinds.field(0).type).dictionary_encode()
        self._users, self._kinds, self._most = ids.dictionary, list(kinds)[1:], most
        # Unknown users share one further number, which has no lists.
        self._user = ids.indices.fill_null(len(self._users)).to_numpy().astype(np.int64)
        self._moment = np.cumsum(np.concatenate([[False], time[1:] != time[:-1]]))
        code = pc.index_in(before.column(0), self._users)
        self._others, known = before.filter(pc.is_null(code)), before.filter(pc.is_valid(code))
        own = np.flatnonzero(counts & (self._user < len(self._users)))
        own = own[np.argsort(self._user[own], kind="stable")]
        order = self._lay_out(code.drop_null().to_numpy(), pc.list_value_length(known.column(1)).to_numpy(), own)
        self._values = [
            _pooled(known[kind.name], columns[kind.name].take(pa.array(own)), kind.type).take(pa.array(order))
            for kind in self._kinds
        ]

    def _lay_out(self, known: np.ndarray, lengths: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Lay out the values by user: first those carried over, then those of these rows.

        Args:
            known: [users carried over], their numbers. lengths: of their lists.
            own: the rows that count, by user and then by time.

        Returns:
            The numbers of all values (those carried over, then those of `own`), in the order of their places.
        """
        user, size = self._user[own], len(self._users) + 1
        self._keys = time_key(user, self._moment[own])
        self._first = np.concatenate([[0], np.cumsum(np.bincount(user, minlength=size))])  # of a user in `own`
        self._length = np.zeros(size, np.int64)
        self._length[known] = lengths
        self._starts = np.concatenate([[0], np.cumsum(self._length + np.diff(self._first))])
        of_own = self._starts[user] + self._length[user] + np.arange(len(own)) - self._first[user]
        places = np.concatenate([slices(self._starts[known], self._starts[known] + lengths)[1], of_own])
        order = np.empty(len(places), np.int64)
        order[places] = np.arange(len(places))
        return order

    def lists(self, start: int, stop: int) -> dict[str, pa.ListArray]:
        """Return, by name, the lists of some rows: the earlier values of their users."""
        user = self._user[start:stop]
        # side="left": rows of the same moment do not count as earlier.
        ends = np.searchsorted(self._keys, time_key(user, self._moment[start:stop]), side="left")
        return self._up_to(user, self._starts[user] + self._length[user] + ends - self._first[user])

    def carried(self, count: int) -> pa.Table:
        """Return the lists carried over to later rows, in the form of `before`, computed for some users at a time."""
        tables = [self._others]
        for start in range(0, len(self._users), count):
            users = self._users.slice(start, count)
            user = np.arange(start, start + len(users))
            lists = self._up_to(user, self._starts[user + 1])
            table = pa.table([users, *lists.values()], self._others.schema)
            tables.append(table.filter(pc.greater(pc.list_value_length(table.column(1)), 0)))
        return pa.concat_tables(tables)

    def _up_to(self, user: np.ndarray, ends: np.ndarray) -> dict[str, pa.ListArray]:
        """Return, by name, the lists of users that end before given places of the values."""
        offsets, positions = slices(np.maximum(self._starts[user], ends - self._most), ends)
        bounds, chosen, lists = pa.array(offsets, pa.int32()), pa.array(positions), dict[str, pa.ListArray]()
        for kind, values in zip(self._kinds, self._values, strict=True):
            lists[kind.name] = pa.ListArray.from_arrays(bounds, values.take(chosen).cast(kind.type))
        return lists


def _pooled(carried: pa.ChunkedArray, own: pa.ChunkedArray, dtype: pa.DataType) -> pa.Array:
    """Concatenate the values of lists and those of a column."""
    dtype = LARGE.get(dtype, dtype)
    chunks = [*pc.list_flatten(carried).chunks, *own.chunks]
    return pa.concat_arrays([pa.array([], dtype), *(chunk.cast(dtype) for chunk in chunks)])
