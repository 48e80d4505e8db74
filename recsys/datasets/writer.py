"""Shared parts of converters: writing Parquet, replacing an output folder as a whole, filters of rows."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import field, fields
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.data.conditions import KEY
from recsys.data.filters import parse_filter
from recsys.errors import UserError, counted, in_words, nearest
from recsys.runtime.files import naming
from recsys.runtime.folders import whole_folder

MARKER = "_prepared.json"  # readers of Parquet folders skip names that begin like this
ROW_GROUP_ROWS = 65536
SPLITS = ("train", "valid", "test")
WHERE_HELP = "keep only rows that match this filter, written like data.filter: \"rating >= 4 and country in ['de']\""


def option(default: Any, help: str, **settings: Any) -> Any:
    """A field of a converter's options, with its arguments of ``ArgumentParser.add_argument``.

    ``least`` and ``most`` bound a number: see ``check_bounds``.
    """
    return field(default_factory=lambda: copy(default), metadata={"help": help, **settings})


def check_bounds(options: Any) -> None:
    """Raise UserError for an option below its ``least`` or above its ``most``."""
    for option in fields(options):
        flag, value = f"--{option.name.replace('_', '-')}", getattr(options, option.name)
        least, most = option.metadata.get("least"), option.metadata.get("most")
        if least is not None and not value >= least:  # nor is nan
            raise UserError(f"{flag} must be at least {least}, got {value}")
        if most is not None and value > most:
            raise UserError(f"{flag} must be at most {most}, got {value}")


class PartWriter(AbstractContextManager["PartWriter"]):
    """Rows into ``folder/part-00000.parquet``, ``part-00001.parquet`` …: zstd, page checksums, equal row groups.

    Row groups never cross files, so the last one of a file may be short. Full ones are written at once, the rest at the
    end of a ``with`` block, unless an error ends it.
    """

    def __init__(self, folder: Path, row_group_rows: int, rows_per_file: int):
        self._paths = (folder / f"part-{number:05d}.parquet" for number in count())
        self._row_group_rows, self._rows_per_file = row_group_rows, rows_per_file
        self.num_rows = 0
        self._pending: list[pa.Table] = []
        self._file: pq.ParquetWriter | None = None
        self._path = folder
        self._room = rows_per_file  # for rows in the file

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows, always of the same schema."""
        self._pending.append(rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows]))
        self.num_rows += rows.num_rows
        while sum(map(len, self._pending)) >= min(self._row_group_rows, self._room):
            self._write_row_group()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(OSError, pa.ArrowException):  # a second error would hide the first
                self._close_file()
            return
        if any(map(len, self._pending)):
            self._write_row_group()
        self._close_file()

    def _write_row_group(self) -> None:
        table = pa.concat_tables(self._pending)
        if self._file is None:
            self._path = next(self._paths)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with naming(self._path):
                self._file = pq.ParquetWriter(self._path, table.schema, compression="zstd", write_page_checksum=True)
        group = table.slice(0, min(self._row_group_rows, self._room))
        with naming(self._path):
            self._file.write_table(group, self._row_group_rows)
        self._pending, self._room = [table.slice(len(group))], self._room - len(group)
        if not self._room:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file, self._room = self._file, None, self._rows_per_file
            with naming(self._path):
                file.close()


def write_parts(tables: Iterable[pa.Table], folder: Path, row_group_rows: int, rows_per_file: int) -> None:
    """Write a stream of tables of one schema as part files of ``folder``."""
    with PartWriter(folder, row_group_rows, rows_per_file) as writer:
        for table in tables:
            writer.write(table)


def read_marker(out: Path) -> dict[str, Any] | None:
    """The marker that an earlier converter left in ``out``; None if none has finished there."""
    try:
        marker = json.loads((out / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


@contextmanager
def replacing(out: Path, marker: dict[str, Any], overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes ``out``, with ``marker`` in it, when the block succeeds.

    So ``out`` is either what it was or complete. A folder that is not empty is replaced only with ``overwrite`` and
    only if a converter made it; anything else raises UserError, as does another process that writes to ``out``. What a
    killed process has left in the temporary folder is removed.
    """
    _check_replaceable(out, overwrite)
    with whole_folder(out, "--out", replaces=True) as folder:
        yield folder
        (folder / MARKER).write_text(json.dumps(marker, indent=2, default=str) + "\n")


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
        numbers = [(rows, "row"), (len(files), "file"), (groups, "row group")]
        lines.append(f"{folder}: {', '.join(counted(*pair) for pair in numbers)}, {kib:,.0f} KiB")
        schema = footers[0].schema.to_arrow_schema()
        lines.append("    " + ", ".join(f"{field.name} {_type_name(field.type)}" for field in schema))
    return "\n".join(lines)


def _type_name(dtype: pa.DataType) -> str:
    if pa.types.is_list(dtype):
        return f"list<{_type_name(dtype.value_type)}>"
    return {"float": "float32", "double": "float64"}.get(str(dtype), str(dtype))


def telling_odd(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows, and then print how many numbers of each column are NaN or infinite, if any are."""
    counts = Counter[str]()
    for batch in batches:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            values = column.flatten() if pa.types.is_list(column.type) else column
            if pa.types.is_floating(values.type):
                counts[name] += pc.sum(pc.invert(pc.is_finite(values))).as_py() or 0
        yield batch
    if odd := ", ".join(f"{count:,} in {name!r}" for name, count in counts.items() if count):
        advice = "--null-values nan,inf, spelled as in the files, makes nulls of them"
        print(f"note: numbers are NaN or infinite, which training refuses: {odd}; {advice}", file=sys.stderr)


def check_column(name: str, names: list[str]) -> None:
    """Raise UserError unless ``name`` is one of the columns ``names``."""
    if name not in names:
        raise UserError(f"there is no column {name!r}; there are {', '.join(names)}{nearest(name, names)}")


def columns_where(where: str | None, flag: str = "--where") -> list[str]:
    """The columns that a filter names, sorted. Raises UserError, by flag, for an invalid one (``parse_filter``)."""
    with in_words({KEY: flag}):
        return sorted(parse_filter(where).columns()) if where is not None else []


def rows_where(rows: pa.Table | pa.RecordBatch, where: str) -> pa.Table | pa.RecordBatch:
    """The rows for which the filter --where is true. Raises UserError if it does not fit the columns."""
    return rows.filter(is_true(rows, where, "--where"))


def is_true(rows: pa.Table | pa.RecordBatch, condition: str, flag: str) -> pa.BooleanArray:
    """Value of a condition, written as a filter, for each row; null as in SQL. Errors as of ``rows_where``, by flag."""
    with in_words({KEY: flag}):
        parsed = parse_filter(condition)
        for name in sorted(parsed.columns()):
            check_column(name, rows.schema.names)
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        return parsed.bind(rows.schema).mask(table).combine_chunks()
