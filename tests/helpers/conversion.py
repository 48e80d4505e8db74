"""Conversion of columns in tests: a mapping that records its input, and the expected results in plain Python."""

import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys.config import Keep, NullPolicy
from recsys.data.convert import Ids, convert_floats, convert_ids
from recsys.data.spec import FloatColumn, IdColumn, Transform
from recsys.errors import UserError

RESERVED, EMPTY, REFUSE = NullPolicy.reserved, NullPolicy.empty, NullPolicy.refuse
LISTS = [
    pa.list_(pa.int64()),
    pa.list_(pa.int16()),
    pa.list_(pa.dictionary(pa.int32(), pa.int64())),
    pa.list_(pa.string()),
]


def number(id: Any) -> int:
    if isinstance(id, datetime.datetime):
        return int(id.replace(tzinfo=datetime.timezone.utc).timestamp())
    if isinstance(id, datetime.date):
        return (id - datetime.date(1970, 1, 1)).days
    return int(id)


class Numbered:
    """A mapping that reads an id as a number: with k rows per id, id i has the rows k*i … k*i + k - 1."""

    num_rows = 2**31

    def __init__(self, rows_per_id: int = 1) -> None:
        self.rows_per_id = rows_per_id
        self.ids: list[Any] = []
        self.out: np.ndarray | None = None

    def map(self, ids: pa.Array, out: np.ndarray, statistics: Any = None) -> None:
        assert ids.null_count == 0 and None not in ids.to_pylist()
        assert out.flags.c_contiguous and out.shape == (len(ids) * self.rows_per_id,)
        self.ids, self.out = ids.to_pylist(), out
        numbers = np.array([number(id) for id in self.ids], np.int64)
        out.reshape(-1, self.rows_per_id)[:] = numbers[:, None] * self.rows_per_id + np.arange(self.rows_per_id)
        if statistics is not None:
            statistics.mapped += len(ids)


class Counts:
    def __init__(self) -> None:
        self.mapped = self.nulls = self.rows = 0

    def add(self, rows: int = 0, nulls: int = 0) -> None:
        self.rows, self.nulls = self.rows + rows, self.nulls + nulls


def part(mapping: Any = None, **settings: Any) -> IdColumn:
    return IdColumn("history", "h", mapping or Numbered(), **settings)


def rows_of(ids: Ids, num_rows: int, dtype: Any = np.int64) -> list[list[int]]:
    """Return the table rows of each row of data; also check what is true of every result."""
    assert ids.values.dtype == dtype and ids.values.ndim == 1
    if ids.lengths is None:
        assert ids.values.shape == (num_rows,)
        return [[row] for row in ids.values.tolist()]
    assert ids.lengths.dtype == np.int32 and ids.lengths.shape == (num_rows,)
    return cut(ids.values, ids.lengths)


def cut(values: np.ndarray, lengths: np.ndarray) -> list[list[Any]]:
    ends = [0, *np.cumsum(lengths).tolist()]
    assert ends[-1] == len(values)
    return [values[a:b].tolist() for a, b in pairwise(ends)]


def convert(array: pa.Array, **settings: Any) -> list[list[int]]:
    return rows_of(convert_ids(array, part(**settings), np.dtype(np.int64)), len(array))


def refusal(action: Any) -> str:
    """Return the message of a UserError, which must be one line."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def expected(
    rows: list[Any], null: NullPolicy = RESERVED, max_length: int | None = None, keep: Keep = Keep.last
) -> list[list[int]]:
    """Return what rows of ids, or of lists of ids, become with the mapping `Numbered`."""
    result = []
    for row in rows:
        ids = row if isinstance(row, list) else [row]
        if max_length is not None:
            ids = ids[:max_length] if keep is Keep.first else ids[max(0, len(ids) - max_length) :]
        result.append([id or 0 for id in ids if not (id is None and null is EMPTY)])
    return result


def some_lists(count: int, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    rows: list[Any] = []
    for _ in range(count):
        ids = generator.integers(1, 1000, generator.integers(0, 8)).tolist()
        null = generator.random() < 0.1
        rows.append(None if null else [None if generator.random() < 0.2 else id for id in ids])
    return rows


def floats(array: pa.Array, fill: float | None = 0.0, transform: Transform | None = None) -> list[float]:
    found = convert_floats(array, FloatColumn("price", "p", fill, transform=transform))
    assert found.dtype == np.float32 and found.shape == (len(array),)
    return found.tolist()


def as_type(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Return rows of numbers, or of lists of numbers, as an array of any type."""
    value = kind.value_type if pa.types.is_nested(kind) else kind
    plain = value.value_type if pa.types.is_dictionary(value) else value
    if pa.types.is_string(plain):
        rows = [r if r is None else [None if i is None else str(i) for i in r] for r in rows]
    if not pa.types.is_dictionary(value):
        return pa.array(rows, kind)
    lists = pa.array(rows, pa.list_(plain))
    return pa.ListArray.from_arrays(lists.offsets, lists.values.dictionary_encode(), mask=lists.is_null())
