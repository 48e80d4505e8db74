"""Counts of table rows over a dataset, shared out over the ranks and kept in a file."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import open_columns
from thread_ranks import on_ranks

from recsys.config import NullPolicy
from recsys.data.facts import Facts, RowCounter, measure
from recsys.data.spec import IdColumn
from recsys.ids import HashMapping, IdentityMapping, VocabularyMapping

IDS = [None if n % 5 == 4 else n % 7 for n in range(40)]
HISTORIES = [[n % 7] * (n % 5) + [None] * (n % 2) for n in range(40)]


def counted(folder, column, mapping, null, world_size, is_mapped=True):
    table = pa.table({"x": pa.array(column)})
    pq.write_table(table[:23], folder / "a.parquet", row_group_size=6)
    pq.write_table(table[23:], folder / "b.parquet", row_group_size=3)
    dataset = open_columns(folder, "x", max_rows=31)

    def of_rank(world):
        # A stand-in maps until there is a vocabulary, as in `Inputs`.
        counter = RowCounter(IdColumn("x", "x", mapping if is_mapped else HashMapping(10, 0), null), is_mapped)
        measure(dataset, {}, [], world, counter)
        return counter.counts(IdColumn("x", "x", mapping, null), 10)[0]

    ranks = on_ranks(world_size, of_rank)
    assert {counts.dtype for counts in ranks} == {np.dtype(np.int64)}
    return np.sum(ranks, axis=0).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 50])
@pytest.mark.parametrize("null", [NullPolicy.reserved, NullPolicy.empty])
def test_ranks_together_count_every_id_once(tmp_path, world_size, null):
    ids = [id for history in HISTORIES[:31] for id in history if id is not None or null is NullPolicy.reserved]
    expected = [sum((id or 0) == row for id in ids) for row in range(10)]
    assert counted(tmp_path, HISTORIES, IdentityMapping(10), null, world_size) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("null", [NullPolicy.reserved, NullPolicy.empty])
def test_ids_counted_before_there_is_a_vocabulary_are_its_rows(tmp_path, world_size, null):
    mapping = VocabularyMapping(pa.array([6, 3]), 1, 0)  # rows 1 and 2; row 3 is for the rest, row 0 for null
    rows = [0 if id is None else {6: 1, 3: 2}.get(id, 3) for id in IDS[:31]]
    expected = [rows.count(row) if row or null is NullPolicy.reserved else 0 for row in range(10)]
    for is_mapped in (False, True):
        assert counted(tmp_path, IDS, mapping, null, world_size, is_mapped) == expected


@pytest.mark.parametrize("is_mapped", [False, True])
def test_ids_beyond_max_length_do_not_count(is_mapped):
    part = IdColumn("x", "x", VocabularyMapping(pa.array([6, 3]), 1, 0), max_length=2)
    counter = RowCounter(part, is_mapped)
    counter.add(pa.array([[6, 3, 3], None, [5, None, 6]]))
    assert counter.counts(part, 4)[0].tolist() == [1, 1, 2, 0]


def test_counts_are_kept_in_a_file(tmp_path):
    facts = Facts(row_counts={"x": np.array([0, 3, 2**40])})
    facts.save(tmp_path / "kept")
    assert facts.files() == ["x.counts.parquet"] == [path.name for path in (tmp_path / "kept").iterdir()]
    assert Facts.load(tmp_path / "kept", [], [], ["x"], []).row_counts["x"].tolist() == [0, 3, 2**40]
    Facts().save(tmp_path / "none")
    assert not (tmp_path / "none").exists(), "nothing is written of nothing"
