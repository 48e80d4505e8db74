"""Pruned tables: a raw id has the place of its row among those kept, or the one that the others share."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.config import IdMappingType, TableConfig
from recsys.errors import UserError
from recsys.ids import KeptRows, build_mapping

HASHED = TableConfig(num_embeddings=1000, embedding_dim=4)


def kept_of(mask: np.ndarray) -> KeptRows:
    return KeptRows(pa.array(mask))


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 1000, 100_003])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_places_are_ranks_among_the_rows_kept(num_rows: int, share: float, tmp_path: Path) -> None:
    mask = np.random.default_rng(num_rows).random(num_rows) < share
    mask[0] = True
    rows = np.arange(num_rows)
    kept_of(mask).write(tmp_path / "kept.parquet")
    for kept in (kept_of(mask), KeptRows.read(tmp_path / "kept.parquet")):
        assert (kept.num_before, kept.num_rows) == (num_rows, mask.sum() + 1)
        assert (kept.places(rows) == np.where(mask, np.cumsum(mask) - 1, mask.sum())).all()
        assert (kept.places(rows[::-1].astype(np.int32)) == kept.places(rows)[::-1]).all()


@pytest.mark.parametrize(
    "table",
    [
        HASHED,
        replace(HASHED, num_hashes=3),
        replace(HASHED, mapping=IdMappingType.identity),
        replace(HASHED, mapping=IdMappingType.quotient_remainder, num_ids=5000),
    ],
    ids=lambda table: f"{table.mapping.name}-{table.num_hashes}",
)
def test_every_mapping_can_be_pruned(table: TableConfig) -> None:
    mask = np.arange(1000) % 3 == 0
    ids = pa.array(np.arange(1000))
    whole = build_mapping(table)
    rows = whole.rows(ids)
    pruned = build_mapping(replace(table, num_embeddings=335), None, kept_of(mask))
    places = np.empty(len(rows), np.int32)
    pruned.map(ids, places)
    assert (places == np.where(mask[rows], rows // 3, 334)).all()
    assert pruned.num_rows == 335 and pruned.rows_per_id == whole.rows_per_id
    assert (pruned.rows(ids.dictionary_encode()) == places).all()


def test_texts_and_what_the_mapping_refuses() -> None:
    mask = np.arange(1000) < 500
    assert build_mapping(HASHED, None, kept_of(mask)).rows(pa.array(["a", "b"])).max() <= 500
    identity = build_mapping(replace(HASHED, mapping=IdMappingType.identity), None, kept_of(mask))
    with pytest.raises(UserError, match=r"id 1000 is outside 0 … 999 \(mapping: identity\)"):
        identity.rows(pa.array([0, 1000]))


@pytest.mark.parametrize("column", [[False, True], [True, None], [], [1, 0]])
def test_files_that_tell_no_rows(column: list, tmp_path: Path) -> None:
    pq.write_table(pa.table({"kept": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet' does not list the rows of a table"):
        KeptRows.read(tmp_path / "a.parquet")
