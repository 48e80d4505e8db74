"""Shared parts of the tests of the loader: files of rows that can be told apart, and functions that read them."""

import threading
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.batch import Batch
from recsys.data.dataset import Dataset
from recsys.data.loader import Loader, LoaderOptions
from recsys.data.parquet import open_dataset
from recsys.data.spec import BatchSpec, FloatColumn, IdColumn
from recsys.ids import IdentityMapping

IDENTITY = IdentityMapping(1 << 20)
SPEC = BatchSpec(
    ids=[IdColumn("row", "row", IDENTITY), IdColumn("history", "history", IDENTITY)],
    floats=[FloatColumn("half", "half")],
    labels=[FloatColumn("label", "label", None)],
)
OPTIONS = LoaderOptions(
    seed=1, shuffle=True, num_streams=8, window_bytes=400, num_threads=0, prefetch_batches=2, pin_device=None
)


def table(first: int, count: int) -> pa.Table:
    """Return numbered rows, in which all columns follow from the number."""
    numbers = range(first, first + count)
    return pa.table(
        {
            "row": pa.array(numbers, pa.int64()),
            "history": pa.array([list(range(n, n + n % 4)) for n in numbers], pa.list_(pa.int64())),
            "half": pa.array([n / 2 for n in numbers], pa.float64()),
            "label": pa.array([n % 2 for n in numbers], pa.int8()),
        }
    )


def write(folder: Path, sizes: list[list[int]]) -> Dataset:
    """Write files with row groups of these sizes; rows are numbered across all files."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for f, file_sizes in enumerate(sizes):
        with pq.ParquetWriter(folder / f"part-{f:03}.parquet", table(0, 0).schema) as writer:
            for rows in file_sizes:
                writer.write_table(table(first, rows))
                first += rows
    return open_dataset("data.train", str(folder), dict.fromkeys(SPEC.columns(), "key"))


STARTS = (0, 40, 53, 54, 84)  # first rows of row groups


@dataclass(frozen=True)
class Row:
    number: int
    history: tuple[int, ...]
    half: float
    label: float


def rows(batch: Batch) -> list[Row | None]:
    """Return the rows of a batch, with None for fillers."""
    number, history = (batch.ids[key].to_dense() for key in ("row", "history"))
    result: list[Row | None] = []
    for i, weight in enumerate(batch.weights.tolist()):
        if weight:
            half, label = float(batch.floats[i, 0]), float(batch.labels[i])
            result.append(Row(int(number[i]), tuple(history[i].tolist()), half, label))
        else:
            assert len(number[i]) == len(history[i]) == batch.floats[i].sum() == batch.labels[i] == 0
            result.append(None)
    assert sum(row is not None for row in result) == batch.num_rows
    return result


def numbers(batch: Batch) -> list[int]:
    return [row.number for row in rows(batch) if row]


def build(dataset: Dataset, size: int, rank: int = 0, world_size: int = 1, **changes: Any) -> Loader:
    return Loader(dataset, SPEC, replace(OPTIONS, **changes), size, rank, world_size)


def read(dataset: Dataset, size: int, epochs: int = 1, **changes: Any) -> list[Batch]:
    return list(islice(build(dataset, size, **changes).batches(num_epochs=epochs), 1000))


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("decode", "read-ahead"))}
