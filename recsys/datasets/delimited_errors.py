"""Errors of delimited files whose content is not what they are read as."""

from __future__ import annotations

import codecs
import re
import sys
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
_JSON = (
    "{} holds JSON, and no delimited text; write its records as Parquet, as by pyarrow.json.read_json of a file with "
    "one a line, and pyarrow.parquet.write_table"
)
# A number or a date instead of the name of a column.
_NUMBER = r"^[-+]?[0-9]+([.,][0-9]*)?([eE][-+]?[0-9]+)?$"
_VALUE = re.compile(rf"{_NUMBER}|\d{{4}}-\d\d-\d\d.*")
_IN_TEXTS = ",;: "  # delimiters that texts of several lines, which are quoted, may hold too


def check_start(path: Path) -> None:
    """Raise a UserError for a path that is no file, or a file that begins like a format other than text."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the files in it, as {path}/*.csv does")
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
    """Turn errors of Arrow inside the block into a UserError that names the file and a remedy."""
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
        if re.search(r"conversion error to (double|float): invalid value '-?\d+,\d+'", message):
            hint = "; --decimal-point , reads such numbers"
        if "conversion error to timestamp" in message:
            hint = "; --time-format FORMAT reads times that are not in ISO 8601"
            if re.search(r"invalid value '[0-9.]+'", message):
                hint = "; --time-format FORMAT reads times of digits, but seconds since 1970 need no type: as numbers"
            if " zone offset in " in message:
                message = message.partition(". If these timestamps")[0]  # advice on functions of Arrow
                hint = "; write all times of a column with a zone offset or none, and leave it out of --types with one"
        if "CSV parse error" in message and '"' in message:
            hint = f"; {_NO_QUOTES}"
        if "invalid UTF8" in message:
            hint = f"; {CONVERT}"
        if "Empty CSV file" in message:
            hint = "; leave it out"
        if "straddling object" in message:
            message, hint = "a row goes on over 4 MiB of text, as after a quote that nothing closes", f"; {_NO_QUOTES}"
        if "Expected 1 columns" in message:
            hint = "; if another sign than a comma divides its columns, name it, as in --delimiter ';'"
        if _is_list_of_json(path):
            raise UserError(_JSON.format(path)) from None
        raise UserError(f"{path}: {message}{hint}") from None


def _is_list_of_json(path: Path) -> bool:
    """Return whether a file begins as a list of records of JSON, on one line or on several."""
    try:
        with path.open("rb") as file:
            return re.match(rb"\s*\[\s*\{", file.read(64)) is not None
    except OSError:
        return False


def check_quotes(batch: pa.RecordBatch, path: Path, delimiter: str) -> None:
    """Raise a UserError if a stray quote at the start of a field has made rows a part of the field."""
    for place, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        if not pa.types.is_string(column.type):
            continue
        of_lines = column.filter(pc.match_substring(column, "\n"))
        rows = _rows_in_text(batch.schema, place, delimiter) if delimiter in _IN_TEXTS else re.escape(delimiter)
        if rows is not None and pc.any(pc.match_substring_regex(of_lines, rows)).as_py():
            raise UserError(
                f"{path}: a field of column {name!r} begins with a quote and holds {delimiter!r} and an end of line, "
                f"as where whole rows are taken for one text; {_NO_QUOTES}, and --quote '\"' if it is one text"
            )


def _rows_in_text(schema: pa.Schema, place: int, delimiter: str) -> str | None:
    """Return a pattern of texts in column `place` that hold rows: behind the text itself the rest of its own row, and
    then the start of another one, down to the same column, with digits where columns are of numbers or times.

    None: no other column is numbers or times, so rows cannot be told from a text of several lines.
    """
    with_digits = [pa.types.is_primitive(field.type) and not pa.types.is_boolean(field.type) for field in schema]
    if not any(with_digits[:place] + with_digits[place + 1 :]):
        return None
    fields = [rf"{'[-+]?[0-9]' if digits else ''}[^{delimiter}\n]*" for digits in with_digits]
    rest = "".join(delimiter + field for field in fields[place + 1 :])
    # A text in the first column must be followed by a whole row, since nothing is before that column.
    start = "".join(field + delimiter for field in fields[:place]) or f"{delimiter.join(fields)}\n"
    return f"^{fields[place]}{rest}\n{start}"


def check_names(names: list[str], path: Path, delimiter: str) -> None:
    """Raise a UserError if the first line of a file holds no names of columns, but a record of JSON, or values, or one
    name that another sign than the delimiter divides."""
    if names[0].startswith(("{", "[{")):
        raise UserError(_JSON.format(path))
    values = [name for name in names if _VALUE.fullmatch(name)]
    if values and values != [str(i) for i in range(len(values))]:  # as pandas names columns that have no names
        raise UserError(
            f"{path} has {', '.join(map(repr, values[:3]))} among the names of its columns, which look like values; if "
            f"it has no header, give the {len(names)} names, as in --columns user,item,…, else write names in letters"
        )
    other = next((sign for sign in ",;\t|" if sign in names[0] and sign != delimiter), None)
    if len(names) == 1 and other:
        raise UserError(f"{path} has one column, {names[0]!r}; if {other!r} divides it, add --delimiter {other!r}")


def check_header(rows: pa.RecordBatch, path: Path) -> None:
    """Raise a UserError if the first row of a file without a header holds names of columns: those that `--columns`
    gives, or words above columns of numbers."""
    texts = [column[0].as_py() for column in rows.columns if pa.types.is_string(column.type)]
    if texts == rows.schema.names:
        raise UserError(f"{path} begins with the names that --columns gives, and so has a header; leave --columns out")
    if len(texts) < rows.num_columns or rows.num_rows < 2 or any(text is None or _VALUE.match(text) for text in texts):
        return
    below = (column[1:].drop_null() for column in rows.columns)
    if any(len(column) and pc.all(pc.match_substring_regex(column, _NUMBER)).as_py() for column in below):
        raise UserError(
            f"{path} begins with {', '.join(map(repr, texts[:3]))}, words above numbers, as a header does; leave "
            f"--columns out or take that line out of the file, or if it is a row, name its nulls by --null-values"
        )


def beyond_int64(rows: pa.RecordBatch) -> list[str]:
    """Return the columns, of texts that Arrow takes for float64, which hold whole numbers, some beyond int64: as floats
    several ids would be one."""
    return [
        name
        for name, texts in zip(rows.schema.names, rows.columns, strict=True)
        if pc.all(pc.match_substring_regex(texts, r"^[+-]?\d+$")).as_py()
        and pc.any(pc.match_substring_regex(texts, r"\d{19}")).as_py()
    ]


def note_zeros(rows: pa.RecordBatch) -> None:
    """Print a note on each column, of texts that Arrow takes for int64, which loses zeros in front."""
    for name, texts in zip(rows.schema.names, rows.columns, strict=True):
        padded = texts.filter(pc.match_substring_regex(texts, r"^[+-]?0\d"))
        if len(padded):
            print(
                f"note: column {name!r} is read as numbers, which keep no zeros in front: {padded[0]} becomes "
                f"{int(padded[0].as_py())}; --types {name}=string keeps ids as they are",
                file=sys.stderr,
            )
