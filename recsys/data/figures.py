"""Mean and deviation of float features, of each row group and of all, in one pass over the training data."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import pyarrow as pa

from recsys.data.convert import NUMBERS_AT_ONCE, convert_floats, raw_numbers, transform_numbers
from recsys.data.spec import FloatColumn, Transform

# Numbers, [rows, numbers of a row], and which of them are not null, or None where all are there.
_Chunk = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class FloatFacts:
    """Of a float feature's values that are not null: `raw_mean` as they are in the file, `mean` and `std` (of the
    population) once clipped and taken the logarithm of; of vectors one for each number."""

    raw_mean: float | tuple[float, ...] = 0.0
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0


def summarise(values: pa.ChunkedArray, part: FloatColumn) -> np.ndarray:
    """Return of each number of a row count and mean of the raw values, mean and deviation of the transformed ones.

    The result is float64 [numbers of a row, 4].
    """
    chunks = [_numbers(chunk, part) for chunk in values.chunks]
    return np.stack([_summarise_column(_column(chunks, i), part) for i in range(part.dim or 1)])


def _summarise_column(raw: np.ndarray, part: FloatColumn) -> np.ndarray:
    if not len(raw):
        return np.zeros(4)
    given = part.transform or Transform()
    done = raw.copy()
    # With a std, as it is to be trained on; and finite, since a mean of anything else is none.
    transform_numbers(done, Transform(given.clip, given.log1p, std=1.0), replace(part, finite=True))
    return np.array([len(raw), _mean_and_std(raw)[0], *_mean_and_std(done)])


def _numbers(chunk: pa.Array, part: FloatColumn) -> _Chunk:
    like, step = FloatColumn(part.name, part.column, dim=part.dim), NUMBERS_AT_ONCE // (part.dim or 1)
    for start in range(0, len(chunk), step):
        convert_floats(chunk.slice(start, step), like)  # refuses what is no finite number
    (numbers, nulls), shape = raw_numbers(chunk, part), (len(chunk), part.dim or 1)
    if nulls is None:
        return numbers.reshape(shape), None
    is_there = np.ones(numbers.size, bool)
    is_there[nulls] = False
    return numbers.reshape(shape), is_there.reshape(shape)


def _column(chunks: Sequence[_Chunk], i: int) -> np.ndarray:
    """Return a number of all rows, where it is not null, float64; one at a time, since all are many."""
    parts = (numbers[:, i] if is_there is None else numbers[is_there[:, i], i] for numbers, is_there in chunks)
    return np.concatenate([np.zeros(0), *(part.astype(np.float64) for part in parts)])


def joined(groups: Sequence[np.ndarray], part: FloatColumn) -> FloatFacts:
    """Join what `summarise` returned of each row group."""
    figures = [_figures_of_column([group[i] for group in groups]) for i in range(part.dim or 1)]
    return figures[0] if part.dim is None else FloatFacts(*zip(*map(astuple, figures), strict=True))


def _figures_of_column(groups: Sequence[np.ndarray]) -> FloatFacts:
    counts, raw, means, stds = np.array([group for group in groups if group[0]]).reshape(-1, 4).T
    if not len(counts):
        return FloatFacts()
    mean, std = _mean_and_std(means, counts, stds)
    # Values that differ by their own rounding are a constant.
    is_constant = std <= np.finfo(np.float64).eps * abs(mean)
    return FloatFacts(_mean_and_std(raw, counts)[0], mean, 1.0 if is_constant else std)


def _mean_and_std(
    values: np.ndarray, counts: np.ndarray | None = None, stds: np.ndarray | float = 0.0
) -> tuple[float, float]:
    """Return mean and deviation of numbers, or of groups of `counts` numbers whose means and deviations are given.

    Sums are of what lies between the numbers and the first of them, so that a common offset costs no digits, and
    squares are of numbers up to 1, so that they neither overflow nor become 0.
    """
    offsets = values - values[0]
    mean = np.average(offsets, weights=counts)
    offsets -= mean
    largest = max(np.abs(offsets).max(), np.max(stds))
    offsets /= largest or 1.0
    np.square(offsets, out=offsets)
    offsets += np.square(stds / (largest or 1.0))
    return float(values[0] + mean), float(largest * np.sqrt(np.average(offsets, weights=counts)))
