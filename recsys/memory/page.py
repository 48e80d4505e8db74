"""Parts of memory pages in Markdown: tables with a column for each group of similar ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recsys.report.text import listed, placements, size
from recsys.tables.spec import Shard

Cell = tuple[int | None, ...] | str  # bytes, or bytes measured and predicted; or text

_MOST_COLUMNS = 8
_SHOWN_LINES = 40


def row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def when(peak: Mapping[str, Any]) -> str:
    """Return the phase and the step of a peak in words."""
    return f"step {peak['step']}" if peak["phase"] == "step" else f"{peak['phase']} at step {peak['step']}"


def kind_rows(ranks: Sequence[Mapping[str, int]]) -> dict[str, list[Cell]]:
    """Return rows for `rank_table`: bytes of each rank by kind, the largest kind first."""
    most = {kind: max(rank.get(kind, 0) for rank in ranks) for rank in ranks for kind in rank}
    kinds = sorted(filter(most.__getitem__, most), key=most.__getitem__, reverse=True)
    return {kind.replace("_", " "): [(rank.get(kind, 0),) for rank in ranks] for kind in kinds}


def rank_table(corner: str, rows: Mapping[str, Sequence[Cell]], apart: float) -> list[str]:
    """Return a Markdown table with a column for each rank; ranks that nearly agree share the column of the fullest.

    Args:
        rows: by label, a cell for each rank.
        apart: ranks agree if each of their sizes differs by at most this share of it, or by at most a tenth of this
            share of the largest size in the table.
    """
    columns = list(zip(*rows.values(), strict=True))
    least = apart / 10 * max((value for column in columns for cell in column for value in _sizes(cell)), default=0)
    groups: list[list[int]] = []
    for rank, column in enumerate(columns):
        for group in groups:
            if all(_agree(a, b, apart, least) for a, b in zip(columns[group[0]], column, strict=True)):
                group.append(rank)
                break
        else:
            groups.append([rank])
    fullest = {max(group, key=lambda rank: _total(columns[rank])): group for group in groups}
    by_size = sorted(fullest, key=lambda rank: _total(columns[rank]), reverse=True)
    chosen = list(dict.fromkeys([*by_size[:3], by_size[-1], *fullest]))[:_MOST_COLUMNS]
    chosen.sort(key=lambda rank: fullest[rank][0])
    lines = [row(corner, *(listed(fullest[rank]) for rank in chosen)), row("---", *["---:"] * len(chosen))]
    lines += [row(label, *(_show(cells[rank]) for rank in chosen)) for label, cells in rows.items()]
    if len(chosen) < len(groups):
        lines += ["", f"Of {len(groups)} kinds of ranks the fullest, the emptiest and the first are shown."]
    return lines


def describe_plan(shards: Iterable[Shard]) -> list[str]:
    """Return a line for each table: its sharding type, and the rows and columns on each rank."""
    return [f"{table} {kind} ({kernel}): {where}" for (table, kind, kernel), where in placements(shards).items()]


def few_lines(lines: list[str]) -> list[str]:
    """Return the first lines, long ones cut, and a count of the others; a plan may have 1,000 tables or ranks."""
    short = [line if len(line) < 240 else f"{line[:200]} … ({line.count('; ') + 1} pieces)" for line in lines]
    return short if len(lines) <= _SHOWN_LINES else [*short[:_SHOWN_LINES], f"… and {len(lines) - _SHOWN_LINES} more"]


def _sizes(cell: Cell) -> list[int]:
    return [] if isinstance(cell, str) else [value for value in cell if value is not None]


def _total(column: Sequence[Cell]) -> int:
    return sum(sum(_sizes(cell)) for cell in column)


def _agree(a: Cell, b: Cell, apart: float, least: float) -> bool:
    if isinstance(a, str) or isinstance(b, str) or None in (*a, *b):
        return a == b
    pairs = zip(_sizes(a), _sizes(b), strict=True)
    return all(abs(x - y) <= max(least, apart * max(x, y)) for x, y in pairs)


def _show(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return size(cell[0]) + "".join(f" ({size(other)})" for other in cell[1:])
