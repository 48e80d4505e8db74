"""Decoding of row groups: the wanted columns, in the dataset's types, of the rows that match the filter."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.data.arrays import cast, num_stored
from recsys.data.conditions import Origin
from recsys.data.dataset import Dataset, RowGroup
from recsys.data.fields import InFile, Place
from recsys.data.filters import parse_filter
from recsys.data.footers import opened, plain_type
from recsys.data.group_footers import GroupFooters
from recsys.data.made import with_made
from recsys.data.order import Segment
from recsys.data.storage import BadDataError, partition_column, partition_keys, reason

T = TypeVar("T")

CACHED_ROW_GROUPS = 2  # kept by a reader, of those that are read in parts
_HEAD_BUFFER_BYTES = 1 << 16  # read at once by `head`
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError)


@dataclass(frozen=True)
class _Plan:
    """How to read files of one layout.

    Attributes:
        stored: columns to read from the file, and their places. constant: columns of one value, from the path or null.
        dictionaries: Parquet columns to read as dictionaries.
    """

    stored: dict[str, Place]
    constant: list[str]
    dictionaries: list[str]

    def paths(self, columns: Iterable[str]) -> list[str]:
        """Return the paths that pyarrow's readers must read for some of the stored columns."""
        return [path for column in columns for path in self.stored[column].paths]


class SegmentReader:
    """Decodes row groups of a dataset, and segments of them; safe to call from several threads.

    The last few row groups that were read in parts are kept, because in small files, several streams begin in the same
    row group.

    Args:
        columns: the columns to return, by default all of the dataset. kept: how many row groups are kept.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str] | None = None, kept: int = CACHED_ROW_GROUPS) -> None:
        self._num_kept = kept
        self._dataset, self._returned = dataset, list(dataset.columns if columns is None else columns)
        self._made = {name: dataset.made[name] for name in self._returned if name in dataset.made}
        of_made = [column for how in self._made.values() for column in how.columns]
        read = [name for name in self._returned if name not in self._made]
        self._columns = list(dict.fromkeys([*read, *of_made]))
        self._condition = parse_filter(dataset.filter).bind(dataset.filter_schema) if dataset.filter else None
        self._types = {field.name: field.type for field in (*dataset.filter_schema, *dataset.schema)}
        self._plans: dict[tuple[int, bool], _Plan] = {}
        self._footers = GroupFooters(is_remote=bool(dataset.storage.root))
        self._recent: OrderedDict[int, Future[pa.Table]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, segment: Segment) -> pa.Table:
        """Return the rows of a segment, whose numbers do not count rows that the filter leaves out.

        Raises:
            BadDataError: names file, row group and column that cannot be read, or the file that has changed.
        """
        is_whole = segment.num_rows == self._dataset.row_groups.num_rows[segment.number]  # so no other segment needs it
        table = self.row_group(segment.number) if is_whole else self._shared_row_group(segment.number)
        return table.slice(segment.start, segment.num_rows)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows of the dataset, one row group after the other. Errors are those of `read`, unless skipped."""
        groups = self._dataset.row_groups
        for number in range(len(groups)):
            with suppress(*self._dataset.skipped):
                yield self.read(groups.segment(number))

    def row_group(self, number: int) -> pa.Table:
        """Return the matching rows of a row group, given by its number in the dataset. Errors are those of `read`."""
        group = self._dataset.row_group(number)
        table = self._matching(group)
        if table.num_rows < group.num_rows:
            raise _changed(group, f"{table.num_rows} rows match the filter, and {group.num_rows} did")
        return table

    def count(self, number: int) -> int:
        """Return how many rows of a row group match the filter. Errors are those of `read`."""
        return pc.sum(self._matches(self._dataset.row_group(number))).as_py() or 0

    def head(self, number: int, num_rows: int) -> pa.Table:
        """Return up to `num_rows` rows from the start of a row group, decoding no more. Errors are those of `read`."""
        group, first = self._dataset.row_group(number), num_rows
        if self._is_filtered(group):
            matches = SegmentReader(self._dataset, [])._matches(group).to_numpy()
            first = int(np.flatnonzero(matches)[:num_rows].max(initial=0)) + 1
        return self._matching(group, first).slice(0, num_rows)

    def in_file(self, number: int) -> dict[str, InFile]:
        """Return by column what it is in the file of a row group. Errors are those of `read`."""
        group = self._dataset.row_group(number)

        def read(plan: _Plan) -> dict[str, InFile]:
            with self._open(group, plan) as (file, index, _):
                return {name: place.in_file(file.metadata.row_group(index)) for name, place in plan.stored.items()}

        return self._planned(group, False, read)

    def _shared_row_group(self, number: int) -> pa.Table:
        with self._lock:
            is_first = number not in self._recent
            future = self._recent.setdefault(number, Future())
            while len(self._recent) > self._num_kept:
                self._recent.popitem(last=False)
        if is_first:
            try:
                future.set_result(self.row_group(number))
                if len(self._dataset.row_groups) <= CACHED_ROW_GROUPS:
                    # The memory of decoding is not needed again, and may be several times that of the table.
                    pa.default_memory_pool().release_unused()
            except Exception as error:
                future.set_exception(error)
        return future.result()

    def _is_filtered(self, group: RowGroup) -> bool:
        may_skip = bool(self._dataset.skipped)  # then unreadable rows were counted as matching
        return self._condition is not None and (group.num_rows < group.stored_rows or may_skip)

    def _matches(self, group: RowGroup) -> pa.ChunkedArray:
        return self._mask(self._read(group, is_filtered=True), group)

    def _mask(self, table: pa.Table, group: RowGroup) -> pa.ChunkedArray:
        assert self._condition is not None
        num_rows = table.num_rows if table.num_columns else group.stored_rows
        return self._condition.mask(table, Origin(f"{group.file_digest}/{group.index}", num_rows))

    def _matching(self, group: RowGroup, first: int = 0) -> pa.Table:
        is_filtered = self._is_filtered(group)
        table = self._read(group, is_filtered, first)
        chosen = table.select(self._columns)
        if is_filtered:
            chosen = chosen.filter(self._mask(table, group))
        return with_made(chosen, self._made, group.path, group.index).select(self._returned) if self._made else chosen

    def _plan(self, group: RowGroup, is_filtered: bool) -> _Plan:
        key = (group.layout, is_filtered)
        if key not in self._plans:
            layout = self._dataset.layouts[group.layout]
            of_filter = self._dataset.filter_schema.names if is_filtered else []
            columns = list(dict.fromkeys([*self._columns, *of_filter]))
            fields = [layout.field(column) for column in columns if column in layout.names]
            self._plans[key] = _Plan(
                stored={field.name: Place.of(field) for field in fields},
                constant=[column for column in columns if column not in layout.names],
                dictionaries=[path.decode() for field in fields if (path := field.metadata.get(b"dictionary"))],
            )
        return self._plans[key]

    def _planned(self, group: RowGroup, is_filtered: bool, read: Callable[[_Plan], T]) -> T:
        """Call `read`, with retries if files are remote. Raises BadDataError for what it cannot read."""
        plan, read = self._plan(group, is_filtered), self._dataset.storage.retried(read)
        try:
            try:
                return read(plan)
            except _UNREADABLE as error:
                if not plan.dictionaries or "Not yet implemented" not in str(error):
                    raise
            # Arrow cannot read strings as dictionaries from some encodings, such as DELTA_BYTE_ARRAY.
            plan = replace(plan, dictionaries=[])
            result = read(plan)
            self._plans[(group.layout, is_filtered)] = plan
            return result
        except MemoryError:  # Arrow's MemoryError is an ArrowException too, but not a fault of the file
            raise
        except _UNREADABLE as error:
            raise self._blame(group, plan, error) from error

    def _read(self, group: RowGroup, is_filtered: bool, first: int = 0) -> pa.Table:
        plan, table = self._plan(group, is_filtered), pa.table({})
        if plan.stored:
            table = self._planned(group, is_filtered, lambda plan: self._stored(group, plan, [*plan.stored], first))
        return self._completed(table, group, plan)

    def _stored(
        self, group: RowGroup, plan: _Plan, columns: list[str], first: int = 0, blames: bool = False
    ) -> pa.Table:
        decoded: dict[str, pa.ChunkedArray] = {}
        with self._open(group, plan, _HEAD_BUFFER_BYTES if first else 0) as (file, index, digest):
            # Local columns one by one: Arrow's reader of several keeps the buffers of each until all are decoded, which
            # take one to two times the memory of the table. Remote columns all at once, in few requests.
            for names in [columns] if self._dataset.storage.root else [[column] for column in columns]:
                part = _rows(file, index, plan.paths(names), first)
                for column in names:
                    if plan.stored[column].steps[0] not in part.column_names:
                        raise _changed(group, f"it has no column '{column}' any more")
                    decoded[column] = plan.stored[column].take(part)
            metadata = file.metadata
        table = pa.table(decoded)
        if not first:  # the footer is about all rows
            self._check(table, metadata, index, plan)
        # Compared last, so that damage is reported rather than a change.
        if digest != group.file_digest and not (first or blames):
            raise _changed(group, "its footer is another")
        return table.replace_schema_metadata()

    @contextmanager
    def _open(self, group: RowGroup, plan: _Plan, buffer_size: int = 0) -> Iterator[tuple[pq.ParquetFile, int, int]]:
        """Open a row group's file; yield it, the row group's number in the opened footer, and the footer's digest."""
        storage = self._dataset.storage
        with storage.open(group.path) as source:
            size = source.size()
            if size != group.file_size >= 0:
                raise _changed(group, f"it has {size:,} bytes, and had {group.file_size:,}")
            footer, index, digest = self._footers.read(group.path, source, group.index)
            try:
                file = opened(
                    source,
                    footer,
                    read_dictionary=plan.dictionaries,
                    buffer_size=buffer_size,
                    pre_buffer=bool(storage.root),  # read remote files in few requests
                    page_checksum_verification=self._dataset.options.verify_checksums,
                )
            except KeyError as error:  # raised for a column of read_dictionary
                raise _changed(group, "its columns are others") from error
            rows = footer.row_group(index).num_rows if index < footer.num_row_groups else 0
            if rows != group.stored_rows:
                raise _changed(group, f"it has {rows:,} rows there, and had {group.stored_rows:,}")
            yield file, index, digest

    def _check(self, table: pa.Table, metadata: pq.FileMetaData, index: int, plan: _Plan) -> None:
        """Compare the decoded columns with the footer, since page headers, with the number of values, have no checksum.

        Raises:
            OSError: they differ.
        """
        group, schema, verify = metadata.row_group(index), metadata.schema, self._dataset.options.verify_checksums
        for name, column in zip(table.column_names, table.columns, strict=True):
            leaves, is_nested = plan.stored[name].leaves, pa.types.is_nested(column.type)
            is_list = pa.types.is_list(column.type) and not pa.types.is_nested(column.type.value_type)
            if len(column) != group.num_rows:
                raise OSError(f"it holds {len(column)} rows, and the footer says {group.num_rows}")
            if len(leaves) > 1 or not verify or (is_nested and not is_list):
                continue
            chunk = group.column(leaves[0])
            if is_list:
                if (count := sum(map(num_stored, column.chunks))) != chunk.num_values:
                    raise OSError(f"it holds {count} values, and the footer says {chunk.num_values}")
                continue
            if chunk.physical_type != schema.column(leaves[0]).physical_type:  # see recsys.data.thrift
                raise OSError(f"it is stored as {chunk.physical_type}, which its schema does not say")
            if len(plan.stored[name].steps) > 1:  # some writers do not count a null struct as a null of its fields
                continue
            known = chunk.statistics
            if known is not None and known.has_null_count and known.null_count != column.null_count:
                raise OSError(f"it holds {column.null_count} nulls, and the footer says {known.null_count}")

    def _blame(self, group: RowGroup, plan: _Plan, error: Exception) -> BadDataError:
        """Return the error for a row group that cannot be read; it names a column if only that cannot be read."""
        if isinstance(error, FileNotFoundError):
            return _changed(group, "it does not exist any more")
        what, why = f"row group {group.index} of '{group.path}'", error
        try:
            with self._open(group, plan):
                pass
            for column in plan.stored:
                try:
                    self._stored(group, plan, [column], blames=True)
                except _UNREADABLE as wrong:
                    what, why = f"column '{column}' of {what}", wrong
                    break
        except _UNREADABLE as wrong:
            what, why = f"'{group.path}'", wrong
        message = f"{what} cannot be read ({reason(why)}); write or copy the file again"
        return BadDataError(message, group.path, group.index)

    def _completed(self, table: pa.Table, group: RowGroup, plan: _Plan) -> pa.Table:
        """Cast columns to the types of the dataset, and add those with one value: from the path, or null if missing."""
        num_rows = table.num_rows if plan.stored else group.stored_rows
        columns = dict(zip(table.column_names, table.columns, strict=True))
        for name, column in columns.items():
            if plain_type(column.type) == (dtype := self._types[name]):
                continue
            try:
                safe = not pa.types.is_floating(dtype)
                columns[name] = pa.chunked_array([cast(chunk, dtype, safe) for chunk in column.chunks], dtype)
            except pa.ArrowException as error:
                raise BadDataError(
                    f"column '{name}' of row group {group.index} of '{group.path}' is {column.type} and holds values "
                    f"that are not {dtype}, the type in other files; write it with the same type",
                    group.path,
                    group.index,
                ) from error
        keys = partition_keys(group.path) if plan.constant else {}
        constant = {name: partition_column(keys.get(name), self._types[name], num_rows) for name in plan.constant}
        return pa.table(columns | constant)


def _rows(file: pq.ParquetFile, index: int, paths: list[str], first: int) -> pa.Table:
    if not first:
        return file.read_row_group(index, columns=paths, use_threads=False)
    # In one batch if Arrow can, because each batch has its own copy of the dictionary of texts.
    batches = file.iter_batches(first, row_groups=[index], columns=paths, use_threads=False)
    parts: list[pa.RecordBatch] = []
    while sum(map(len, parts)) < first and (batch := next(batches, None)) is not None:
        parts.append(batch)
    return pa.Table.from_batches(parts)


def _changed(group: RowGroup, how: str) -> BadDataError:
    return BadDataError(
        f"row group {group.index} of '{group.path}' is not what it was when the run began ({how}); start the run "
        f"again, and write new data under new names",
        group.path,
        group.index,
    )
