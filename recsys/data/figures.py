"""Mean and deviation of float features, for each row group and for all, in one pass over the training data."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.data.convert import NUMBERS_AT_ONCE, convert_floats, raw_numbers, transform_numbers
from recsys.data.spec import FloatColumn, Transform

# Numbers, [rows, numbers per row], and a mask of those that are not null, or None if there are no nulls.
_Chunk = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class FloatFacts:
    """Figures of a float feature's values that are not null: `raw_mean` of the values in the file; `mean` and `std` (of
    the population) after clip and logarithm. For vectors, each is a tuple with one figure for each number."""

    raw_mean: float | tuple[float, ...] = 0.0
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> "FloatFacts":
        """Return figures that were read from JSON, which has lists in place of tuples.

        Raises:
            TypeError, AttributeError: they are not by the names of the figures.
        """
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in figures.items()})


def summarise(values: pa.ChunkedArray, part: FloatColumn) -> np.ndarray:
    """Summarise a row group: count and mean of the raw values, mean and deviation of the transformed ones.

    The result is float64 [numbers per row, 4].
    """
    chunks = [_numbers(chunk, part) for chunk in values.chunks]
    return np.stack([_summarise_column(_column(chunks, i), part) for i in range(part.dim or 1)])


def _summarise_column(raw: np.ndarray, part: FloatColumn) -> np.ndarray:
    if not len(raw):
        return np.zeros(4)
    given = part.transform or Transform()
    done = raw.copy()
    # With a std, so that the logarithm is the one used in training; and finite, since only such values have a mean.
    transform_numbers(done, Transform(given.clip, given.log1p, std=1.0), replace(part, finite=True))
    return np.array([len(raw), _mean_and_std(raw)[0], *_mean_and_std(done)])


def _numbers(chunk: pa.Array, part: FloatColumn) -> _Chunk:
    width = part.dim or 1
    like, step = FloatColumn(part.name, part.column, dim=part.dim), NUMBERS_AT_ONCE // width
    for start in range(0, len(chunk), step):
        convert_floats(chunk.slice(start, step), like)  # refuses numbers that are not finite
    numbers, nulls = raw_numbers(chunk, part)
    shape = (len(chunk), width)
    if nulls is None:
        return numbers.reshape(shape), None
    is_there = np.ones(numbers.size, bool)
    is_there[nulls] = False
    return numbers.reshape(shape), is_there.reshape(shape)


def _column(chunks: Sequence[_Chunk], i: int) -> np.ndarray:
    """Return the i-th number of all rows that have it, float64; one number at a time, to save memory."""
    parts = (numbers[:, i] if is_there is None else numbers[is_there[:, i], i] for numbers, is_there in chunks)
    return np.concatenate([np.zeros(0), *(part.astype(np.float64) for part in parts)])


def joined(groups: Sequence[np.ndarray], part: FloatColumn) -> FloatFacts:
    """Join the summaries that `summarise` has returned for row groups."""
    figures = [_figures_of_column([group[i] for group in groups]) for i in range(part.dim or 1)]
    return figures[0] if part.dim is None else FloatFacts(*zip(*map(astuple, figures), strict=True))


def _figures_of_column(groups: Sequence[np.ndarray]) -> FloatFacts:
    counts, raw, means, stds = np.array([group for group in groups if group[0]]).reshape(-1, 4).T
    if not len(counts):
        return FloatFacts()
    mean, std = _mean_and_std(means, counts, stds)
    # Values that differ only by their rounding count as constant.
    is_constant = std <= np.finfo(np.float64).eps * abs(mean)
    return FloatFacts(_mean_and_std(raw, counts)[0], mean, 1.0 if is_constant else std)


def _mean_and_std(
    values: np.ndarray, counts: np.ndarray | None = None, stds: np.ndarray | float = 0.0
) -> tuple[float, float]:
    """Return mean and deviation of numbers, or of groups of `counts` numbers whose means and deviations are given.

    Sums are of differences from the first number, so that a common offset costs no digits. Squares are of numbers up to
    1, so that they neither overflow nor become 0.
    """
    offsets = values - values[0]
    mean = np.average(offsets, weights=counts)
    offsets -= mean
    largest = max(np.abs(offsets).max(), np.max(stds))
    offsets /= largest or 1.0
    np.square(offsets, out=offsets)
    offsets += np.square(stds / (largest or 1.0))
    return float(values[0] + mean), float(largest * np.sqrt(np.average(offsets, weights=counts)))
