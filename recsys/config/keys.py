"""Keys of the sections of a config, and what a key that is not among them may have been meant to be."""

import dataclasses
import inspect
import re
import types
import typing
from functools import cache
from typing import Any

from recsys.config.model import MODELS, find_model
from recsys.config.schema import Config
from recsys.errors import nearest

_UNIONS = (types.UnionType, typing.Union)  # `int | None` and `Optional[int]`, which are one from Python 3.14 on


@cache
def fields_of(expected: Any, model: type | None) -> dict[str, Any]:
    """Return name → type of the keys under a dataclass, its own before those of its base classes.

    The type of `model` is the one that its name selects.
    """
    expected = required_type(expected)
    hints = typing.get_type_hints(expected) if dataclasses.is_dataclass(expected) else {}
    own = inspect.get_annotations(expected) if hints else {}
    keys = sorted(dataclasses.fields(expected), key=lambda field: field.name not in own) if hints else []
    fields = {field.name: hints[field.name] for field in keys if not field.metadata.get("omegaconf_ignore")}
    return fields | {"model": model or dict} if expected is Config else fields


def required_type(expected: Any) -> Any:
    """Return the type of a value that may also be null."""
    choices = [choice for choice in typing.get_args(expected) if choice is not type(None)]
    return choices[0] if typing.get_origin(expected) in _UNIONS and len(choices) == 1 else expected


def unknown_key(parent: str, name: str, allowed: list[str], model: type | None) -> str:
    """Return a sentence on a key that its section does not have, with the key that may be meant.

    Args:
        parent: the section, with dots; empty for the whole config. allowed: its keys. model: type of section `model`.
    """
    prefix = f"{parent}." if parent else ""
    others = _models_with(name) if parent == "model" else []
    about = f"; of other models, {', '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else ""
    hint = _hint(prefix, name, allowed, is_spelt=bool(others))
    elsewhere = [key for key in _all_keys() if key.rpartition(".")[2] == name]
    hint = f"; did you mean '{elsewhere[0]}'?" if elsewhere and not hint else hint
    word, *rest = re.split("([.:])", name, maxsplit=1)
    if rest and word in allowed:
        sections = f"; keys with dots are of the command line, and in a file it is '{word}: {{{rest[1]}: …}}'"
        hint = sections if rest[0] == "." else f"; YAML wants a blank behind the colon: '{word}: {rest[1]}'"
    of_model = f" of {getattr(model, 'name', model.__name__)}" if model and parent == "model" else ""
    where = f"under {parent}{of_model}" if parent else "at the top level"
    return f"config key '{prefix}{name}' is not known{about}{hint} (allowed {where}: {', '.join(allowed)})"


def _hint(prefix: str, name: str, allowed: list[str], is_spelt: bool) -> str:
    """Return a question for the key of a section that may be meant, or an empty string.

    Args:
        is_spelt: the name is no misspelt one, so keys of nearly the same letters are not meant.
    """
    longer = [key for key in allowed if key.endswith(f"_{name}")]  # batch_size of global_batch_size
    shorter = [key for key in allowed if name.endswith(f"_{key}")]  # mlp of top_mlp
    close = "" if is_spelt or longer else nearest(name, allowed, prefix)
    return close or next((f"; did you mean '{prefix}{key}'?" for key in longer + shorter), "")


def _models_with(key: str) -> list[str]:
    return [name for name in MODELS if key in fields_of(find_model(name).Config, None)]


def _all_keys(expected: Any = Config, prefix: str = "") -> list[str]:
    fields = fields_of(expected, None)
    return [key for name in fields for key in (prefix + name, *_all_keys(fields[name], f"{prefix}{name}."))]
