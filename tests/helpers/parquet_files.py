"""Parquet files for tests: writing, opening and reading them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.parquet import open_dataset


def write(
    path: Path, table: pa.Table | dict[str, Any] | None = None, row_group_rows: int = 1000, **options: Any
) -> Path:
    """Write a table, by default of three users, to a file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pa.table({"user": [1, 2, 3]} if table is None else table)
    pq.write_table(data, path, row_group_size=row_group_rows, **{"write_page_checksum": True, **options})
    return path


def open_columns(path: object, *columns: str, **options: Any) -> Dataset:
    """Open columns of a file or folder, by default the column of `write`; `options` are those of `open_dataset`."""
    return open_dataset("data.train", str(path), dict.fromkeys(columns or ("user",), "key"), **options)


def read_all(dataset: Dataset) -> pa.Table:
    """Return all rows of a data set in the form in which a loader reads them."""
    return pa.concat_tables(SegmentReader(dataset).tables(), promote_options="permissive")
