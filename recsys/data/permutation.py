"""Rows in which one feature is permuted, to measure how much a model relies on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.order import Segment
from recsys.data.spec import BatchSpec


@dataclass(frozen=True)
class Permutation:
    """The values of a feature permuted over all rows of a dataset, depending only on the seed and the footers.

    The rows of each row group are shuffled; then row i gets the values of row i + d, modulo the number of rows, where d
    is drawn. So one or two more row groups are decoded for a segment, without needing more memory.

    Attributes:
        features: name of the feature, followed by those of its further experts, which read the same column.
    """

    features: Sequence[str]
    seed: tuple[int, ...]

    def spec(self, spec: BatchSpec) -> BatchSpec:
        """Return the spec with the feature's columns replaced by the permuted ones."""
        ids = [
            replace(part, column=_permuted(part.column), weights=_permuted(part.weights))
            if part.name in self.features
            else part
            for part in spec.ids
        ]
        floats = [replace(p, column=_permuted(p.column)) if p.name in self.features else p for p in spec.floats]
        return replace(spec, ids=ids, floats=floats)

    def reader(self, dataset: Dataset, spec: BatchSpec) -> "PermutedReader":
        """Return a reader of the dataset that adds permuted columns; `spec` is the one before the permutation."""
        columns = [name for part in spec.ids if part.name in self.features for name in (part.column, part.weights)]
        columns += [part.column for part in spec.floats if part.name in self.features]
        return PermutedReader(dataset, [name for name in dict.fromkeys(columns) if name is not None], self.seed)


class PermutedReader:
    """Decodes segments like a `SegmentReader`, and appends permuted copies of some columns."""

    def __init__(self, dataset: Dataset, columns: list[str], seed: tuple[int, ...]) -> None:
        self._own, self._others, self._seed = SegmentReader(dataset), SegmentReader(dataset, columns), seed
        self._num_rows, self._schema = dataset.row_groups.num_rows, pa.schema(map(dataset.schema.field, columns))
        self._ends = np.cumsum(self._num_rows)
        self._distance = int(np.random.default_rng(seed).integers(self._ends[-1]))

    def read(self, segment: Segment) -> pa.Table:
        """Return the rows of a segment; errors are those of `SegmentReader.read`."""
        begin = self._ends[segment.number] - self._num_rows[segment.number]
        place, tables, missing = begin + segment.start + self._distance, [self._schema.empty_table()], segment.num_rows
        while missing:
            place %= self._ends[-1]
            group = int(np.searchsorted(self._ends, place, side="right"))
            order = np.random.default_rng((*self._seed, group)).permutation(self._num_rows[group])
            rows = order[place - self._ends[group] :][:missing]  # counted from the end of the row group
            tables.append(self._others.row_group(group).take(pa.array(rows)).cast(self._schema))
            place, missing = place + len(rows), missing - len(rows)
        table, permuted = self._own.read(segment), pa.concat_tables(tables)
        for name in self._schema.names:
            table = table.append_column(_permuted(name), permuted.column(name))
        return table


def _permuted(column: str | None) -> str | None:
    return None if column is None else f"{column} (permuted)"
