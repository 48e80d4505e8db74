"""A config that `recsys inspect` writes trains, whatever columns a log has.

RANDOM_SEEDS=100-130 pytest -m slow tests/datasets/test_inspect_random.py    # others than the first few
"""

import os
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import random_files
from launch import must_train, run_recsys

first, _, last = os.environ.get("RANDOM_SEEDS", "0-4").partition("-")
SEEDS = range(int(first), int(last or first) + 1)
NAMES = [
    "user_id",
    "user",
    "user.id",
    "item",
    "some name",
    "x.y",
    "ts",
    "day",
    "created_at",
    "clicked2",
    "weird-ä",
    "on",
]
NAMES += ["null", "1st", "a" * 120, "col'q", 'd"q', "-x", "line\nbreak", "weight", "ä" * 80]
Draw = np.random.Generator


def lists(draw: Draw, n: int, values: np.ndarray) -> list[list[object]]:
    return [draw.choice(values, draw.integers(0, 6)).tolist() for _ in range(n)]


KINDS: dict[str, Callable[[Draw, int], pa.Array]] = {
    "flag": lambda draw, n: pa.array(draw.integers(0, 2, n)),
    "few": lambda draw, n: pa.array(draw.integers(-5, 50, n), pa.int16()),
    "wide": lambda draw, n: pa.array(draw.integers(-(2**62), 2**62, n)),
    "unsigned": lambda draw, n: pa.array(draw.integers(2**63, 2**64, n, dtype=np.uint64)),
    "halves": lambda draw, n: pa.array(draw.normal(size=n).astype(np.float16)),
    "far": lambda draw, n: pa.array(draw.normal(size=n) * 1e6),
    "odd": lambda draw, n: pa.array(
        np.where(draw.random(n) < 0.1, [np.nan], np.where(draw.random(n) < 0.1, [np.inf], 1))
    ),
    "pandas": lambda draw, n: pa.array(draw.integers(0, 99, n).astype(float), mask=draw.random(n) < 0.1),
    "texts": lambda draw, n: pa.array([f"s{i}" for i in draw.integers(0, 1000, n)], mask=draw.random(n) < 0.1),
    "unique": lambda draw, n: pa.array([f"{i:x}" for i in draw.integers(0, 2**62, n)]),
    "bool": lambda draw, n: pa.array(draw.random(n) < 0.3),
    "moment": lambda draw, n: pa.array(draw.integers(17 * 10**11, 171 * 10**10, n), pa.timestamp("ms", "Asia/Tokyo")),
    "far moment": lambda draw, n: pa.array(draw.integers(0, 253_402_214_400_000_000, n), pa.timestamp("us")),
    "date": lambda draw, n: pa.array(draw.integers(19000, 19030, n), pa.int32()).cast(pa.date32()),
    "written date": lambda draw, n: pa.array([f"2026-11-{i:02}" for i in draw.integers(1, 28, n)]),
    "seconds": lambda draw, n: pa.array(draw.integers(1_700_000_000, 1_710_000_000, n)),
    "hour": lambda draw, n: pa.array(draw.integers(0, 86400, n), pa.int32()).cast(pa.time32("s")),
    "duration": lambda draw, n: pa.array(draw.integers(0, 86400, n), pa.duration("s")),
    "decimal": lambda draw, n: pa.array([Decimal(int(i)).scaleb(-2) for i in draw.integers(0, 99999, n)]),
    "list": lambda draw, n: pa.array(lists(draw, n, np.arange(50)), pa.list_(pa.int64())),
    "list of texts": lambda draw, n: pa.array(lists(draw, n, np.array(["a", "b", "c"])), pa.large_list(pa.string())),
    "vector": lambda draw, n: pa.FixedSizeListArray.from_arrays(pa.array(draw.normal(size=n * 8)), 8),
    "ragged": lambda draw, n: pa.array(lists(draw, n, draw.normal(size=9)), pa.list_(pa.float32())),
    "struct": lambda draw, n: pa.array([{"os": f"o{i}", "n": int(i)} for i in draw.integers(0, 9, n)]),
    "structs": lambda draw, n: pa.array([[{"id": i}] * (i % 3) for i in draw.integers(0, 9, n).tolist()]),
    "map": lambda draw, n: pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
    "lists": lambda draw, n: pa.array([[[1, 2], [3]]] * n),
    "null": lambda draw, n: pa.nulls(n),
    "bytes": lambda draw, n: pa.array([bytes([i]) * 16 for i in draw.integers(0, 99, n).tolist()], pa.binary(16)),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_config_of_any_columns_trains(seed: int, tmp_path: Path) -> None:
    dice, draw = random.Random(seed), np.random.default_rng(seed)
    kinds = dict(zip(dice.sample(NAMES, dice.randint(2, 9)), dice.choices(list(KINDS), k=9)))  # noqa: B905
    for part in range(dice.choice([1, 2, 3])):
        n = dice.choice([300, 1500])
        columns = {name: KINDS[kind](draw, n) for name, kind in kinds.items()}
        table = pa.table({**columns, "id": draw.integers(0, 20, n), "label": draw.integers(0, 2, n)})
        if part and dice.random() < 0.5:
            table = table.drop_columns([dice.choice([*kinds, "label"])])
        random_files.write(tmp_path / f"logs/part={part}/a.parquet", table, [n // 2, n - n // 2], dice)
    config = tmp_path / "my.yaml"
    print(kinds, run_recsys("inspect", tmp_path / "logs", "--label", "label", "--out", config), config.read_text())
    few = ["train.max_steps=3", "train.global_batch_size=64", f"run.dir={tmp_path / 'run'}"]
    must_train(str(config), *few, "train.early_stop.metric=null", nproc=dice.choice([1, 2]))
