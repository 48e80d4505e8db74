"""Parts of memory pages in Markdown: sizes, and tables whose columns are ranks that are alike."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recsys.tables.spec import Shard

Cell = tuple[int | None, ...] | str  # bytes, or bytes measured and predicted; or text

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_MOST_COLUMNS = 8


def row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def size(num_bytes: int | None) -> str:
    """Return bytes with three digits in the unit that suits; a dash for None."""
    if not num_bytes:
        return "–" if num_bytes is None else "0"
    power = min(len(_UNITS) - 1, (abs(num_bytes).bit_length() - 1) // 10)
    number = num_bytes / 1024**power
    digits = 0 if power == 0 or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:,.{digits}f} {_UNITS[power]}"


def when(peak: Mapping[str, Any]) -> str:
    """Return phase and step of a peak, for people."""
    return f"step {peak['step']}" if peak["phase"] == "step" else f"{peak['phase']} at step {peak['step']}"


def listed(numbers: Iterable[int], noun: str = "rank") -> str:
    """Return ranks as `rank 0` or `ranks 0-3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{noun}{'s' if sum(map(len, runs)) > 1 else ''} {shown}"


def kind_rows(ranks: Sequence[Mapping[str, int]]) -> dict[str, list[Cell]]:
    """Return rows for `rank_table`: bytes of each rank by kind, the largest kind first."""
    most = {kind: max(rank.get(kind, 0) for rank in ranks) for rank in ranks for kind in rank}
    kinds = sorted(filter(most.__getitem__, most), key=most.__getitem__, reverse=True)
    return {kind.replace("_", " "): [(rank.get(kind, 0),) for rank in ranks] for kind in kinds}


def rank_table(corner: str, rows: Mapping[str, Sequence[Cell]], apart: float) -> list[str]:
    """Return a Markdown table with a column for each rank; ranks that nearly agree share that of the fullest.

    Args:
        rows: by label, a cell for each rank.
        apart: ranks agree where each of their sizes differs by no more than this share of it, or by a tenth of that
            share of the table's largest.
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
    tables: dict[str, dict[int, list[str]]] = {}
    for shard in shards:
        ranks = tables.setdefault(f"{shard.table} {shard.sharding_type} ({shard.compute_kernel})", {})
        ranks.setdefault(shard.rank, []).append(f"{shard.size[0]:,} × {shard.size[1]}")
    lines = []
    for head, ranks in tables.items():
        alike: dict[str, list[int]] = {}
        for rank, sizes in ranks.items():
            alike.setdefault(" and ".join(sizes), []).append(rank)
        lines.append(f"{head}: " + "; ".join(f"{sizes} on {listed(ranks)}" for sizes, ranks in alike.items()))
    return lines


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
