"""`recsys inspect`: a table of what the columns of a log hold, and a first config."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from recsys.datasets.logs import LogFiles
from recsys.datasets.proposal import Use, config_of, label_of, uses_of
from recsys.datasets.survey import Column, survey
from recsys.errors import UserError
from recsys.runtime.arguments import Parser
from recsys.runtime.files import prepare_output, write_output


def main(parser: Parser, arguments: Sequence[str]) -> int:
    """Run `recsys inspect`, whose arguments are added to the parser here; return the exit status 0.

    Raises:
        UserError: the log cannot be read or has no rows, it is not clear what the label is, or the config exists.
    """
    parser.add_argument("data", metavar="DATA", nargs="+", help="Parquet: directories, globs or files to train on")
    parser.add_argument(
        "--valid",
        metavar="PATH",
        nargs="+",
        help="rows to evaluate on; default: the folder valid next to train, or the last tenth by time",
    )
    about = "column of 0 and 1, or a condition as in data.filter; default: the only column that can be a label"
    parser.add_argument("--label", metavar="LABEL", help=about)
    parser.add_argument(
        "--out",
        metavar="CONFIG.yaml",
        type=Path,
        help="new file to write; default: the config is printed",
    )
    words = parser.parse_args(arguments)
    if words.out is not None:
        prepare_output(words.out, "--out")
        if words.out.exists():
            raise UserError(f"--out: '{words.out}' already exists; name another file, or remove it")
    text = _proposed(_paths(words.data, words.valid), words.label)
    if words.out is None:
        print(text, end="")
        return 0
    write_output(words.out, text)
    print(f"{words.out}: read it, then `recsys dry-run {words.out}` and `recsys train {words.out}`")
    return 0


def _proposed(paths: Mapping[str, Sequence[str]], label_text: str | None) -> str:
    """Print a table of the columns of data.train, and return a config for them."""
    files = LogFiles("DATA", paths["train"])
    columns = survey(files)
    rows = max((column.num_rows for column in columns.values()), default=0)
    if not rows:
        raise UserError(f"DATA: there are no rows in {', '.join(paths['train'])}")
    label, of_items = None, []
    if "items" in paths and label_text is None:
        of_items = LogFiles("DATA", paths["items"]).open(0).leaves
    else:
        label = label_of(columns, label_text)
    uses = uses_of(columns, label, files)
    print(f"{', '.join(paths['train'])}: {rows:,} rows\n\n{_table(columns, uses)}\n")
    return config_of(columns, uses, label, paths, of_items)


def _paths(data: Sequence[str], valid: Sequence[str] | None) -> dict[str, Sequence[str]]:
    """Return the paths of data.train, data.valid and so on: of a folder, or its `train`, as `recsys prepare` writes it,
    the folders in it."""
    paths = {"train": data} | ({"valid": valid} if valid else {})
    parent, name = os.path.split(data[0].rstrip("/"))
    folder = os.path.join(parent if name == "train" else data[0], "")
    if len(data) > 1 or not os.path.isdir(f"{folder}train"):
        return paths
    below = {role: [folder + role] for role in ("train", "valid", "test", "items") if os.path.isdir(folder + role)}
    return below | paths | {"train": below["train"]}


def _table(columns: Mapping[str, Column], uses: Mapping[str, Use]) -> str:
    rows = [("column", "type", "nulls", "distinct", "values", "use")]
    for name, column in columns.items():
        nulls = f"{column.num_nulls / max(1, column.num_rows):.2%}" if column.num_nulls else "0"
        use = uses[name].kind if uses[name].kind != "none" else f"none: {uses[name].why}"
        rows.append((name, str(column.dtype), nulls, f"{column.num_distinct:,}", _shown(column), use))
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown(column: Column) -> str:
    """Return what the values of a column are, in a few words."""
    if column.least is None:
        return ""
    ends = [_value(end) for end in (column.least, column.greatest)]
    values = " … ".join(dict.fromkeys(ends))
    if column.is_list:
        lengths = column.lengths
        mean = lengths @ range(len(lengths)) / max(1, lengths.sum())
        values += f"; {lengths.nonzero()[0][0]:,} to {len(lengths) - 1:,} in a row, {mean:.1f} in the mean"
    return values


def _value(value: Any) -> str:
    if isinstance(value, bool | float):
        return f"{value:.4g}" if isinstance(value, float) else str(value).lower()
    text = value.isoformat(" ", "seconds") if isinstance(value, datetime) else str(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 25 else f"{text[:24]}…"
