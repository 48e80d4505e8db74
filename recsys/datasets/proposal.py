"""A config for a log, based on what its columns hold: a DLRM ranker with an id, list or number feature for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import pyarrow as pa

from recsys.data.filters import written
from recsys.datasets import column_names
from recsys.datasets.leaks import auc_alone, sample
from recsys.datasets.logs import LogFiles
from recsys.datasets.proposed_models import ranker, sequences, towers, yaml_text
from recsys.datasets.survey import ALIKE, LEVELS, Column
from recsys.datasets.writer import columns_where, is_true
from recsys.errors import UserError, nearest
from recsys.ids import is_text

_MOST_LENGTH = 100  # of lists, by default
_FEW_ROWS, _FEWER_ROWS = 1_000_000, 50_000
_TELLS, _SAYS_MUCH = 0.98, 0.85  # AUC
_LARGE = 10  # numbers farther from 0 than this are scaled down
_FEW_NUMBERS = 50
_ROWS_OF_AN_ID = 10
_MOST_SPARE_ROWS = 10_000_000


class Use(NamedTuple):
    """What a column is proposed to be.

    Attributes:
        kind: id, number, vector, time, label or none.
        why: reason for it, or what the user should look at; may be empty.
    """

    kind: str
    why: str = ""


class Label(NamedTuple):
    """What is learned.

    Attributes:
        columns: those that it is made from. yaml: its lines in section data of the config.
        condition: filter, as in data.filter, of the rows with label 1; None if the label is any number.
    """

    columns: Sequence[str]
    yaml: str
    condition: str | None


def label_of(columns: Mapping[str, Column], text: str | None) -> Label:
    """Return the label that `text` names, a column or a condition as in data.filter; by default the column of 0 and 1.

    Raises:
        UserError: there is no such column, or it is not clear which column of 0 and 1 is the label.
    """
    if text is None:
        candidates = [name for name, column in columns.items() if _is_binary(column)]
        named = [name for name in candidates if column_names.LABEL.search(name)]
        if len(named or candidates) != 1:
            raise UserError(
                f"which column is the label is not clear: {', '.join(candidates) or 'none'} hold 0 and 1; name it by "
                f"--label COLUMN, or a condition, as by --label 'rating >= 4' (a log of clicks alone is for towers: "
                f"`recsys prepare retrieval` first)"
            )
        (text,) = named or candidates
    if text not in columns:
        named = columns_where(text, "--label")
        for name in named:
            if name not in columns:
                others = f"only {', '.join(columns)}{nearest(name, columns)}"
                raise UserError(f"--label: there is no column {name!r}, {others}")
        short = not any(columns[name].num_nulls for name in named)
        label = yaml_text(text) if short else f"{{expression: {yaml_text(text)}, nulls: unknown}}"
        return Label(named, f"labels: {{label: {label}}}", text)
    column, name = columns[text], written(text)
    if column.is_list or column.least is None or is_text(column.element):
        raise UserError(f"--label: {text!r} holds no numbers; write a condition, as --label \"{name} == 'buy'\"")
    binary = _is_binary(column)
    if binary and not column.num_nulls:
        yaml = f"label_column: {yaml_text(text)}"
    else:
        loss, nulls = "" if binary else ", loss: squared", ", nulls: unknown" if column.num_nulls else ""
        yaml = f"labels: {{label: {{column: {yaml_text(text)}{loss}{nulls}}}}}"
    condition = name if pa.types.is_boolean(column.element) else f"{name} == 1"
    return Label([text], yaml, condition if binary else None)


def uses_of(columns: Mapping[str, Column], label: Label | None, files: LogFiles) -> dict[str, Use]:
    """Return what each column is proposed to be; none for those that give the label away in a sample of the rows."""
    uses = {name: _use(column) for name, column in columns.items()}
    if label is None:
        return uses
    uses |= {name: Use("none", "is it how much a row counts? data.weight_column") for name in _weights(columns)}
    uses |= dict.fromkeys(label.columns, Use("label"))
    if label.condition is None:
        return uses
    suspects = [name for name, use in uses.items() if use.kind in ("id", "number") and not columns[name].is_list]
    rows = sample(files, [*label.columns, *suspects])
    positive = is_true(rows, label.condition, "--label")
    known = positive.is_valid()
    rows, positive = rows.filter(known), positive.filter(known).to_numpy(zero_copy_only=False)
    for name in suspects:
        auc, use = auc_alone(rows[name].combine_chunks(), positive), uses[name]
        if auc > _TELLS:
            uses[name] = Use("none", f"it tells the label (AUC {auc:.3f} alone), so is it known before?")
        elif auc > _SAYS_MUCH:
            why = f"it says much of the label (AUC {auc:.3f} alone), so is it known before?"
            uses[name] = Use(use.kind, f"{use.why}; {why}" if use.why else why)
    return uses


def _use(column: Column) -> Use:
    if column.problem:
        return Use("none", column.problem)
    if column.num_odd:
        return Use("none", f"{column.num_odd:,} values are NaN or infinite; write null for an unknown number")
    if not column.num_distinct:
        return Use("none", "no values")
    if column.is_list and not column.is_whole:
        (lengths,) = column.lengths[1:].nonzero()
        return Use("vector") if len(lengths) == 1 else Use("none", "numbers, as many as a row happens to have")
    if column.is_list:
        if column.separator == LEVELS:
            return Use("id", "levels of a tree; without the separator, each text is one id")
        in_text = column.separator is not None and not column.integers
        digits = in_text and column.least.isdigit() and column.greatest.isdigit()
        return Use("id", "texts of digits, unless integers: true makes integers of them" if digits else "")
    if column.num_distinct == 1 and not column.num_nulls:
        return Use("none", "one value")
    if column.is_time:
        return Use("time", "a time, and new rows have later ones than those learned of")
    if _is_binary(column) and column_names.LABEL.search(column.name):
        return Use("none", "another label?")
    if not column.is_whole or pa.types.is_boolean(column.element) or pa.types.is_temporal(column.element):
        return Use("number")
    if pa.types.is_floating(column.element) and not column.num_nulls:  # pandas makes floats of integers with nulls
        return Use("number")
    if _looks_counted(column) or _is_measured(column):
        return Use("number")
    if column.num_distinct > 0.9 * (column.num_rows - column.num_nulls):
        return Use("none", "hardly a value is there twice")
    if column_names.ID_OF_FEW_ROWS.search(column.name) and column.num_distinct > column.num_rows / 100:
        return Use("none", "an id of a few rows that belong together, and new rows have other ids")
    if column_names.TIME.search(column.name):
        return Use("id", "leave it out if it grows with time")
    if not is_text(column.element) and column_names.SHOWN_AT.search(column.name):
        return Use("id", "rows to be scored have no place in a list yet? hidden: 0.1, see data/README.md")
    if not is_text(column.element) and column.num_distinct > 1000 and not column_names.ID.search(column.name):
        return Use("id", "if these are numbers: {type: float, log1p: true}, and no table")
    return Use("id")


def _weights(columns: Mapping[str, Column]) -> list[str]:
    named = {name: column.least for name, column in columns.items() if column_names.WEIGHT.search(name)}
    numbers = [name for name, least in named.items() if isinstance(least, int | float) and least >= 0]
    return [name for name in numbers if not columns[name].is_list]


def _looks_counted(column: Column) -> bool:
    """Return whether numbers look like counts or amounts: many small and few large ones, with gaps, not named like ids.

    Ids numbered by frequency look like that too, but have fewer gaps.
    """
    if column_names.ID.search(column.name) or not isinstance(column.least, int | float) or column.least < 0:
        return False
    mean = column.total / (column.num_rows - column.num_nulls)
    return mean < column.greatest / 10 and column.num_distinct < column.greatest / 2


def _is_measured(column: Column) -> bool:
    """Return whether numbers are a quantity by their name; with few of them, a vector for each may serve better."""
    is_number = not is_text(column.element) and not column.is_list
    return is_number and column.num_distinct > _FEW_NUMBERS and column_names.is_measure(column.name)


def _is_binary(column: Column) -> bool:
    return not column.is_list and column.is_whole and (column.least, column.greatest) == (0, 1)


def config_of(
    columns: Mapping[str, Column],
    uses: Mapping[str, Use],
    label: Label | None,
    paths: Mapping[str, Sequence[str]],
    of_items: Sequence[str] = (),
) -> str:
    """Return a config, as YAML with comments.

    Args:
        columns: by name. uses: what each is used as.
        label: of a ranker; None: two towers, or SASRec if no row of data.train is about one item.
        paths: of data.train, and of data.valid, data.test and data.items if there are any.
        of_items: columns of data.items, the ids first.

    Raises:
        UserError: no column has ids.
    """
    names = _feature_names([name for name, use in uses.items() if use.kind in ("id", "number", "vector")])
    ids = {name: columns[name] for name in names if uses[name].kind == "id"}
    if not ids:
        raise UserError(f"no column holds ids, which a model needs: {', '.join(columns)}")
    if not label and not set(of_items) & set(names) and (lists := [ids[name] for name in ids if ids[name].is_list]):
        return _of_lists(lists, of_items[0], paths)
    tables = _tables(ids, names)
    num_rows = max(column.num_rows for column in columns.values())
    many = num_rows >= _FEW_ROWS
    lines = _data(paths, "" if "valid" in paths else _cut(columns, uses))
    optional = [name for name in (*names, *(label.columns if label else ())) if not columns[name].is_in_all]
    lines += [f"  optional_columns: [{', '.join(map(yaml_text, optional))}] # some files lack them"] if optional else []
    lines += [f"  {label.yaml}"] if label else []
    lines.append("features: # leave out what is known only once the label is" if label else "features:")
    for name, column in columns.items():
        lines.append(_feature(column, uses[name], names.get(name, ""), tables.get(name, "")))
    hashed = f"ids are hashed to rows, {_ROWS_OF_AN_ID} for each of today's ids"
    own = "an id has its own row, as those that share one are found together"
    lines.append(f"tables: # {hashed if label else own}")
    for table in dict.fromkeys(tables.values()):
        sharing = [ids[name] for name in ids if tables[name] == table]
        lines.append(_table(table, sharing, 32 if many else 16, hashed=label is not None))
    model, metric = ranker(label.condition, len(names)) if label else towers(names, of_items)
    stop = f", early_stop: {{metric: {metric}}}" if metric and not many else ""
    size = 8192 if many else 1024 if num_rows >= _FEWER_ROWS else 256
    lines += [model, f"train: {{global_batch_size: {size}, epochs: {1 if many else 5}, eval_every_epochs: 1{stop}}}"]
    return "\n".join(filter(None, lines)) + "\n"


def _of_lists(lists: Sequence[Column], item: str, paths: Mapping[str, Sequence[str]]) -> str:
    """Return a config for rows that are users: `recsys prepare retrieval --neighbours` writes other lists, too."""
    history = next((column for column in lists if column.name == "history"), lists[0])
    return sequences(history.name, item, history.num_distinct, len(history.lengths) - 1, _data(paths))


def _data(paths: Mapping[str, Sequence[str]], cut: str = "") -> list[str]:
    """Return lines of section `data`; `cut` is filters that hold out rows of data.train, empty if there are none."""
    lines = ["data:", *(f"  {role}: {_texts(paths[role])}" for role in paths)]
    return [*lines, f"  valid: {_texts(paths['train'])}", f"  filter: {cut}"] if cut else lines


def _feature_names(columns: Sequence[str]) -> dict[str, str]:
    """Return a unique feature name for each column, made of its letters, digits, _ and -."""
    names: dict[str, str] = {}
    for column in columns:
        name = re.sub(r"[^\w-]+", "_", column).lstrip("-").encode()[:100].decode(errors="ignore") or "feature"
        while name in names.values():
            name += "_"
        names[column] = name
    return names


def _tables(ids: Mapping[str, Column], names: Mapping[str, str]) -> dict[str, str]:
    """Return the table of each column of ids; a list shares that of a column with mostly the same ids."""
    alone = {name: column for name, column in ids.items() if not column.is_list}
    short = {name: names[name].removesuffix("_id") for name in alone}
    tables = {name: short[name] if short[name] not in ("", *names.values()) else names[name] for name in alone}
    for name, column in ids.items():
        if column.is_list:
            likeness = {other: column.likeness(ids) for other, ids in alone.items() if _may_be_alike(column, ids)}
            best = max(likeness, key=likeness.__getitem__, default=name)
            tables[name] = tables[best] if likeness.get(best, 0) > ALIKE else names[name]
    return tables


def _may_be_alike(one: Column, other: Column) -> bool:
    """Return whether values that both columns have are the same ids; a few numbers from 0 on are in any column."""
    return is_text(one.element) == is_text(other.element) and (is_text(one.element) or one.num_distinct >= _FEW_NUMBERS)


def _feature(column: Column, use: Use, name: str, table: str) -> str:
    if not name:
        return "" if use.kind == "label" else f"  # {yaml_text(column.name)}: {use.why}"
    keys = [] if name == column.name else [f"column: {yaml_text(column.name)}"]
    note = f"; {use.why}" if use.why else ""
    if use.kind == "id":
        keys.append(f"table: {yaml_text(table)}")
        if column.is_list:
            longest = len(column.lengths) - 1
            keys += [] if column.separator is None else [f"separator: {yaml_text(column.separator)}"]
            keys += ["integers: true"] if column.integers else []
            keys.append(f"max_length: {min(max(1, longest), _MOST_LENGTH)}")
            note += f"; up to {longest:,} in a row" if longest > _MOST_LENGTH else ""
            note += "" if table == name else f"; those of {table}, it seems"
        return f"  {yaml_text(name)}: {{{', '.join(keys)}}} # {column.num_distinct:,} ids{note}"
    keys = ["type: float", *keys]
    if use.kind == "vector":
        keys.append(f"dim: {len(column.lengths) - 1}")
    elif not isinstance(column.least, bool) and max(-_number(column.least), _number(column.greatest)) > _LARGE:
        keys.append("log1p: true" if _number(column.least) >= 0 else "standardise: true")
    return f"  {yaml_text(name)}: {{{', '.join(keys)}}}{f' # {use.why}' if use.why else ''}"


def _number(value: Any) -> float:
    """Return a number, or a length of time, as training reads it."""
    if hasattr(value, "total_seconds"):
        return float(value.total_seconds())
    return float(value) if not hasattr(value, "hour") else 3600.0 * value.hour


def _table(name: str, columns: Sequence[Column], dim: int, hashed: bool) -> str:
    ids = max(column.num_distinct for column in columns)
    rows = max(20, 2 * ids, min(_ROWS_OF_AN_ID * ids, _MOST_SPARE_ROWS) if hashed else 0)
    step = 10 ** max(0, len(str(rows)) - 2)
    keys = [f"num_embeddings: {-(-rows // step) * step}", f"embedding_dim: {dim}"]
    keys += [] if hashed else ["mapping: vocabulary"]
    keys += ["pooling: mean"] if any(column.is_list for column in columns) else []
    return f"  {yaml_text(name)}: {{{', '.join(keys)}}}"


def _cut(columns: Mapping[str, Column], uses: Mapping[str, Use]) -> str:
    """Return filters that hold out a tenth of the rows for validation, the last ones if there is a time."""
    times = [column for name, column in columns.items() if uses[name].kind == "time" and not column.num_nulls]
    column = max(times, key=lambda column: column.num_distinct, default=None)
    if column is None or (end := column.time_after(0.9)) == column.least:
        return '{train: "not sampled(0.1, 1)", valid: "sampled(0.1, 1)"} # a tenth of the rows, drawn'
    if isinstance(end, datetime):
        end = (end.astimezone(timezone.utc).replace(tzinfo=None) if end.tzinfo else end).isoformat(" ", "seconds")
    name, end = written(column.name), repr(end if isinstance(end, int) else str(end))
    return f"{{train: {yaml_text(f'{name} < {end}')}, valid: {yaml_text(f'{name} >= {end}')}}} # the last tenth"


def _texts(texts: Sequence[str]) -> str:
    return yaml_text(texts[0]) if len(texts) == 1 else f"[{', '.join(map(yaml_text, texts))}]"
