"""Small segments of row groups with many texts: converted one by one, since joining their dictionaries takes most."""

import numpy as np
import pyarrow as pa
import pytest

from recsys.data import window as window_module
from recsys.data.order import Segment, Window
from recsys.data.pool import BlockPool
from recsys.data.spec import BatchSpec, IdColumn
from recsys.data.window import convert_table, load_window
from recsys.ids import HashMapping


@pytest.mark.parametrize(("num_entries", "is_joined"), [(9000, False), (1000, True)])
@pytest.mark.parametrize("in_lists", [False, True])
def test_dictionaries_of_many_texts_are_not_joined(num_entries: int, is_joined: bool, in_lists: bool) -> None:
    """A slice of few rows has the dictionary of its whole row group."""
    spec = BatchSpec([IdColumn("name", "name", HashMapping(1 << 30, 0))], [])
    texts = [pa.array([f"{letter}{i:015}" for i in range(num_entries)]) for letter in "ab"]
    groups = [pa.DictionaryArray.from_arrays(pa.array(np.arange(num_entries, dtype=np.int32)), each) for each in texts]
    if in_lists:
        ends = pa.array(np.arange(0, num_entries + 1, 2, dtype=np.int32))
        groups = [pa.ListArray.from_arrays(ends, each) for each in groups]
    tables = [pa.table({"name": group}).slice(7, 100) for group in groups]
    assert len(window_module._joined_tables(tables)) == (1 if is_joined else 2)
    segments = (Segment("a", 0, 7, 107), Segment("b", 0, 7, 107))
    read = dict(zip(segments, tables, strict=True)).__getitem__
    columns = [load_window(Window(segments, None), read, spec, BlockPool()), *(convert_table(t, spec) for t in tables)]
    ids = [part.ids[0].values if in_lists else part.scalars[0] for part in columns]
    assert np.array_equal(ids[0], np.concatenate(ids[1:])) and len(ids[0]) == (400 if in_lists else 200)
