"""Files of vectors and rows to score, of which Arrow would read all before the first row."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys.checkpoint import TableRows, import_table
from recsys.checkpoint.tensor_files import LocalTensor
from recsys.config import TableConfig
from recsys.serving.index import _vectors
from recsys.serving.score import ROWS_AT_ONCE, opened

ROWS, DIM = 200_000, 16


class _Rows(TableRows):
    """Notes what Arrow holds while rows of a file are looked for."""

    held = 0

    def find(self, batch: pa.RecordBatch) -> np.ndarray:
        self.held = max(self.held, pa.total_allocated_bytes())
        return super().find(batch)


def _held_by_import(path: Path) -> int:
    table, tensor = TableConfig(num_embeddings=ROWS, embedding_dim=DIM), torch.zeros(ROWS, DIM)
    rows = _Rows(table, None)
    assert import_table(path, "t", table, "adam", rows, {"tables/t": LocalTensor.of(tensor)}).num_rows == ROWS
    return rows.held


def _held_by_scores(path: Path) -> int:
    return max(pa.total_allocated_bytes() for _ in opened(str(path)).iter_batches(ROWS_AT_ONCE))


def _held_by_index(path: Path) -> int:
    return max(pa.total_allocated_bytes() for _ in _vectors(path.parent))


@pytest.mark.parametrize("held_by", [_held_by_import, _held_by_scores, _held_by_index])
def test_a_file_is_read_some_rows_at_a_time(held_by: Callable[[Path], int], tmp_path: Path) -> None:
    """12.8 MB of one row group."""
    vectors = pa.array(np.random.default_rng(0).random(ROWS * DIM, np.float32))
    rows = {"row": np.arange(ROWS), "vector": pa.FixedSizeListArray.from_arrays(vectors, DIM)}
    pq.write_table(pa.table(rows), tmp_path / "part-0.parquet")
    before = pa.total_allocated_bytes()
    assert held_by(tmp_path / "part-0.parquet") - before < 8 << 20
