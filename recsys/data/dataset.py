"""The opened Parquet files of one role: their footers, types, partitions and fingerprint."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from recsys.config import DataConfig
from recsys.data.arrays import value_type
from recsys.data.made import Made
from recsys.data.order import RowGroups, Segment
from recsys.data.storage import BadDataError, Storage, partition_keys
from recsys.errors import UserError


@dataclass(frozen=True)
class RowGroup:
    """A row group as its footer described it.

    Attributes:
        path: of the file. index: its number in the file.
        num_rows: rows that match the filter. stored_rows: all rows. layout: number of the file's layout.
        file_size: in bytes. file_digest: of the footer; it shows that a file has changed, and `sampled` in a filter
            identifies files by it, wherever they lie.
    """

    path: str
    index: int
    num_rows: int
    stored_rows: int
    layout: int
    file_size: int
    file_digest: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """The files of one role (train, valid …), with what their footers say. It can be pickled.

    Attributes:
        key: the config key that names the files, for messages.
        row_groups: of all files, in order, without those that have no row (that matches the filter).
        schema: Arrow schema of `columns`, with plain types (see `plain_type`) that can hold the values of every file.
            Readers return strings as dictionaries where Arrow can.
        columns: names of the columns read.
        filter: expression that rows must match, or None.
        bad_files: files left out because their footers could not be read.
        filter_schema: schema of the columns that the filter names.
        options: section `data` of the config; only the keys on how files are read are used.
        storage: the file system. layouts: of the files, see `FooterParser.layouts`.
        file_layouts, file_sizes, file_digests: int64 [files], for each of `row_groups.paths` its number in `layouts`,
            its size in bytes, and its `Footer.digest`.
        stored_rows: int64 [row groups], rows before the filter.
        made: the columns that are made of others: name → how.
        head_number: number of the row group `head`; None: the first of `heads`.
    """

    key: str
    row_groups: RowGroups
    schema: pa.Schema
    columns: tuple[str, ...]
    filter: str | None
    options: DataConfig
    bad_files: tuple[str, ...]
    filter_schema: pa.Schema
    storage: Storage
    layouts: tuple[pa.Schema, ...]
    file_layouts: np.ndarray
    file_sizes: np.ndarray
    file_digests: np.ndarray
    stored_rows: np.ndarray
    made: Mapping[str, Made] = field(default_factory=dict)
    head_number: int | None = None

    @property
    def num_rows(self) -> int:
        return self.row_groups.total_rows

    @property
    def num_files(self) -> int:
        return len(self.row_groups.paths)

    def row_group(self, number: int) -> RowGroup:
        """Return what the footers say about a row group, given by its number in the dataset."""
        groups, file = self.row_groups, self.row_groups.file[number]
        return RowGroup(
            path=groups.paths[file],
            index=int(groups.index[number]),
            num_rows=int(groups.num_rows[number]),
            stored_rows=int(self.stored_rows[number]),
            layout=int(self.file_layouts[file]),
            file_size=int(self.file_sizes[file]),
            file_digest=int(self.file_digests[file]),
        )

    @property
    def fingerprint(self) -> str:
        """Digest of the files' names and footers, of the rows of each row group, and of the filter."""
        groups = self.row_groups
        digest = hashlib.sha256("\n".join(map(self.own_name, groups.paths)).encode())
        for column in (self.file_digests, groups.file, groups.index, groups.num_rows, groups.num_bytes):
            digest.update(column.astype("<i8").tobytes())
        digest.update((self.filter or "").encode())
        return digest.hexdigest()[:16]

    def own_name(self, path: str) -> str:
        """Return the name of a file without its folders, so that a copy elsewhere has the same name.

        Partition keys in the path are kept if they stand for columns that are read.
        """
        keys = {key: value for key, value in partition_keys(path).items() if key in self._of_paths}
        return "/".join([*(f"{key}={value}" for key, value in keys.items()), path.rsplit("/", 1)[-1]])

    def file_of_floats(self, column: str) -> str | None:
        """Return the first file with floats in a column that has integers in others, and is thus read as floats."""
        dtypes = [layout.field(column).type if column in layout.names else pa.null() for layout in self.layouts]
        dtypes = [value_type(dtype) for dtype in dtypes]
        if not (any(map(pa.types.is_integer, dtypes)) and any(map(pa.types.is_floating, dtypes))):
            return None
        files = zip(self.row_groups.paths, self.file_layouts.tolist(), strict=True)
        return next((path for path, layout in files if pa.types.is_floating(dtypes[layout])), None)

    def with_lists(self, others: Iterable[pa.Schema]) -> "Dataset":
        """Return the dataset with list types for its untyped columns that are lists in other schemas.

        Some writers give no type to a column without values; its nulls must count as null lists, not as single ids.
        """
        lists = {field.name: field for schema in others for field in schema if pa.types.is_list(field.type)}
        untyped = (lists.get(field.name, field) if pa.types.is_null(field.type) else field for field in self.schema)
        return replace(self, schema=pa.schema(untyped))

    def with_made(self, made: Mapping[str, Made]) -> "Dataset":
        """Return the dataset with columns that are made of its own. Raises UserError for a type that does not fit."""
        try:
            for how in made.values():
                for column in how.columns:
                    how.check(column, self.schema.field(column).type)
        except UserError as error:
            raise error.within(f"config key '{self.key}'") from error
        schema = pa.schema([*self.schema, *(pa.field(name, how.dtype) for name, how in made.items())])
        return replace(self, schema=schema, columns=(*self.columns, *made), made=made)

    @property
    def skipped(self) -> tuple[type[BadDataError], ...]:
        """The errors that leave rows out instead of ending a run, for `contextlib.suppress`."""
        return (BadDataError,) if self.key == "data.train" and self.options.max_bad_rows else ()

    @property
    def split(self) -> dict[str, str]:
        """The columns of lists that are made of texts, and those of the texts."""
        return {name: how.columns[0] for name, how in self.made.items() if how.separator is not None}

    @cached_property
    def head(self) -> Segment:
        """The row group whose first rows serve as a sample."""
        return self.row_groups.segment(int(self.heads()[0]) if self.head_number is None else self.head_number)

    def heads(self) -> np.ndarray:
        """Return the numbers of all row groups, int64 [row groups], those in files with the most columns first."""
        num_columns = np.array([len({*layout.names} & {*self.columns}) for layout in self.layouts])
        return np.argsort(-num_columns[self.file_layouts][self.row_groups.file], kind="stable")

    @cached_property
    def _of_paths(self) -> set[str]:
        """The columns that are read but missing in some file, and so may come from its path."""
        wanted = {*self.columns, *self.filter_schema.names}
        return {name for name in wanted for layout in self.layouts if name not in layout.names}
