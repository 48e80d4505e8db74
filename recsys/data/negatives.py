"""Items drawn as negatives, as additional rows of a step's batches: the same on any number of ranks."""

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
        items: the dataset of all items. spec: how to convert their rows.
        shares: probability of each item, float64 [items], summing to 1.
        num_items: how many to draw for a step, over all ranks.
        seed: of the run.

    Attributes:
        num_rows: rows for drawn items in a batch, the same on all ranks; a rank may draw one item less.
        first: place of this rank's first drawn item among those of all ranks.
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
        return pa.concat_tables(tables).combine_chunks()  # because rows are read faster from one chunk

    def places(self, step: int) -> np.ndarray:
        """Return the places of the items that this rank draws, int64; `step` is any number unique to the step."""
        key = make_key(self._seed, "sampled items", step)
        high, low = uniform_numbers(key, self._numbers, np.arange(2)).T.astype(np.float64)
        return np.searchsorted(self._ends[:-1], (high + low * 2.0**-24) * self._ends[-1], side="right")

    def rows(self, step: int) -> Columns:
        """Return the rows that this rank draws for a step; they have weight 0 and only features of items."""
        columns = convert_table(self._items.take(pa.array(self.places(step))), self._spec)
        columns.floats[-1] = 0
        return columns
