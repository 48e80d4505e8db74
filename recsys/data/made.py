"""Columns that are made of others as rows are decoded.

A cross has one id for each combination of the ids in several columns. A text such as `Action|Comedy` becomes a list of
the ids in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.arrays import whole
from recsys.data.storage import BadDataError
from recsys.errors import UserError
from recsys.ids import hash_column, hash_integers, is_text, numpy_view


@dataclass(frozen=True)
class Made:
    """How a column is made.

    Attributes:
        columns: those that it is made of.
        separator: what stands between the ids in the texts of its only column; None: it is a cross of its columns.
        integers: the ids in the texts become integers.
    """

    columns: tuple[str, ...]
    separator: str | None = None
    integers: bool = False

    @property
    def dtype(self) -> pa.DataType:
        """The plain type of the column."""
        if self.separator is None:
            return pa.int64()
        return pa.list_(pa.int64() if self.integers else pa.string())

    def check(self, column: str, dtype: pa.DataType) -> None:
        """Raise a UserError if it cannot be made of a column of this type."""
        if self.separator is None and pa.types.is_nested(dtype):
            raise UserError(f"column '{column}' is {dtype}, but a cross needs one id a row in each column")
        if self.separator is not None and not (is_text(dtype) or pa.types.is_null(dtype)):
            raise UserError(
                f"column '{column}' is {dtype}, but only texts have a separator in them; write it as text, or drop the "
                f"separator"
            )


def with_made(table: pa.Table, made: Mapping[str, Made], path: str, row_group: int) -> pa.Table:
    """Return the table with one more column for each entry of `made`, which has their names.

    Args:
        path, row_group: of the rows, for messages.

    Raises:
        UserError: names a column of a cross that holds no ids.
        BadDataError: names a column whose texts are not UTF-8, or hold something else than the integers asked for.
    """
    for name, how in made.items():
        columns = {column: whole(table.column(column)) for column in how.columns}
        if how.separator is None:
            table = table.append_column(name, _cross(columns))
            continue
        ((column, texts),) = columns.items()
        try:
            lists = _split(texts, how.separator)
            table = table.append_column(name, _as_integers(lists) if how.integers else lists)
        except pa.ArrowInvalid as error:
            parts = "integers of 64 bits (key `integers` of its feature)" if how.integers else "texts in UTF-8"
            message = f"column '{column}' of row group {row_group} of '{path}' cannot be split into {parts}: {error}"
            raise BadDataError(message, path, row_group) from error
    return table


def lists_in(texts: pa.Array, separator: str) -> pa.ListArray:
    """Return the ids in texts as list<string>; null stays null.

    Spaces around ids, and empty ids, are left out. Raises pa.ArrowInvalid for texts that are not UTF-8.
    """
    lists = _encoded_lists(texts, separator)
    return _with_values(lists, lists.values.dictionary_decode())


def _split(texts: pa.Array, separator: str) -> pa.ListArray:
    """Return the ids in texts as lists of dictionaries; those of a dictionary are split once, if most occur again."""
    if not pa.types.is_dictionary(texts.type):
        return _encoded_lists(texts, separator)
    if 2 * len(texts.dictionary) > len(texts):  # taking each list from those of the entries would take longer
        return _encoded_lists(texts.dictionary_decode(), separator)
    lists = _encoded_lists(texts.dictionary, separator)
    taken = _with_values(lists, lists.values.indices).take(texts.indices)
    return _with_values(taken, pa.DictionaryArray.from_arrays(taken.values, lists.values.dictionary))


def _encoded_lists(texts: pa.Array, separator: str) -> pa.ListArray:
    """Return the ids in texts as lists of dictionaries, whose entries are distinct.

    What is done to ids is done to the distinct ones, since copies of all of them took more memory than the texts.
    """
    lists = pc.split_pattern(texts.cast(pa.string()), separator)
    parts = lists.values.dictionary_encode()
    ids = pc.utf8_trim_whitespace(parts.dictionary).dictionary_encode()
    indices, offsets, entries = ids.indices.take(parts.indices), lists.offsets, ids.dictionary
    if len(empty := np.flatnonzero(pc.equal(entries, "").to_numpy(zero_copy_only=False))):
        is_there = numpy_view(indices) != empty[0]
        before = np.zeros(len(indices) + 1, np.int32)
        np.cumsum(is_there, out=before[1:])
        indices, offsets = indices.filter(pa.array(is_there)), pa.array(before[numpy_view(offsets)])
    values = pa.DictionaryArray.from_arrays(indices, entries)
    return pa.ListArray.from_arrays(offsets, values, mask=texts.is_null())


def _as_integers(lists: pa.ListArray) -> pa.ListArray:
    """Return lists of integers for lists of dictionaries of texts. Raises pa.ArrowInvalid for a text that is none."""
    indices, entries = lists.values.indices, lists.values.dictionary
    is_there = np.zeros(len(entries), np.bool_)  # entries may be of rows that a filter leaves out
    is_there[numpy_view(indices)] = True
    integers = pc.if_else(pa.array(is_there), entries, None).cast(pa.int64())
    return _with_values(lists, integers.take(indices))


def _with_values(lists: pa.ListArray, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(lists.offsets, values, mask=lists.is_null())


def _cross(by_name: Mapping[str, pa.Array]) -> pa.Array:
    """Return the ids of combinations: 64-bit hashes of the ids, null if one of these is null.

    So they are the same on every machine and split of the data, and no vocabulary of combinations is needed.
    """
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
