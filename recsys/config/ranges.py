"""Ranges in names: `C{1..26}` stands for C1 to C26, expanded before anything is checked or merged.

Ranges do not depend on the data, so a config means the same wherever it is read; a saved one has every name.
"""

import re
from typing import Any

from recsys.errors import UserError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SECTIONS = ("features", "tables")
_MOST_NAMES = 10_000


def without_ranges(layer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a config layer as layers without ranges; later ones win.

    A name with a range in `features` and `tables` is replaced by its names, in place. A range in the values under such
    a name is counted along, so that `C{1..3}: {table: T{1..3}}` gives C2 the table T2. Names that are written out,
    wherever they stand, win over ranges, and later ranges over earlier ones. Ranges in lists of `model` are expanded.

    Raises:
        UserError: a range counts down, has too many numbers, or not as many as that of its name.
    """
    order: dict[str, Any] = {}
    ranged: list[dict[str, Any]] = []
    plain = dict(layer)
    for section in _SECTIONS:
        content = layer.get(section)
        if not isinstance(content, dict) or not any(_has_range(name) for name in content):
            continue
        order[section] = {entry: {} for name in content for entry in _names(f"{section}.{name}", name)}
        plain[section] = {name: value for name, value in content.items() if not _has_range(name)}
        for name, value in content.items():
            if _has_range(name):
                names = _names(f"{section}.{name}", name)
                values = (_taken(f"{section}.{name}", value, i, len(names)) for i in range(len(names)))
                ranged.append({section: dict(zip(names, values, strict=True))})
    model = layer.get("model")
    if isinstance(model, dict):
        plain["model"] = {
            key: [name for item in value for name in _names(f"model.{key}", item)] if isinstance(value, list) else value
            for key, value in model.items()
        }
    return [entry for entry in (order, *ranged, plain) if entry]


def expand_override(text: str) -> list[str]:
    """Return the overrides that a `key=value` with a range in its key stands for."""
    return _names(text, text) if _has_range(text.partition("=")[0]) else [text]


def _has_range(text: Any) -> bool:
    return isinstance(text, str) and _RANGE.search(text) is not None


def _names(key: str, text: Any) -> list[str]:
    """Return the names that a text stands for: itself, if it has no range."""
    first = _RANGE.search(text) if isinstance(text, str) else None
    count = 1 if first is None else len(_numbers(key, first))
    return [_taken(key, text, i, count) for i in range(count)]


def _numbers(key: str, match: re.Match[str]) -> range:
    first, last = int(match[1]), int(match[2])
    if not first <= last < first + _MOST_NAMES:
        raise UserError(f"config key '{key}': {match[0]} must count up, over {_MOST_NAMES:,} numbers at most")
    return range(first, last + 1)


def _taken(key: str, value: Any, index: int, count: int) -> Any:
    """Return a value with each range in it, however deep, replaced by its number at `index`."""

    def number(match: re.Match[str]) -> str:
        numbers = _numbers(key, match)
        if len(numbers) != count:
            raise UserError(
                f"config key '{key}': {match[0]} has {len(numbers)} numbers, and the first range {count}; ranges that "
                f"go together have equally many"
            )
        width = len(match[1]) if match[1].startswith("0") else 0  # {01..12} is 01, 02 …
        return str(numbers[index]).zfill(width)

    if isinstance(value, dict):
        return {name: _taken(key, item, index, count) for name, item in value.items()}
    if isinstance(value, list):
        return [_taken(key, item, index, count) for item in value]
    return _RANGE.sub(number, value) if isinstance(value, str) else value
