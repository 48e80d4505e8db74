"""Write docs/config.md, every key of a config, from the dataclasses that declare them.

    python scripts/config_reference.py

A key's type, default and bounds are those of its field, and its meaning is the comment next to the field.
`tests/docs/test_config_reference.py` holds the page to the code.
"""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator
from enum import Enum
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens
from types import NoneType
from typing import Any

from omegaconf import MISSING

from recsys.config.bounds import LARGE, MOST
from recsys.config.model import MODELS, find_model
from recsys.config.schema import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
_HEAD = """# Config keys

<!-- Written by scripts/config_reference.py from the code that reads a config: change the comments there, not this. -->

Every key with its type, default and meaning. A key is written in YAML, or on the command line as `key=value`. `NAME` is
a name of your own: of a feature, a table or a label. `null` means that nothing is set; *required* keys have no default.
"""
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "–"}
_OPEN = min(2**62, LARGE, MOST)  # bounds of this size or more are not shown


def page() -> str:
    """Return the whole page as Markdown."""
    sections = sections_of(Config)
    models = {f"model ({name})": find_model(name).Config for name in MODELS}
    parts = [_HEAD, *(_section(key or "CONFIG.yaml", section) for key, section in sections.items())]
    parts.append("## Models\n\nThe section `model` has the keys of the model that `model.name` names.\n")
    parts += [_section(key, section, "###") for key, section in models.items()]
    choices = {kind.__name__: kind for part in [*sections.values(), *models.values()] for kind in _choices_of(part)}
    parts.append("## Choices\n")
    parts += [f"### {name}\n\n{_choice(kind)}\n" for name, kind in sorted(choices.items())]
    return "\n".join(parts)


def sections_of(section: type, key: str = "") -> dict[str, type]:
    """Return a dataclass, by `key`, and those nested in it, by the keys of their sections."""
    sections = {key: section}
    for field, kind in _fields(section):
        nested = next((part for part in _parts(kind) if dataclasses.is_dataclass(part)), None)
        if nested is not None and (key, field.name) != ("tables.NAME", "optimizer"):  # same keys as optimizer.tables
            name = f"{field.name}.NAME" if typing.get_origin(kind) is dict else field.name
            sections |= sections_of(typing.cast(type, nested), f"{key}.{name}" if key else name)
    return sections


def _fields(section: type) -> Iterator[tuple[Any, Any]]:
    """Yield the fields of a dataclass that are keys, with their types."""
    kinds = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        if not field.metadata.get("omegaconf_ignore"):
            yield field, kinds[field.name]


def _parts(kind: Any) -> list[Any]:
    """Return the types that a type is composed of: for `dict[str, X | None]` str and X."""
    arguments = [part for part in typing.get_args(kind) if part is not NoneType]
    return [leaf for part in arguments for leaf in _parts(part)] if arguments else [kind]


def _choices_of(section: type) -> Iterator[type[Enum]]:
    for _, kind in _fields(section):
        yield from (part for part in _parts(kind) if isinstance(part, type) and issubclass(part, Enum))


def _section(key: str, section: type, level: str = "##") -> str:
    """Return the heading, the text and the table of a section."""
    rows = [
        f"| `{field.name}` | {_kind(field, kind)} | {_default(field)} | {meaning} |"
        for field, kind, meaning in described(section)
        if not (key.startswith("model (") and field.name == "name")
    ]
    table = ["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows]
    title = key.removeprefix("model (").removesuffix(")")
    return "\n".join([f"{level} `{title}`\n", f"{_text(section)}\n", *(table if rows else ["No keys of its own."]), ""])


def described(section: type) -> Iterator[tuple[Any, Any, str]]:
    """Yield the keys of a section, its own before those of its base classes: field, type, and meaning.

    The meaning is the comment next to the field, in this class or a base class, or else the first line of the docstring
    of its type.
    """
    by_class = [_comments(base) for base in section.__mro__]
    comments = {name: text for texts in reversed(by_class) for name, text in texts.items() if text}
    own_first = sorted(_fields(section), key=lambda key: [key[0].name in texts for texts in by_class].index(True))
    for field, kind in own_first:
        named = next((part for part in _parts(kind) if dataclasses.is_dataclass(part) or issubclass(part, Enum)), None)
        meaning = comments.get(field.name) or (
            re.sub("^Section `.*?`: ", "", _text(named).partition("\n")[0]) if named else ""
        )
        yield field, kind, (meaning[:1].upper() + meaning[1:]).replace("|", "\\|")


def _text(documented: type) -> str:
    """Return a docstring without the sections that are only for readers of the code."""
    text = inspect.getdoc(documented) or ""
    return text.partition("\nAttributes:")[0].strip()


def _comments(section: type) -> dict[str, str]:
    """Return for each field the comments above it and at the end of its lines, as one text."""
    if section.__module__ == "builtins":
        return {}
    source = textwrap.dedent(inspect.getsource(section))
    comments = {
        t.start[0]: t.string[1:].strip() for t in generate_tokens(StringIO(source).readline) if t.type == COMMENT
    }
    (body,) = ast.parse(source).body
    texts, after = {}, 0
    for statement in typing.cast(ast.ClassDef, body).body:
        last = typing.cast(int, statement.end_lineno)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            lines = [comments[number] for number in range(after + 1, last + 1) if number in comments]
            texts[statement.target.id] = " ".join(lines)
        after = last
    return texts


def _kind(field: Any, kind: Any) -> str:
    """Return the type of a field in words, with its bounds."""
    words = [_word(part) for part in _parts(kind)]
    containers = [typing.get_origin(part) for part in (kind, *typing.get_args(kind))]
    text = f"mapping, name: {words[-1]}" if dict in containers else words[0]
    text = f"list of {text}{'' if text.startswith('[') else 's'}" if list in containers else text
    return f"{text}{_bounds(*field.metadata['bounds'])}" if "bounds" in field.metadata else text


def _word(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return "section" if dataclasses.is_dataclass(kind) else _KINDS[kind]


def _bounds(least: float, most: float, below: float | None) -> str:
    if below is not None and below < LARGE:
        return f", {least:,} to below {below:,}"
    if most < _OPEN:
        return f", {least:,} to {int(most) if most == int(most) else most:,}"
    return f", at least {least:,}" if least > -LARGE else ""


def _default(field: Any) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value == MISSING:
        return "*required*"
    if dataclasses.is_dataclass(value) or value in ({}, []):
        return ""
    if isinstance(value, list):
        return f"`[{', '.join(_written(part) for part in value)}]`"
    return f"`{_written(value)}`"


def _written(value: Any) -> str:
    """Return a value in YAML."""
    if isinstance(value, Enum):
        return value.name
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _choice(kind: type[Enum]) -> str:
    names = ", ".join(f"`{member.name}`" for member in kind)
    return f"{names}\n\n{_text(kind)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
