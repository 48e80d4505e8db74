"""Draws random configs: any value for any key, any name for a table, feature or column, and any number of rows."""

import copy
import dataclasses
import datetime
import math
import random
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from launch import ROOT

from recsys.config import Config
from recsys.config.model import find_model

SAMPLE = str(ROOT / "data" / "sample" / "{}")
RANKER = yaml.safe_load((ROOT / "configs" / "dlrm_sample.yaml").read_text())
RANKER["data"] |= {role: SAMPLE.format(role) for role in ("train", "valid", "test")}
RANKER["tables"]["user"] |= {"optimizer": {"name": "sgd"}}
TOWERS = {
    "data": {"train": SAMPLE.format("train"), "num_streams": 4},
    "features": {name: {"table": name} for name in ("user_id", "item_id")},
    "tables": {name: {"num_embeddings": 100, "embedding_dim": 8} for name in ("user_id", "item_id")},
    "model": {"name": "two_tower", "user_features": ["user_id"], "item_features": ["item_id"], "item_id": "item_id"},
    "train": {"global_batch_size": 256},
}

NESTED: list[Any] = []
for _ in range(60):
    NESTED = [NESTED]
VALUES = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**40, 2**63 - 1, 2**63, 10**21, -(2**63), -(10**30)),
    *(0.5, -0.0, 1.0, 1e-300, 1e29, 1e30, 1.8e308, -1.5, math.inf, -math.inf, math.nan),
    *("", " ", "x", "3", "1e3", "true", "null", "~", "items", "__class__", "nän", "用户", "x" * 5000),
    *("../../x", "/nowhere/x", "a/b", "*", "[", "a\nb", "\x07\x1b[31m", "a\0b", "\ud800"),
    *("${nothing}", "${oc.env:NO_SUCH_VARIABLE}", "${", "???", "%s{}", "-", "80GiB", "1e400GiB", "day >= 'x", "§"),
    *([], [[]], [1], [-1, 0], [0, None], [None, None], [None], ["a", 1], ["a\0b"], [math.nan, 1], [2**70], NESTED),
    *({}, {"a": 1}, {"items": {"keys": []}}, {"train": 1}, {1: 2}, {None: 1}, {"a.b": {}}, {"": 1}),
    *(datetime.date(2026, 11, 1), b"bytes"),
]
# Names of columns may be any of these; names of tables and features those before the name of 151 characters.
NAMES = [
    *("items", "type", "values", "keys", "float", "pop", "update", "training", "weight", "dense", "given", "copy"),
    *("null", "true", "1", "1e3", "0x1F", "_", "__class__", "a-b", "nän", "用户", "é" * 75, "x" * 150),
    *("x" * 151, "", " ", "a b", ".", "..", "a.b", "a/b", "-a", "a\nb", "C{1..2}", "${x}", "a=b", "🙂", "e\u0301"),
]
ROWS = [0, 1, 2, 3, 100, 257]


def keys(kind: Any, section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every key of a dataclass with its type; for mappings those for the names in `section`, and for a new name.

    Args:
        section: content of this section in a config file.
    """
    for name, hint in typing.get_type_hints(kind).items():
        if name in ("given", "expert_of") or typing.get_origin(hint) is typing.ClassVar:  # it is not a key
            continue
        found = hint
        if isinstance(hint, types.UnionType):
            (found,) = (part for part in typing.get_args(hint) if part is not type(None))
        below = section.get(name) or {} if isinstance(section, dict) else {}
        if name == "model" and kind is Config:
            found = find_model(below["name"]).Config
        yield (*path, name), found
        if dataclasses.is_dataclass(found):
            yield from keys(found, below, (*path, name))
        elif typing.get_origin(found) is dict:
            of = typing.get_args(found)[1]
            for own in (*below, "new"):
                yield (*path, name, own), of
                if dataclasses.is_dataclass(of):
                    yield from keys(of, below.get(own, {}), (*path, name, own))


def draw(kind: Any, dice: random.Random) -> Any:
    """Return a value for a key: any value, or one of its choices."""
    choices = list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []
    return dice.choice(choices) if choices and dice.random() < 0.3 else dice.choice(VALUES)


def named(base: dict[str, Any], dice: random.Random) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return a config in which some tables and features have other names, and the keys of these."""
    content, paths = copy.deepcopy(base), []
    for section in ("tables", "features"):
        old, new = dice.choice(list(content[section])), dice.choice(NAMES)
        if dice.random() < 0.85 or new in content[section]:
            continue
        content[section] = {new if name == old else name: value for name, value in content[section].items()}
        paths.append((section, new))
        if section == "tables":
            for feature in content["features"].values():
                if feature.get("table") == old:
                    feature["table"] = new
            continue
        content[section][new].setdefault("column", old)
        model = content["model"]
        for key, value in model.items():
            model[key] = new if value == old else [new if v == old else v for v in value] if value == [old] else value
    return content, paths


def write(folder: Path, dice: random.Random) -> tuple[list[str], list[tuple[str, ...]]]:
    """Write a config with some keys changed, there or on the command line; return the overrides, and these keys."""
    content, paths = named(dice.choice([RANKER, TOWERS]), dice)
    overrides = []
    for path, kind in dice.sample(list(keys(Config, content)), dice.choice((1, 1, 1, 2, 3)) - len(paths) // 2):
        value = draw(kind, dice)
        plain = isinstance(value, str) and dice.random() < 0.5
        if plain or dice.random() < 0.5:
            text = value if plain else yaml.dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n")
            overrides.append(f"{'.'.join(path)}={text.strip()}")
        else:
            section = content
            for name in path[:-1]:
                below = section.setdefault(name, {})
                section = below if isinstance(below, dict) else section.setdefault("never", {})
            section[path[-1]] = value
        paths.append(path)
    (folder / "c.yaml").write_text(yaml.dump(content))
    return overrides, paths


def write_data(folder: Path, dice: random.Random) -> list[str]:
    """Write some rows of the sample, with one column renamed; return the overrides that read these."""
    count, old, new = dice.choice([*ROWS, None, None, None]), dice.choice(["user_id", "item_id"]), dice.choice(NAMES)
    rows = pq.read_table(SAMPLE.format("train")).slice(0, count).rename_columns({old: new})
    pq.write_table(rows, folder / "rows.parquet", row_group_size=dice.choice([1, 50, 10_000]))
    column = yaml.dump(new, default_flow_style=True, width=math.inf, default_style='"').strip()
    return [f"data.train={folder}/rows.parquet", f"features.{old}.column={column}"]
