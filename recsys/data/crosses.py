"""Crosses of columns: one id for each combination of the ids in several columns, made as rows are decoded."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from recsys.data.arrays import whole
from recsys.errors import UserError
from recsys.ids import hash_column, hash_integers


def with_crosses(table: pa.Table, crosses: Mapping[str, Sequence[str]]) -> pa.Table:
    """Return the table with one more column for each cross; `crosses` is its name → the columns it is made of.

    The id of a combination is a 64-bit hash of its ids, so that it is the same on every machine and split of the
    data, and no vocabulary of combinations is needed. It is null if one of its ids is null.

    Raises:
        UserError: names a column that holds no ids.
    """
    for name, columns in crosses.items():
        table = table.append_column(name, _cross({column: whole(table.column(column)) for column in columns}))
    return table


def _cross(by_name: Mapping[str, pa.Array]) -> pa.Array:
    columns = by_name.values()
    valid = np.logical_and.reduce([column.is_valid().to_numpy(zero_copy_only=False) for column in columns])
    mask = None if valid.all() else pa.array(valid)
    hashes = np.zeros(int(valid.sum()), np.uint64)
    for place, (name, column) in enumerate(by_name.items()):  # the place is the seed, so that a × b is not b × a
        try:
            hashes = hash_integers(hashes ^ hash_column(column if mask is None else column.filter(mask), place))
        except UserError as error:
            raise error.within(f"column '{name}' of a cross") from error
    ids = np.zeros(len(valid), np.int64)
    ids[valid] = hashes.view(np.int64)
    return pa.array(ids, mask=None if mask is None else ~valid)
