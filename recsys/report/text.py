"""Sizes, times, lists of ranks and placements of tables as texts for people."""

from collections.abc import Iterable
from typing import Any

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: float | None) -> str:
    """Return bytes with three digits in a suitable unit, or a dash for None."""
    if not num_bytes:
        return "–" if num_bytes is None else "0"
    power = min(len(_UNITS) - 1, max(0, int(abs(num_bytes)).bit_length() - 1) // 10)
    number = num_bytes / 1024**power
    is_whole = power == 0 and number == int(number)  # a mean of bytes may have a fraction
    digits = 0 if is_whole or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:,.{digits}f} {_UNITS[power]}"


def number(value: float | None) -> str:
    """Return a figure of a run with about four digits, or a dash for None."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 0.01:
        return f"{value:.3g}"
    if abs(value) >= 1e9:  # such as the loss of a run that diverges, whose digits would be wider than a phone
        return f"{value:.4g}"
    return f"{value:,.{4 if abs(value) < 10 else 2 if abs(value) < 1000 else 0}f}"


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


def placements(shards: Iterable[Any]) -> dict[tuple[str, str, str], str]:
    """Return a text on which ranks hold the shards of each table, by table, sharding type and compute kernel.

    Args:
        shards: with the attributes of `recsys.tables.spec.Shard`.
    """
    tables: dict[tuple[str, str, str], dict[int, list[str]]] = {}
    for shard in shards:
        ranks = tables.setdefault((shard.table, shard.sharding_type, shard.compute_kernel), {})
        ranks.setdefault(shard.rank, []).append(f"{shard.size[0]:,} × {shard.size[1]}")
    places = {}
    for table, ranks in tables.items():
        alike: dict[str, list[int]] = {}
        for rank, sizes in ranks.items():
            alike.setdefault(" and ".join(sizes), []).append(rank)
        places[table] = "; ".join(f"{sizes} on {listed(holders)}" for sizes, holders in alike.items())
    return places


def duration(seconds: float) -> str:
    """Return a duration in words: 8.5 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)  # before the division, so that neither minutes nor seconds are 60
    minutes, hours = rounded // 60 % 60, rounded // 3600
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rounded % 60} s"
