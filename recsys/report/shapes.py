"""Shapes of the values that pages read from a run's JSON files, because edited files may hold something else.

A shape is a type (float: any number), None, a tuple of alternative shapes, a list with one shape for all values or one
for each, or a mapping of names to shapes. A name with `?` is optional; `str` stands for any name.
"""

import json
import math
from typing import Any

FIGURE = (float, None)
_METRICS = {str: FIGURE}
_BYTES = {"measured_bytes": FIGURE, "predicted_bytes": FIGURE}
_SHARD = {"table": str, "rank": int, "size": [int, int], "sharding_type": str, "compute_kernel": str}
_SPAN = {"phase": str, "start_s": float, "stop_s": float, "peak_bytes": float}
_STAGE = {"metrics": _METRICS, "test": (_METRICS, None)}

ID_FIGURES = {
    **dict.fromkeys(("ids?", "nulls?", "rows?", "occupancy?", "out_of_vocabulary_share?"), FIGURE),
    **dict.fromkeys(("distinct_ids", "collision_rate"), float),
}
RESULT = {
    "status": str,
    "steps": int,
    "metrics?": {str: _METRICS},
    "best_step?": (int, None),
    **dict.fromkeys(("samples_per_s", "wait_share", "seconds"), float),
    "data?": {"ids?": {str: ID_FIGURES}, "experts?": {str: {str: {"lookups": float, "share": float}}}},
    "versions?": {str: (str, None)},
}
COMPRESSION = {"data": str, "stages": [_STAGE]}
PLAN = {"shards": [_SHARD]}
ENDING = {"identity": {"rank": int, "status": str}}
MEMORY = {
    "identity": {"rank": int, "status": str, "step": int, "device": str, "world_size": int, "versions?": {str: str}},
    "peak": {"measured_bytes": float, "predicted_bytes": float, "by_kind_predicted": {str: float}},
    "phases": {str: _BYTES},
    "lines": [{"kind": str, **_BYTES}],
    "timeline": {"samples": [[float, float]], "spans": [_SPAN]},
    "host": {"baseline_bytes": float},
    "tables": [{"name": str, "data_type": str, "measured": {str: float}}],
}


def misfit(value: Any, shape: Any, place: str = "it") -> str:
    """Return a message on the first part of a value that does not have its shape; empty if all parts have.

    Args:
        place: what the message calls the value, such as metrics.valid.auc.
    """
    problem = ""
    for choice in shape if isinstance(shape, tuple) else (shape,):
        if not (of_choice := _misfit(value, choice, place)):
            return ""  # without messages on other choices, since a long run has millions of figures
        problem = problem or of_choice
    return problem


def _misfit(value: Any, shape: Any, place: str) -> str:
    if isinstance(shape, dict) and isinstance(value, dict):
        missing = [name for name in shape if name is not str and not name.endswith("?") and name not in value]
        if missing:
            return f"{place} lacks {missing[0]}"
        shapes = {name: shape.get(name, shape.get(f"{name}?", shape.get(str))) for name in value}
        items = [(value[name], inner, name) for name, inner in shapes.items() if inner is not None]
    elif isinstance(shape, list) and isinstance(value, list) and len(shape) in (1, len(value)):
        shapes_of_values = shape * len(value) if len(shape) == 1 else shape
        items = [(item, inner, str(i)) for i, (item, inner) in enumerate(zip(value, shapes_of_values, strict=True))]
    else:
        return "" if _is_plain(value, shape) else f"{place} is {json.dumps(value)[:40]}, but must be {_word(shape)}"
    below = "" if place == "it" else f"{place}."
    return next(filter(None, (misfit(item, inner, f"{below}{name}") for item, inner, name in items)), "")


def _is_plain(value: Any, shape: Any) -> bool:
    if shape is float:
        return type(value) in (int, float) and math.isfinite(value)
    return value is None if shape is None else type(value) is shape


def _word(shape: Any) -> str:
    if isinstance(shape, dict):
        return "names with their values"
    if isinstance(shape, list):
        return "a list" if len(shape) == 1 else f"a list of {len(shape)}"
    return {int: "a whole number", float: "a number", str: "text", None: "null"}[shape]
