"""Errors of delimited files that hold something else than they are read as."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import UserError

CONVERT = "convert the file, say with iconv"
_NO_QUOTES = "add --quote '' if a quote is a letter like others there"
# By their first four bytes.
_PACKED = {b"PK\x03\x04": "a zip archive", b"\xfd7zX": "compressed by xz", b"7z\xbc\xaf": "a 7z archive"}
_IN_TEXTS = ",;: "  # delimiters that texts of several lines may hold as well, which are in quotes for that reason


def check_start(path: Path) -> None:
    """Raise a UserError for a path that is no file, or a file that begins like one of another format than text."""
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        raise UserError(f"{path} is Parquet already, which training reads as it is; leave it out")
    is_tar = path.name.endswith((".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.zst"))
    if packed := "a tar archive" if is_tar else _PACKED.get(start):
        raise UserError(f"{path} is {packed}, which is not read; unpack it, and name the files that come out")
    if start.startswith(b"\x1f\x8b") and path.suffix != ".gz":
        raise UserError(f"{path} is compressed by gzip, and its name does not say so; let it end in .gz")
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is UTF-16, not UTF-8; {CONVERT}")


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn Arrow's complaints inside the block into a UserError that names the file and a remedy."""
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(
            f"{path}: the names of its columns are not UTF-8; {CONVERT}, or if it is compressed let its name end so, "
            f"as in .csv.gz"
        ) from None
    except (pa.ArrowInvalid, OSError) as error:
        message = " ".join(str(error).split())
        hint = "; --types NAME=TYPE sets the type of a column" if "conversion error" in message else ""
        if "conversion error to timestamp" in message:
            hint = "; --time-format FORMAT reads times that are not in ISO 8601"
        if "CSV parse error" in message and '"' in message:
            hint = f"; {_NO_QUOTES}"
        if "invalid UTF8" in message:
            hint = f"; {CONVERT}"
        if "Empty CSV file" in message:
            hint = "; leave it out"
        if "Expected 1 columns" in message:
            hint = "; if another sign than a comma divides its columns, name it, as in --delimiter ';'"
        raise UserError(f"{path}: {message}{hint}") from None


def check_quotes(batch: pa.RecordBatch, path: Path, delimiter: str) -> None:
    """Raise a UserError if a stray quote at the start of a field has made rows a part of the field."""
    if delimiter in _IN_TEXTS:
        return
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not pa.types.is_string(column.type):
            continue
        of_lines = column.filter(pc.match_substring(column, "\n"))
        if pc.any(pc.match_substring(of_lines, delimiter)).as_py():
            raise UserError(
                f"{path}: a field of column {name!r} begins with a quote and holds {delimiter!r} and an end of line, "
                f"as where whole rows are taken for one text; {_NO_QUOTES}, and --quote '\"' if it is one text"
            )


def check_header(rows: pa.RecordBatch, path: Path) -> None:
    """Raise a UserError if the first row of a file without a header holds the names of the columns."""
    texts = [column[0].as_py() for column in rows.columns if pa.types.is_string(column.type)]
    if texts == rows.schema.names:
        raise UserError(f"{path} begins with the names that --columns gives, and so has a header; leave --columns out")
