"""Items drawn as negatives of a step, as further rows of its batches: the same on any number of ranks."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.spec import BatchSpec
from recsys.data.window import Columns, convert_table
from recsys.runtime.counter_random import make_key, uniform_numbers
from recsys.runtime.world import World


class ItemSampler:
    """Draws items of data.items for each step, with replacement.

    Args:
        items: the dataset of all items. spec: what their rows become.
        shares: of the items in what is drawn, [items] float64 that sum up to 1.
        num_items: drawn for a step, over all ranks.
        seed: of the run.

    Attributes:
        num_rows: rows of a batch for drawn items, the same on all ranks; a rank may draw one item less.
        first: place of this rank's first one among all items drawn.
    """

    def __init__(
        self, items: Dataset, spec: BatchSpec, shares: np.ndarray, num_items: int, seed: int, world: World
    ) -> None:
        self._dataset, self._spec, self._seed = items, replace(spec, lists=()), seed
        self._ends = np.cumsum(shares)
        self.num_rows = -(-num_items // world.world_size)
        self.first, end = (num_items * rank // world.world_size for rank in (world.rank, world.rank + 1))
        self._numbers = np.arange(self.first, end)

    @cached_property
    def _items(self) -> pa.Table:
        columns = self._spec.columns()
        schema = pa.schema(map(self._dataset.schema.field, columns))
        tables = [table.cast(schema) for table in SegmentReader(self._dataset, columns).tables()]
        return pa.concat_tables(tables).combine_chunks()  # rows are taken faster from one chunk

    def places(self, step: int) -> np.ndarray:
        """Return which items this rank draws, int64; `step` is any number that no two steps share."""
        key = make_key(self._seed, "sampled items", step)
        high, low = uniform_numbers(key, self._numbers, np.arange(2)).T.astype(np.float64)
        return np.searchsorted(self._ends[:-1], (high + low * 2.0**-24) * self._ends[-1], side="right")

    def rows(self, step: int) -> Columns:
        """Return the rows that this rank draws for a step: of weight 0, and with features of items only."""
        columns = convert_table(self._items.take(pa.array(self.places(step))), self._spec)
        columns.floats[-1] = 0
        return columns
