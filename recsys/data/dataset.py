"""What is known of the Parquet files of one role: found by `recsys.data.parquet.open_dataset`, read by its readers."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from recsys.data.footers import Layout
from recsys.data.order import RowGroups, fingerprint
from recsys.data.sources import Storage


@dataclass(frozen=True)
class ReadOptions:
    """How files are read: see `DataConfig` for the meaning of each."""

    verify_checksums: bool = True
    retries: int = 3
    max_bad_files: int = 0


@dataclass(frozen=True, eq=False)
class Dataset:
    """Files of one role (train, valid …), with what their footers say. It can be pickled.

    Attributes:
        key: the config key that names the files, for messages.
        row_groups: of all files, in order; those without a row (that matches the filter) left out.
        schema: Arrow schema of `columns`, with plain types (see `plain_type`) that hold those of every file. Readers
            return such values as dictionaries, large lists and the like where a file has them so.
        columns: names of the columns read.
        filter: expression that rows must match, or None.
        bad_files: left out, since their footers could not be read.
        filter_schema: of the columns that the filter names.
        storage: the file system. layouts: of the files.
        file_layouts, file_sizes: int64 [files], number in `layouts` and bytes of each of `row_groups.paths`.
        stored_rows: int64 [row groups], rows before the filter.
    """

    key: str
    row_groups: RowGroups
    schema: pa.Schema
    columns: tuple[str, ...]
    filter: str | None
    options: ReadOptions
    bad_files: tuple[str, ...]
    filter_schema: pa.Schema
    storage: Storage
    layouts: tuple[Layout, ...]
    file_layouts: np.ndarray
    file_sizes: np.ndarray
    stored_rows: np.ndarray

    @property
    def num_rows(self) -> int:
        return self.row_groups.total_rows

    @property
    def num_files(self) -> int:
        return len(self.row_groups.paths)

    @property
    def fingerprint(self) -> str:
        """Digest of the files' names without their folders, row counts and sizes, and of the filter."""
        digest = fingerprint(self.row_groups)
        if self.filter is None:
            return digest
        return hashlib.sha256(f"{digest} {self.filter}".encode()).hexdigest()[:16]
