"""Values of keys: as YAML and JSON hold them, and in `key=value`, with texts in quotes and comments refused."""

import dataclasses
import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


def as_value(text: object) -> str:
    """Return a text, such as a path, as the value of a `key=value`: in quotes if YAML would read something else."""
    return str(text) if _read(str(text)) == str(text) else json.dumps(str(text), ensure_ascii=False)


def plain(value: Any) -> Any:
    """Return dataclasses as mappings and enums as names, a hundred times as fast as through OmegaConf."""
    if dataclasses.is_dataclass(value):
        keys = [key.name for key in dataclasses.fields(value) if not key.metadata.get("omegaconf_ignore")]
        return {key: plain(getattr(value, key)) for key in keys}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their full keys; a list is one value."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from flat(f"{key}.{name}" if key else str(name), item)
    else:
        yield key, value


def refuse_comment(value: str) -> None:
    """Raise a ValueError if a value has a comment, as a path does with a blank before a `#`."""
    for sign in re.finditer(r"(^|\s)#", value):
        if _read(value[: sign.start()]) == _read(value):
            comment = value[sign.start() :].strip()
            raise ValueError(f"'{comment}' would be a comment; put the value in quotes of its own, '\"…\"'")


def _read(value: str) -> Any:
    """Return what a value is read as; for invalid YAML an exception, which equals nothing else."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"key={value}"]))["key"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        return error
