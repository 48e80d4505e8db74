"""What every converter shares: writing Parquet, replacing an output folder whole, random numbers by key.

The converters themselves are beside this file: ``movielens``, ``synthetic``, ``delimited`` and ``retrieval``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import field
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.conditions import KEY
from recsys.data.filters import parse_filter
from recsys.errors import UserError, nearest
from recsys.ids import hash_integers
from recsys.runtime.files import replacing as replacing_file

MARKER = "prepared.json"
ROW_GROUP_ROWS = 65536
SPLITS = ("train", "valid", "test")
WHERE_HELP = (
    "take only rows for which this is true, written as data.filter, as in \"rating >= 4 and country in ['de']\""
)


def option(default: Any, help: str, **settings: Any) -> Any:
    """A field of a converter's options, with what its command line says of it: see ``ArgumentParser.add_argument``."""
    return field(default_factory=lambda: copy(default), metadata={"help": help, **settings})


class PartWriter:
    """Rows into Parquet files, ``rows_per_file`` in each: zstd, page checksums, row groups of equal size.

    Row groups never cross files, so the last one of a file may be short. Used as a context manager; whoever gives the
    paths drops the files if the block ends by an exception.
    """

    def __init__(self, paths: Iterable[Path], schema: pa.Schema, row_group_rows: int, rows_per_file: int = sys.maxsize):
        self.schema, self.row_group_rows, self.rows_per_file = schema, row_group_rows, rows_per_file
        self.num_rows = 0
        self._paths = iter(paths)
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._file: pq.ParquetWriter | None = None
        self._room = 0  # for rows in the file

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows of ``schema``; whole row groups go to disk, the rest waits in memory."""
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows], self.schema)
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.num_rows += table.num_rows
        while self._pending_rows >= min(self.row_group_rows, self._room or self.rows_per_file):
            self._flush()

    def _flush(self) -> None:
        """Write a row group."""
        if self._file is None:
            path = next(self._paths)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = pq.ParquetWriter(path, self.schema, compression="zstd", write_page_checksum=True)
            self._room = self.rows_per_file
        table = pa.concat_tables(self._pending)
        group = table.slice(0, min(self.row_group_rows, self._room))
        self._file.write_table(group, self.row_group_rows)
        self._pending, self._pending_rows = [table.slice(len(group))], len(table) - len(group)
        self._room -= len(group)
        if not self._room:
            self._file = self._file.close()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._pending_rows:
            self._flush()
        if self._file is not None:
            self._file.close()


def part_paths(folder: Path) -> Iterator[Path]:
    """Yield ``folder/part-00000.parquet``, ``part-00001.parquet`` …"""
    return (folder / f"part-{number:05d}.parquet" for number in count())


def write_parquet(
    data: pa.Table | Iterable[pa.RecordBatch | pa.Table], path: Path, row_group_rows: int = ROW_GROUP_ROWS
) -> int:
    """Write a table, or a stream of batches of one schema, as one Parquet file; return its rows.

    zstd, CRC32 on every page, ``row_group_rows`` rows a group (the last may be short). The name
    appears only when the file is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as aside:
        return _write([data] if isinstance(data, pa.Table) else data, [aside], row_group_rows)


def write_parts(
    tables: Iterable[pa.Table | pa.RecordBatch], folder: Path, row_group_rows: int, rows_per_file: int
) -> None:
    """Write a stream of at least one table, all of one schema, as part files of ``folder``."""
    _write(tables, part_paths(folder), row_group_rows, rows_per_file)


def _write(tables: Iterable[pa.Table | pa.RecordBatch], paths: Iterable[Path], *sizes: int) -> int:
    stream = iter(tables)
    first = next(stream)
    with PartWriter(paths, first.schema, *sizes) as writer:
        for table in chain([first], stream):
            writer.write(table)
    return writer.num_rows


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
    with _told_of_where():
        return sorted(parse_filter(where).columns()) if where is not None else []


def rows_where(rows: pa.Table | pa.RecordBatch, where: str) -> pa.Table | pa.RecordBatch:
    """The rows for which the filter --where is true. Raises UserError where it does not go with the columns."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    with _told_of_where():
        condition = parse_filter(where)
        for name in sorted(condition.columns()):
            check_column(name, rows.schema.names)
        return rows.filter(condition.bind(rows.schema).mask(table).combine_chunks())


@contextmanager
def _told_of_where() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(KEY, "--where")) from None


def hash_uniform(keys: np.ndarray, seed: int) -> np.ndarray:
    """float64 in [0, 1) for integer keys, any shape: a function of (key, seed) alone, on every machine."""
    return (hash_integers(keys, seed) >> np.uint64(11)) * 2.0**-53
