"""What every converter shares: writing Parquet, replacing an output folder whole, random numbers by key.

The converters themselves are beside this file: ``movielens``, ``synthetic``, ``delimited`` and ``retrieval``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.conditions import KEY
from recsys.data.filters import parse_filter
from recsys.errors import UserError, nearest
from recsys.ids import hash_integers

MARKER = "prepared.json"
ROW_GROUP_ROWS = 65536
SPLITS = ("train", "valid", "test")


class ParquetSink:
    """One Parquet file under construction: zstd, page checksums, row groups of equal size.

    The file appears under its name only when it is whole: it is written beside it under a hidden
    temporary name, which is removed if the ``with`` block ends by an exception.
    """

    def __init__(self, path: Path, schema: pa.Schema, row_group_rows: int = ROW_GROUP_ROWS):
        if row_group_rows < 1:
            raise UserError(f"row group rows must be at least 1, got {row_group_rows}")
        self.path, self.schema, self.row_group_rows = path, schema, row_group_rows
        self.num_rows = 0
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self._temporary, schema, compression="zstd", write_page_checksum=True)

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows of ``schema``; whole row groups go to disk, the rest waits in memory."""
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows], self.schema)
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.num_rows += table.num_rows
        if self._pending_rows >= self.row_group_rows:
            self._flush(self._pending_rows // self.row_group_rows * self.row_group_rows)

    def _flush(self, count: int) -> None:
        table = pa.concat_tables(self._pending)
        self._writer.write_table(table.slice(0, count), self.row_group_rows)
        self._pending = [table.slice(count)]
        self._pending_rows -= count

    def close(self) -> None:
        """Write what is pending and give the file its name."""
        if self._pending_rows:
            self._flush(self._pending_rows)
        self._writer.close()
        os.replace(self._temporary, self.path)

    def abandon(self) -> None:
        """Drop the file."""
        self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> ParquetSink:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class PartWriter:
    """Rows into ``folder/part-00000.parquet``, ``part-00001.parquet`` …, ``rows_per_file`` in each.

    Row groups never cross files, so the last one of a file may be short. Used as a context manager.
    """

    def __init__(self, folder: Path, schema: pa.Schema, row_group_rows: int, rows_per_file: int):
        self.folder, self.schema = folder, schema
        self.row_group_rows, self.rows_per_file = row_group_rows, rows_per_file
        self.num_rows = 0
        self._num_files = 0
        self._file: ParquetSink | None = None

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows of ``schema``, starting new files as they fill."""
        start = 0
        while start < rows.num_rows:
            if self._file is None:
                path = self.folder / f"part-{self._num_files:05d}.parquet"
                self._file = ParquetSink(path, self.schema, self.row_group_rows)
                self._num_files += 1
            piece = rows.slice(start, self.rows_per_file - self._file.num_rows)
            self._file.write(piece)
            start += piece.num_rows
            if self._file.num_rows == self.rows_per_file:
                self._file.close()
                self._file = None
        self.num_rows += rows.num_rows

    def close(self) -> None:
        """Finish the last file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.abandon()


def write_parquet(
    data: pa.Table | Iterable[pa.RecordBatch | pa.Table],
    path: str | os.PathLike[str],
    row_group_rows: int = ROW_GROUP_ROWS,
) -> int:
    """Write a table, or a stream of batches of one schema, as one Parquet file; return its rows.

    zstd, CRC32 on every page, ``row_group_rows`` rows a group (the last may be short). The name
    appears only when the file is whole. Raises UserError for a stream without a single batch, whose
    schema is unknown.
    """
    batches = iter([data] if isinstance(data, pa.Table) else data)
    first = next(batches, None)
    if first is None:
        raise UserError(f"{path}: there is nothing to write, not even a schema")
    with ParquetSink(Path(path), first.schema, row_group_rows) as file:
        file.write(first)
        for batch in batches:
            file.write(batch)
    return file.num_rows


def write_parts(
    tables: Iterable[pa.Table | pa.RecordBatch], folder: Path, row_group_rows: int, rows_per_file: int
) -> None:
    """Write a stream of at least one table, all of one schema, as part files of ``folder``."""
    stream = iter(tables)
    first = next(stream)
    with PartWriter(folder, first.schema, row_group_rows, rows_per_file) as writer:
        writer.write(first)
        for table in stream:
            writer.write(table)


def read_marker(out: Path) -> dict[str, Any] | None:
    """What an earlier converter said it put into ``out``; None where no converter finished."""
    try:
        marker = json.loads((out / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


@contextmanager
def replacing(out: Path, marker: dict[str, Any], overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes ``out``, with ``marker`` in it, when the block succeeds.

    So ``out`` is either what it was or complete. A folder that is not empty is replaced only with
    ``overwrite`` and only if a converter made it; anything else raises UserError.
    """
    _check_replaceable(out, overwrite)
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        (temporary / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file; --out must name a folder")
    if not any(out.iterdir()):
        return
    if read_marker(out) is None:
        raise UserError(f"{out} is not empty and was not made by this script; choose another --out")
    if not overwrite:
        raise UserError(f"{out} already holds prepared data; add --overwrite or choose another --out")


def describe(out: Path) -> str:
    """Rows, files, row groups and columns of every folder of part files under ``out``, for people."""
    lines = []
    for folder in sorted({path.parent for path in out.rglob("part-*.parquet")}):
        files = sorted(folder.glob("part-*.parquet"))
        footers = [pq.read_metadata(path) for path in files]
        rows = sum(footer.num_rows for footer in footers)
        groups = sum(footer.num_row_groups for footer in footers)
        kib = sum(path.stat().st_size for path in files) / 1024
        lines.append(f"{folder}: {rows:,} rows, {len(files)} files, {groups} row groups, {kib:,.0f} KiB")
        schema = footers[0].schema.to_arrow_schema()
        lines.append("    " + ", ".join(f"{field.name} {_type_name(field.type)}" for field in schema))
    return "\n".join(lines)


def _type_name(dtype: pa.DataType) -> str:
    if pa.types.is_list(dtype):
        return f"list<{_type_name(dtype.value_type)}>"
    return {"float": "float32", "double": "float64"}.get(str(dtype), str(dtype))


def check_column(name: str, names: list[str]) -> None:
    """Raise UserError unless ``name`` is one of the columns ``names``."""
    if name not in names:
        raise UserError(f"there is no column {name!r}, only {', '.join(names)}{nearest(name, names)}")


def columns_where(where: str | None) -> list[str]:
    """The columns that --where names, sorted. Raises UserError for what is no filter (see ``parse_filter``)."""
    try:
        return sorted(parse_filter(where).columns()) if where is not None else []
    except UserError as error:
        raise UserError(str(error).replace(KEY, "--where")) from None


def rows_where(rows: pa.Table | pa.RecordBatch, where: str) -> pa.Table | pa.RecordBatch:
    """The rows for which the filter --where is true. Raises UserError where it does not go with the columns."""
    for name in columns_where(where):
        check_column(name, rows.schema.names)
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    try:
        mask = parse_filter(where).bind(rows.schema).mask(table)
    except UserError as error:
        raise UserError(str(error).replace(KEY, "--where")) from None
    return rows.filter(mask.combine_chunks())


def hash_uniform(keys: np.ndarray, seed: int) -> np.ndarray:
    """float64 in [0, 1) for integer keys, any shape: a function of (key, seed) alone, on every machine."""
    return (hash_integers(keys, seed) >> np.uint64(11)) * 2.0**-53
