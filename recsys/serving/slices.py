"""Slices of an evaluation: of rows or of users' targets, by a column's values or how often data.train has them."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys.config import Config
from recsys.data.arrays import decoded
from recsys.data.batch import Batch
from recsys.data.dataset import Dataset
from recsys.data.facts import VocabularyRequest, measure
from recsys.data.fields import advice
from recsys.data.parquet import open_dataset, with_made
from recsys.data.wanted import column_of, made_columns, row_filter
from recsys.errors import UserError, in_words
from recsys.ids import IndexMapping
from recsys.runtime.logs import logger
from recsys.serving.finished import OpenRun

# Encodes values by the names of their slices, which are the dictionary.
_Encode = Callable[[pa.Array], pa.DictionaryArray]


@dataclass(frozen=True)
class Slices:
    """Splits batches by a column; made by `slices_by`.

    Attributes:
        column: to be read of the rows; None: the column of targets, whose items are in batches already.
        train: where occurrences are counted; None: slices are values.
    """

    column: str | None
    train: Dataset | None
    _encode: _Encode
    _names: list[str]  # of items' slices, and of targets that data.items lacks
    _of_items: torch.Tensor  # by position in data.items, and last for such targets, the place in `_names`

    def split(self, batch: Batch, rows: pa.Table) -> Iterator[tuple[str, Batch]]:
        """Yield the slices that a batch has, by name: the batch with the rows, or the targets, of each slice only.

        Args:
            rows: of the data, as they are in the files.
        """
        return self._of_targets(batch) if self.column is None else self._of_rows(batch, rows[self.column])

    def _of_rows(self, batch: Batch, column: pa.ChunkedArray) -> Iterator[tuple[str, Batch]]:
        encoded = self._encode(column.combine_chunks())
        places = np.full(len(batch.weights), -1)
        places[: len(encoded)] = encoded.indices
        for place in np.unique(encoded.indices).tolist():
            inside = torch.from_numpy(places == place).to(batch.weights.device)
            yield encoded.dictionary[place].as_py(), replace(batch, weights=batch.weights * inside)

    def _of_targets(self, batch: Batch) -> Iterator[tuple[str, Batch]]:
        assert batch.lists is not None
        lists = batch.lists.to_dict()
        items, lengths = lists["targets"].values(), lists["targets"].lengths()
        row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        places = self._of_items[items.long()]  # -1, of items that are not in data.items, is the last
        for place in places.unique().tolist():
            inside = places == place
            of_slice = torch.bincount(row[inside], minlength=len(lengths)).to(lengths.dtype)
            targets = JaggedTensor(items[inside], lengths=of_slice)
            sliced = KeyedJaggedTensor.from_jt_dict({**lists, "targets": targets})
            yield self._names[place], replace(batch, lists=sliced)


def slices_by(opened: OpenRun, column: str, bounds: Sequence[int]) -> Slices:
    """Return slices by a column's values, or by how often they occur in data.train; collective.

    Args:
        bounds: of the numbers of occurrences, ascending; none: slices are values.

    Raises:
        UserError: data.train cannot be read, or has no such ids.
    """
    config, corpus = opened.run.config, opened.inputs.corpus
    of_targets = corpus is not None and column == config.data.targets_column
    train: Dataset | None = None
    encode: _Encode = partial(_by_value, column)
    if bounds:
        columns = _item_columns(config) if of_targets else (column,)
        train, encode = _by_count(opened, columns, bounds, of_targets)
    encoded = encode(corpus if of_targets else pa.array([], pa.int64()))
    names = [*encoded.dictionary.to_pylist(), "not in data.items"]
    of_items = torch.from_numpy(np.append(encoded.indices, len(names) - 1)).to(opened.world.device)
    return Slices(None if of_targets else column, train, encode, names, of_items)


def _item_columns(config: Config) -> tuple[str, ...]:
    """Return the columns of data.train with the items that are trained on: its rows' own, or users' lists of them."""
    needs, features = config.model.needs(), config.features
    names = [needs.item_id or ""]
    if not needs.items_in_rows:
        lists = [name for name in needs.sequences if name not in needs.training_features]
        names = [name for name in lists if features[name].table == features[needs.item_id or ""].table]
        if not names:
            raise UserError(f"--cold: model {config.model.name} reads no list of items in data.train to count")
    return tuple(dict.fromkeys(column_of(config, name) for name in names))


@in_words({"config key 'data.train'": "config key 'data.train', where --cold counts"})
def _by_count(opened: OpenRun, columns: tuple[str, ...], bounds: Sequence[int], lists: bool) -> tuple[Dataset, _Encode]:
    """Count the ids in columns of data.train; collective. Return its dataset, and how ids are encoded.

    Args:
        lists: whether columns may have lists of ids.
    """
    config = opened.run.with_trained_rows()
    data, filter = config.data, row_filter(config, "train")
    made = {name: how for name, how in made_columns(config, "train").items() if name in columns}
    asks = {column: "--cold" for name in columns for column in (made[name].columns if name in made else [name])}
    train = opened.world.from_rank_zero(
        lambda: with_made(open_dataset("data.train", data.train, asks, data.max_rows, filter, data), made)
    )
    if not lists:
        _check_ids(columns[0], train.schema.field(columns[0]).type)
    logger.info("occurrences are counted in data.train: column %s of %d rows", ", ".join(columns), train.num_rows)
    requests = {str(bound): VocabularyRequest(columns, bound, sys.maxsize) for bound in bounds}
    vocabularies = list(measure(train, requests, [], opened.world).vocabularies.values())
    # The first begins with each of the others, because the most frequent ids come first.
    places, sizes = IndexMapping(vocabularies[0]), [len(ids) for ids in vocabularies]
    names = pa.array([*count_names(bounds), "null"])

    def encode(values: pa.Array) -> pa.DictionaryArray:
        _check_ids(columns[0], values.type)
        has_id, of_values = values.is_valid(), np.full(len(values), len(names) - 1)
        try:
            place = places.rows(values.filter(has_id))  # -1 if it is not there
        except (UserError, TypeError) as error:
            raise UserError(f"--cold: column '{columns[0]}': {error}") from error
        place[place < 0] = sizes[0]
        of_values[has_id.to_numpy(zero_copy_only=False)] = sum(place < size for size in sizes)
        return pa.DictionaryArray.from_arrays(pa.array(of_values), names)

    return train, encode


def _check_ids(column: str, dtype: pa.DataType) -> None:
    if pa.types.is_nested(dtype):
        needed = f"it needs a column with one id a row{advice(column, dtype)}"
        raise UserError(f"--cold: column '{column}' is {dtype}; {needed}")


def count_names(bounds: Sequence[int]) -> list[str]:
    """Return the names of the slices of numbers from 0 on that ascending bounds separate."""
    ranges = [(low, high - 1) for low, high in pairwise((0, *bounds))]
    return [f"count {low}" if low == high else f"count {low}-{high}" for low, high in ranges] + [f"count {bounds[-1]}+"]


def _by_value(column: str, values: pa.Array) -> pa.DictionaryArray:
    if pa.types.is_nested(values.type):
        raise UserError(
            f"--by: column '{column}' is {values.type}, and nearly every row would be a slice; it needs a column with "
            f"one value a row{advice(column, values.type)}"
        )
    return by_value(values)


def by_value(values: pa.Array) -> pa.DictionaryArray:
    """Encode values by their texts; one that reads as null has quotes."""
    encoded = decoded(values).dictionary_encode()
    names = pa.array(map(_name, encoded.dictionary), pa.string())  # of distinct ones, as each takes two µs
    return names.take(encoded.indices).fill_null("null").dictionary_encode()


def _name(value: pa.Scalar) -> str:
    if not value.is_valid:
        return "null"
    try:
        found = value.as_py()
        name = str(found + 0.0 if isinstance(found, float) else found)  # -0.0 and 0.0 are one value
        return repr(name) if name == "null" else name
    except ValueError:  # a time with nanoseconds, which Python does not have
        return value.cast(pa.string()).as_py()


def in_order(names: set[str]) -> list[str]:
    """Return names in order, numbers in them by their value."""
    return sorted(names, key=lambda name: (re.sub(r"\d+", lambda digits: digits[0].zfill(20), name), name))
