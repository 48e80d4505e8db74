"""Features of users and items from tables of their own, with a row for each id."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from recsys.datasets.logs import id_column, joined
from recsys.errors import UserError, counted


def described(flag: str, table: pa.Table, ids: pa.Array, all_of_them: bool) -> pa.Table:
    """Return ids with features, which are null if a table has no row for an id.

    Args:
        flag: by which the user named the table's files, for messages.
        table: its ids in the first column, then features.
        ids: of a log, each once.
        all_of_them: ids that only the table has follow those of the log; otherwise they are left out.

    Raises:
        UserError: an id is null or occurs twice, or no type holds the ids of both.
    """
    names = table.column_names
    if num_nulls := table[names[0]].null_count:
        raise UserError(
            f"{flag}: column {names[0]!r} holds {counted(num_nulls, 'null')}, and every row needs an id; write it "
            f"without them"
        )
    both = [pa.table({names[0]: column}) for column in (ids, id_column(table, names[0]))]
    every = joined(both, ["the log", flag])[names[0]].combine_chunks().dictionary_encode()
    numbers = every.indices.to_numpy()[len(ids) :]
    counts = np.bincount(numbers)
    if counts.max(initial=0) > 1:
        raise UserError(
            f"{flag}: column {names[0]!r} holds {every.dictionary[counts.argmax()]} in {counts.max():,} rows; keep one "
            f"row of each id"
        )
    row = np.full(len(every.dictionary), -1)
    row[numbers] = np.arange(len(numbers))
    row = row if all_of_them else row[: len(ids)]
    chosen = pa.array(row, mask=row < 0)
    return pa.table([every.dictionary.slice(0, len(row)), *(table[name].take(chosen) for name in names[1:])], names)
