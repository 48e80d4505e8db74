"""Names that a layer of a config removes from those below: `features.hour=null`, to see what a feature is worth."""

from collections.abc import Sequence
from typing import Any

from recsys.errors import UserError, nearest

_SECTIONS = ("features",), ("tables",), ("data", "labels")


def without_removed(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the layers of a config, of which later ones win, without the names that one sets to null.

    Features, tables and labels can be removed. A layer above the null may define the name again.

    Raises:
        UserError: no layer below the null has the name.
    """
    kept: list[dict[str, Any]] = []
    for layer in layers:
        above = layer
        for section in _SECTIONS:
            if removed := [name for name, value in _content(layer, section).items() if value is None]:
                below = {name for other in kept for name in _content(other, section)}
                _check_removed(".".join(section), removed, below)
                kept = [_without(other, section, removed) for other in kept]
                above = _without(above, section, removed)
        kept.append(above)
    return kept


def _content(layer: dict[str, Any], section: tuple[str, ...]) -> dict[Any, Any]:
    content: Any = layer
    for key in section:
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def _without(layer: dict[str, Any], section: tuple[str, ...], names: list[Any]) -> dict[str, Any]:
    key, *inner = section
    content = layer.get(key)
    if not isinstance(content, dict):
        return layer
    if inner:
        return {**layer, key: _without(content, tuple(inner), names)}
    return {**layer, key: {name: value for name, value in content.items() if name not in names}}


def _check_removed(section: str, removed: list[Any], below: set[Any]) -> None:
    known = sorted(map(str, below))
    for name in removed:
        if name not in below:
            raise UserError(
                f"config key '{section}.{name}' must be a section of keys, found null, which removes an entry of this "
                f"name from the file or its base; there is none{nearest(str(name), known, f'{section}.')} "
                f"(known: {', '.join(known) or 'none'})"
            )
