"""Columns that give the label away: known only once the label is, or what it was made from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from recsys.datasets.logs import LogFiles, joined

_ROW_GROUPS = 8
_ROWS_OF_EACH = 25_000
_MOST_CODES = 1000  # values that are distinguished
_RANGES = 100  # ranges of numbers with more values


def sample(files: LogFiles, columns: Sequence[str]) -> pa.Table:
    """Return rows of a few row groups, evenly spread over a log; a column that one of their files lacks is null."""
    groups, tables = files.row_groups(), []
    for place in np.unique(np.linspace(0, len(groups) - 1, _ROW_GROUPS).astype(int)):
        number, group = groups[place]
        file = files.open(number)
        table = file.read([column for column in columns if file.has(column)], [group])
        tables.append(table.take(pa.array(np.arange(0, len(table), -(-len(table) // _ROWS_OF_EACH) or 1))))
    return joined(tables)


def auc_alone(values: pa.Array, positive: np.ndarray) -> float:
    """Return the AUC, on half of the rows, of the share of positive rows that each value has in the other half.

    Numbers with many values are cut into ranges with equally many rows. The AUC is .5 if a half has only one label.

    Args:
        values: [rows], of any type that is not nested. positive: bool [rows].
    """
    learned = np.random.default_rng(0).permutation(len(values)) % 2 == 0
    codes = _codes(values)
    counts = np.zeros((2, 2, codes.max(initial=0) + 1))  # by half, label and code
    np.add.at(counts, (learned.astype(int), positive.astype(int), codes), 1)
    (no, yes), (no_before, yes_before) = counts
    pairs = no.sum() * yes.sum()
    if not pairs:
        return 0.5
    prior = (yes_before.sum() + 0.5) / (yes_before.sum() + no_before.sum() + 1)
    _, place = np.unique((yes_before + prior) / (yes_before + no_before + 1), return_inverse=True)
    no, yes = np.bincount(place, no), np.bincount(place, yes)
    return float((yes * (np.cumsum(no) - no / 2)).sum() / pairs)


def _codes(values: pa.Array) -> np.ndarray:
    """Return a number for each value, or for its range; null has a number of its own."""
    kind = values.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    values = values.cast(pa.float64(), safe=False) if is_number else values
    encoded = values.dictionary_encode(null_encoding="encode")
    if len(encoded.dictionary) <= _MOST_CODES or not is_number:
        return encoded.indices.to_numpy()
    numbers = values.to_numpy(zero_copy_only=False)
    bounds = np.unique(np.nanquantile(numbers, np.linspace(0, 1, _RANGES)))
    return np.where(np.isnan(numbers), len(bounds) + 1, np.searchsorted(bounds, numbers))
