"""Bounds of numbers, declared with the keys that they are for."""

import dataclasses
from typing import Any

from recsys.errors import UserError

MOST = 2**63 - 1  # of 64 bits
LARGE = 1e30  # still finite in FP32


def bounded(default: Any, least: float, most: float = MOST, below: float | None = None) -> Any:
    """Return a dataclass field for a number, a list of numbers or null, within bounds that `check_bounds` checks.

    Args:
        least, most: inclusive bounds. below: exclusive upper bound, instead of `most`.
    """
    metadata = {"bounds": (least, most, below)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_bounds(section: Any, key: str = "") -> None:
    """Refuse a number outside the bounds of its field, in a dataclass and all dataclasses below it.

    Args:
        key: of the section, in front of the names of its fields.

    Raises:
        UserError: names the key, the bound and the number.
    """
    for field in dataclasses.fields(section):
        value, full = getattr(section, field.name), f"{key}.{field.name}" if key else field.name
        if "bounds" in field.metadata:
            for number in value if isinstance(value, list) else [value]:
                check_number(full, number, *field.metadata["bounds"])
        elif dataclasses.is_dataclass(value):
            check_bounds(value, full)
        elif isinstance(value, dict):
            for name, entry in value.items():
                if dataclasses.is_dataclass(entry):
                    check_bounds(entry, f"{full}.{name}")


def check_number(key: str, number: float | None, least: float, most: float = MOST, below: float | None = None) -> None:
    """Raise a UserError unless a number is null or within its bounds; NaN is within none."""
    if number is None or (least <= number <= most and (below is None or number < below)):
        return
    upper = f"at most {most}" if below is None else f"below {below}"
    bound = upper if number >= least else f"at least {least}"
    raise UserError(f"config key '{key}' must be {bound}, found {number}")
