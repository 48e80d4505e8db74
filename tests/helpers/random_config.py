"""Any value of any key gives a config, or one sentence that names the key; and nothing is written anywhere."""

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

import pytest
import yaml
from launch import ROOT

from recsys.config import Config, config_text, load_config
from recsys.config.model import find_model
from recsys.errors import UserError

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


def keys(kind: Any, section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every key of a dataclass with its type; of mappings those of a section's names, and of a name that is new.

    Args:
        section: what a config file has there.
    """
    for name, hint in typing.get_type_hints(kind).items():
        if name == "given" or typing.get_origin(hint) is typing.ClassVar:  # no key
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
    """Return a value for a key: any, or one of its choices."""
    choices = list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []
    return dice.choice(choices) if choices and dice.random() < 0.3 else dice.choice(VALUES)


def write(folder: Path, dice: random.Random) -> tuple[list[str], list[tuple[str, ...]]]:
    """Write a config with some keys changed, here or on the command line; return this, and the keys."""
    base = dice.choice([RANKER, TOWERS])
    content, overrides, paths = copy.deepcopy(base), [], []
    for path, kind in dice.sample(list(keys(Config, base)), dice.choice((1, 1, 1, 2, 3))):
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


def attempt(folder: Path, dice: random.Random) -> tuple[list[str], set[str]] | None:
    """Load a random config, and return its overrides and the keys that were changed; None where it is refused.

    Then a sentence names one of these.
    """
    overrides, paths = write(folder, dice)
    try:
        config = load_config(folder / "c.yaml", overrides)
    except UserError as error:
        said = str(error)
        assert said.isprintable() and len(said) < 1000, said
        # Of a table or feature that is new, another key may be missing.
        named = [path for path in paths if path[-1] in said or ("new" in path and f"{path[0]}.new" in said)]
        assert named or "is not readable YAML" in said or "never" in said, said
        return None
    (folder / "saved.yaml").write_text(config_text(config))
    assert load_config(folder / "saved.yaml") == config
    return overrides, {".".join(path) for path in paths}


def attempts(folder: Path, seed: int, count: int) -> None:
    bad = []
    for number in range(count):
        try:
            attempt(folder, random.Random(f"{seed} {number}"))
        except Exception as error:
            bad.append(f"{seed} {number}: {type(error).__name__}: {error}")
    assert not bad, "\n".join(bad)
    assert {path.name for path in folder.iterdir()} <= {"c.yaml", "saved.yaml"}


def test_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attempts(tmp_path, 1, 120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 32))
def test_thousands(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attempts(tmp_path, seed, 150)
