"""Runs of random configs and data: a seed determines sizes, types, models, ranks and settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

AFTER = range(100, 140)  # seeds that were chosen after predictions had been mended
_MOST_VALUES = 6_000_000  # in the data
_MOST_TABLE_NUMBERS = 120_000_000
_STEP_FLOPS, _RUN_FLOPS = 2e10, 2e11
_AUTOCAST_COST = 10  # on a CPU without instructions for it
_LIST_SHARE, _TEXT_SHARE = 0.2, 0.3


@dataclass
class RandomRun:
    """A config, data for it, and a number of ranks.

    Attributes:
        columns: name → kind of column ("int64", "string", "list<int64>", "list<string>", "float"), number of distinct
            ids to draw from, and length of the longest list.
        row_group_rows: rows of a row group; None: one row group per file, the default of pyarrow.
        num_items: size of a retrieval model's corpus, whose ids are 0 … num_items - 1.
    """

    seed: int
    nproc: int
    num_rows: int
    row_group_rows: int | None
    columns: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    num_items: int = 0

    def write(self, folder: Path) -> Path:
        """Write data and config into a folder; return the path of the config."""
        rng = np.random.default_rng((self.seed, 1))
        data: dict[str, Any] = {}
        names = [name for name in self.columns if name != "targets"]
        self._write_rows(folder / "train", names, self.num_rows, rng)
        data["train"] = str(folder / "train")
        if self.settings["train"].get("eval_every_steps"):
            users = [*self.settings["model"].get("user_features", names), "targets"]
            self._write_rows(folder / "valid", users if self.num_items else names, max(100, self.num_rows // 4), rng)
            data["valid"] = str(folder / "valid")
        if self.num_items:
            self._write_rows(folder / "items", self.settings["model"]["item_features"], self.num_items, rng)
            data["items"] = str(folder / "items")
        settings = {**self.settings, "data": {**self.settings["data"], **data}}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False))
        return path

    def _write_rows(self, folder: Path, names: Sequence[str], rows: int, rng: np.random.Generator) -> None:
        folder.mkdir(parents=True)
        columns = {name: _column(*self.columns[name], rows, rng) for name in names}
        if folder.name == "items":
            columns[self.settings["model"]["item_id"]] = pa.array(np.arange(rows))
        elif not self.num_items:
            columns["label"] = pa.array(rng.integers(0, 2, rows).astype(np.int8))
        pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=self.row_group_rows)


def _column(kind: str, distinct: int, longest: int, rows: int, rng: np.random.Generator) -> pa.Array:
    if kind == "float":
        return pa.array(rng.normal(size=rows).astype(np.float32))
    ends = None
    if kind.startswith("list"):
        ends = np.concatenate([[0], np.cumsum(rng.integers(0, longest + 1, rows))]).astype(np.int32)
    # Squared, so that some ids are far more frequent than others.
    ids = (rng.random(rows if ends is None else ends[-1]) ** 2 * distinct).astype(np.int64)
    values = pa.array(ids)
    if "string" in kind:
        used, indices = np.unique(ids, return_inverse=True)
        texts = pa.array([f"id-{number:x}-{number * 2654435761 % 2**32:08x}" for number in used.tolist()])
        values = texts.take(pa.array(indices))
    return values if ends is None else pa.ListArray.from_arrays(pa.array(ends), values)


def make(seed: int) -> RandomRun:
    """Return the run of a seed."""
    draw = _Draw(seed)
    run = RandomRun(seed, int(draw.of([1, 2, 3, 4], [0.55, 0.25, 0.1, 0.1])), draw.log(1_000, 300_000), None)
    run.row_group_rows = draw.of([None, 10_000, 50_000])
    two_tower = draw.chance(0.25)
    _features(run, draw, two_tower)
    run.settings["model"] = _two_tower(run, draw) if two_tower else _ranker(run, draw)
    run.settings["train"] = _train(run, draw, two_tower)
    return run


class _Draw:
    """Random choices, which depend on the seed and the calls before."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng((seed, 0))

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def of(self, choices: Sequence[Any], shares: Sequence[float] | None = None) -> Any:
        return choices[int(self._rng.choice(len(choices), p=shares))]

    def log(self, low: int, high: int) -> int:
        return round(np.exp(self._rng.uniform(np.log(low), np.log(high))))

    def whole(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def layers(self) -> list[int]:
        return [self.of([16, 32, 64, 128, 256, 512, 1024]) for _ in range(self.whole(1, 3))]


def _features(run: RandomRun, draw: _Draw, two_tower: bool) -> None:
    features: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    shared: dict[str, str] = {}  # kind of ids → a table that several features may share
    values = numbers = 0
    for i in range(draw.log(2, 30)):
        text, is_list = draw.chance(_TEXT_SHARE), draw.chance(_LIST_SHARE)
        first_item = two_tower and i == 1
        if first_item or values > _MOST_VALUES:
            text = text and not first_item
            is_list = False
        kind = "string" if text else "int64"
        longest = draw.log(2, 50) if is_list else 0
        distinct = draw.log(24, 1_000_000)
        values += run.num_rows * max(1, longest // 2)
        name = f"id{i}"
        run.columns[name] = (f"list<{kind}>" if is_list else kind, distinct, longest)
        table = shared.get(kind)
        if first_item or table is None or not draw.chance(0.15):
            table = f"table{i}"
            tables[table] = _table(run, draw, first_item, _MOST_TABLE_NUMBERS - numbers)
            numbers += tables[table]["num_embeddings"] * tables[table]["embedding_dim"]
            if not first_item and not two_tower:
                shared[kind] = table
        features[name] = {"table": table, **({"max_length": longest} if is_list and draw.chance(0.5) else {})}
    for i in range(draw.whole(0, 13)):
        run.columns[f"float{i}"] = ("float", 0, 0)
        features[f"float{i}"] = {"type": "float", "standardise": draw.chance(0.2)}
    optimizer = {"name": draw.of(["sgd", "adagrad", "rowwise_adagrad"]), "allow_column_split": True}
    run.settings |= {"features": features, "tables": tables, "optimizer": {"tables": optimizer}}
    run.settings["data"] = {
        "num_threads": draw.whole(0, 3),
        "prefetch_batches": draw.of([None, 0, 1, 4]),
        "window_mib": draw.of([1, 4, 16, 64]),
        "num_streams": 12,
        "label_column": None if two_tower else "label",
    }


def _table(run: RandomRun, draw: _Draw, plain: bool, room: int) -> dict[str, Any]:
    dim = draw.of([4, 8, 16, 32, 64, 128])
    rows = max(100, min(draw.log(100, 1_000_000), room // dim))
    table = {"num_embeddings": rows, "embedding_dim": dim, "data_type": draw.of(["FP32", "FP16"], [0.7, 0.3])}
    mapping = draw.of(["hash", "vocabulary", "several", "quotient_remainder"], [0.7, 0.15, 0.08, 0.07])
    if mapping == "vocabulary":
        table |= {"mapping": mapping, "num_buckets": 8}
    elif mapping == "several" and not plain:
        table["num_hashes"] = 2
    elif mapping == "quotient_remainder" and not plain:
        table |= {"mapping": mapping, "num_ids": rows * 10 if rows > 200 else rows}
    table["pooling"] = draw.of(["sum", "mean"])
    replicable = rows * dim <= 4_000_000
    kinds = ["auto", "table_wise", "row_wise", *(["column_wise"] if dim >= 64 else [])]
    table["sharding_type"] = draw.of([*kinds, *(["data_parallel"] if replicable else [])])
    if draw.chance(0.2):
        table["optimizer"] = {"name": draw.of(["sgd", "adagrad", "rowwise_adagrad"]), "allow_column_split": True}
    return table


def _ranker(run: RandomRun, draw: _Draw) -> dict[str, Any]:
    model: dict[str, Any] = {
        "name": "dlrm",
        "bottom_mlp": draw.layers(),
        "top_mlp": draw.layers(),
        "interaction": "dot",
    }
    tables, features = run.settings["tables"], run.settings["features"]
    dims = {name: tables[feature["table"]]["embedding_dim"] for name, feature in features.items() if "table" in feature}
    lists = [name for name in dims if run.columns[name][0].startswith("list")]
    queries = {name: [q for q in dims if q not in lists and dims[q] == dims[name]] for name in lists}
    single = [name for name in lists if not {"num_hashes", "num_ids"} & tables[features[name]["table"]].keys()]
    able = [
        name for name in single if queries[name] and "num_hashes" not in tables[features[queries[name][0]]["table"]]
    ]
    if able and draw.chance(0.5):
        name = able[0]
        model |= {"attention": {name: queries[name][0]}, "attention_mlp": draw.layers()[:2]}
        for each in (name, queries[name][0]):
            tables[features[each]["table"]] |= {"sharding_type": "auto"}
    model["dropout"] = draw.of([0.0, 0.1])
    return model


def _two_tower(run: RandomRun, draw: _Draw) -> dict[str, Any]:
    run.num_items = draw.log(500, 40_000)
    run.columns["id1"] = ("int64", run.num_items, 0)
    names = list(run.columns)
    items = ["id1", *(name for name in names[2:] if draw.chance(0.4))]
    run.columns["targets"] = ("list<int64>", run.num_items, 5)
    run.settings["data"]["seen_column"] = None
    return {
        "name": "two_tower",
        "user_features": [name for name in names if name not in items],
        "item_features": items,
        "item_id": "id1",
        "user_mlp": draw.layers(),
        "item_mlp": draw.layers(),
        "output_dim": draw.of([16, 32, 64]),
        "logq_correction": draw.chance(0.5),
    }


def _train(run: RandomRun, draw: _Draw, two_tower: bool) -> dict[str, Any]:
    batch = min(draw.log(64, 32_768), max(64, run.num_rows // 2))
    run.settings["precision"] = {"autocast": draw.of(["none", "bf16", "fp16"], [0.8, 0.12, 0.08])}
    while _flops(run, batch, two_tower) > _STEP_FLOPS and batch > 64:
        batch = max(64, batch // 2)
    steps = int(np.clip(_RUN_FLOPS / _flops(run, batch, two_tower), 20, draw.whole(30, 60)))
    train = {"global_batch_size": batch, "max_steps": steps, "epochs": 1000}
    if draw.chance(0.2):
        train["micro_batch_size"] = max(16, batch // run.nproc // draw.of([2, 4, 8]))
    if draw.chance(0.4):
        train["eval_every_steps"] = steps // 2
        train["eval_batch_size"] = draw.of([None, max(64, batch // 2), 2 * batch])
    if draw.chance(0.3):
        train |= {"checkpoint_every_steps": steps // 3, "async_checkpoints": draw.chance(0.5)}
    train["activation_checkpointing"] = draw.chance(0.15)
    return train


def _flops(run: RandomRun, batch: int, two_tower: bool) -> float:
    """Return roughly the FLOPs of a step of the dense part."""
    features, tables, model = run.settings["features"], run.settings["tables"], run.settings["model"]
    dims = [tables[feature["table"]]["embedding_dim"] for feature in features.values() if "table" in feature]
    first = sum(dims) if two_tower else len(dims) ** 2 // 2 + max(dims)
    flops = 6.0 * batch * len(dims) ** 2 * max(dims)
    for key in ("user_mlp", "item_mlp", "bottom_mlp", "top_mlp"):
        widths = [first, *model.get(key, ())]
        flops += 6.0 * batch * sum(a * b for a, b in pairwise(widths))
    if "attention" in model:
        widths = [4 * max(dims), *model["attention_mlp"]]
        flops += 6.0 * batch * 25 * sum(a * b for a, b in pairwise(widths))
    flops *= 1 if run.settings["precision"]["autocast"] == "none" else _AUTOCAST_COST
    return flops + (batch**2 * (6.0 * model["output_dim"] + 100) if two_tower else 0)
