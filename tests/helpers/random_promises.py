"""Draws whole runs: any model, data of all kinds, and any value that a CPU can train with for every key.

`random_export` makes the first config, or this module does; then settings are drawn, and dropped if they do not fit.
"""

import copy
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import random_files
import yaml
from random_export import KINDS, write_random, write_random_towers

from recsys.config import Config, load_config
from recsys.config.device import check_device
from recsys.errors import UserError

LIST_MODELS = ("sasrec", "simplex", "ultragcn")
_NO_LIST_ITEMS = ("bool", "binary", "odd decimal")  # two numbers may give the same id
_SHARE = 0.3  # share of runs for which a setting is drawn
_WIRES = ["FP16", "BF16"]
_SPLITS = ["data_parallel", "table_wise", "row_wise", "column_wise"]
_MACHINE_SPLITS = ["table_row_wise", "table_column_wise", "grid_shard"]
_TABLE_OPTIMIZERS = [
    {"name": name, "learning_rate": rate, "eps": 1e-4, **more}
    for name, more in (
        *(("rowwise_adagrad", {}), ("rowwise_adagrad", {"allow_column_split": True}), ("adagrad", {}), ("sgd", {})),
        *(("adam", {"beta1": 0.8}), ("adam", {"beta2": 0.9}), ("ftrl", {}), ("ftrl", {"l1": 0.001})),
    )
    for rate in (0.01, 0.1)
]
_DENSE_OPTIMIZERS = [
    {"name": name, "learning_rate": 0.01, **more}
    for name in ("adam", "adamw", "adagrad", "sgd", "adafactor", "lamb")
    for more in ({}, {"clip_norm": 0.05}, {"weight_decay": 0.01})
] + [{"name": "sgd", "momentum": 0.9}]
_SCHEDULES = [
    {"name": name, "warmup_steps": warmup, **more}
    for name, more in (
        *(("constant", {}), ("linear", {}), ("cosine", {"final_factor": 0.1})),
        *(("plateau", {}), ("plateau", {}), ("plateau", {"plateau_factor": 0.1, "plateau_patience": 2})),
    )
    for warmup in (0, 3)
]
# Key → values to draw from; keys are drawn in this order. Keys of a section that belong together are whole mappings.
SETTINGS: dict[str, list[Any]] = {
    "data.weight_column": ["row_weight"],
    "data.keep_negatives": [0.5],
    "data.shuffle": [False],
    "data.window_mib": [1],
    "data.drop_last": [True],
    "data.num_threads": [0, 1, 3],
    "data.processes": [True, False],
    "data.prefetch_batches": [0, 1, 5],
    "data.max_rows": [150, 1000],
    "data.filter": [
        *("extra > 0.1", {"train": "extra > 0.3 or extra is None"}, {"test": "part == 1", "train": "part in [0, 1]"}),
        *({"train": "sampled(0.6, 7)"}, {"valid": "not (extra < 0.5)", "items": "sampled(0.9, 7)"}),
    ],
    "data.verify_checksums": [False],
    "data.retries": [0],
    "data.max_bad_rows": [10],
    "data.max_bad_files": [1],
    "data.optional_columns": [["extra"]],
    "data.seen_column": [None],
    "data.candidates_column": ["candidates"],
    "optimizer.tables": _TABLE_OPTIMIZERS,
    "optimizer.dense": _DENSE_OPTIMIZERS,
    "precision.autocast": ["bf16", "fp16"],
    "precision.loss_scale": [1, 2**24],
    "precision.loss_scale_growth_steps": [2, None],
    "precision.dense_int8": [True],
    "precision.output_dtype": ["FP16", "BF16"],
    "precision.forward_wire": _WIRES,
    "precision.backward_wire": _WIRES,
    "precision.tf32": [True],
    "train.micro_batch_size": [3, 8, 50],
    "train.micro_batch_ids": [10, 40],
    "train.eval_batch_size": [13, 100, 1000],
    "train.max_bad_steps": [3],
    "train.check_every_step": [False],
    "train.async_checkpoints": [True],
    "train.activation_checkpointing": [True],
    "train.dense_sharding": ["optimizer"],
    "train.compile": [True],
    "train.early_stop": ["METRIC"],  # one of the model's
    "optimizer.schedule": _SCHEDULES,
    "train.distill": [{"column": "teacher", "weight": 0.3}, {"column": "teacher", "temperature": 3}],
    "train.publish": [{"every_steps": 3, "tables": tables} for tables in ("fp32", "stored", "fp16", "int8", "int4")]
    + [{"every_seconds": 0.1}],
    "run.stuck_after_s": [300],
    "run.profile_steps": [2],
    "run.track": [{"to": ["tensorboard"], "row_norms": True, "item_vectors": True}, {"to": []}],
    "memory": [{"budget": "8GiB"}, {"budget": "8GiB", "fit": True, "allow": ["row_order"]}],
}
# Key → share of runs for which it is drawn, for settings that take long.
RARE = {"train.compile": 0.04, "train.publish": 0.1, "data.processes": 0.04, "run.profile_steps": 0.04}
TABLE_SETTINGS: dict[str, list[Any]] = {
    "sharding_type": [*_SPLITS, *_SPLITS, *_MACHINE_SPLITS],
    "compute_kernel": ["fused_uvm", "fused_uvm_caching"],
    "optimizer": _TABLE_OPTIMIZERS,
    "quantize": ["FP16", "INT8", "INT4", "INT2"],
    "l2": [0.01],
    "l2_all_rows": [0.001],
    "sparsity": [{"l1": 0.001}, {"group_lasso": 0.01}, {"l1": 0.001, "group_lasso": 0.001}],
    "init_range": [0.0, 0.1],
    "experts.active": [2],
}
_WIDTHS: list[Any] = [[8], [16, 8]]
_MLP: dict[str, list[Any]] = {"dropout": [0.2], "layer_norm": [True]}
_ATTENTION: dict[str, list[Any]] = {"attention_mlp": _WIDTHS}
_DLRM: dict[str, list[Any]] = {
    **{"embedding_dim": [4, 16], "bottom_mlp": _WIDTHS, "top_mlp": _WIDTHS, **_ATTENTION},
    **{"dropout": [0.2], "embedding_dropout": [0.1]},
}
_TASKS: dict[str, list[Any]] = {"tower_mlp": _WIDTHS, "dropout": [0.2], "dots": [True], **_ATTENTION}
_RETRIEVAL: dict[str, list[Any]] = {
    **{"top_k": [[5], [3, 10]], "metrics": [["ndcg", "hit_rate"], ["mrr", "map", "coverage"]]},
    **{"sampled_negatives": [3, 40], "dropout": [0.2]},
}
MODEL_SETTINGS: dict[str, dict[str, list[Any]]] = {
    "logistic_regression": {},
    "fm": {"embedding_dropout": [0.1], **_ATTENTION},
    "deepfm": {"embedding_dropout": [0.1], "mlp": _WIDTHS, **_MLP, **_ATTENTION},
    "dlrm": _DLRM,
    "dcn": {
        **{"num_cross_layers": [1, 2], "rank": [2], "bottom_mlp": _WIDTHS, "mlp": [[], *_WIDTHS]},
        **{"structure": ["stacked"], "embedding_dropout": [0.1], **_MLP, **_ATTENTION},
    },
    "final_mlp": {
        **{"mlp_1": _WIDTHS, "mlp_2": _WIDTHS, "num_heads": [2, 4], "gate_1": [["id_0"]], "gate_2": [["id_1", "id_2"]]},
        **{"gate_mlp": _WIDTHS, "embedding_dropout": [0.1], **_MLP, **_ATTENTION},
    },
    "wukong": {"num_layers": [1, 3], "fm_vectors": [3], "linear_vectors": [1], "rank": [5], "fm_mlp": _WIDTHS, **_DLRM},
    "mmoe": {"num_experts": [1, 3], "expert_mlp": _WIDTHS, **_TASKS},
    "ple": {"num_experts": [1, 3], "expert_mlp": _WIDTHS, "num_task_experts": [1], "num_levels": [1, 3], **_TASKS},
    "esmm": _TASKS,
    "two_tower": {
        **{"loss": ["softmax", "bpr"], "logq_correction": [False], "correct_own": [False], "sampling_power": [0.5]},
        **{"temperature": [0.5], "normalize": [False], **_RETRIEVAL},
    },
    "sasrec": {
        **{"num_blocks": [0, 1], "num_heads": [2], "layer": ["original", "ligr", "hstu"], "share_layers": [True]},
        **{"feed_forward": [6], "embedding_dropout": [0.1], "calibration": [0, 0.5], "exclude_listed": [True]},
        **{"num_items": [45], "loss": ["gbce"], **_RETRIEVAL},
    },
    "simplex": {
        **{"history_share": [0, 1], "item_bias": [True], "leave_one_out": [True], "temperature": [0.5]},
        **{"loss": ["contrastive", "binary", "bpr"], "margin": [0.1], "negative_weight": [0, 5], **_RETRIEVAL},
    },
    "ultragcn": {
        **{"positive_weights": [[0.1, 1]], "negative_weights": [[0, 1]], "negative_weight": [3], "item_bias": [True]},
        **{"neighbour_weight": [1], "drawn_l2": [0.1]},
        **{key: values for key, values in _RETRIEVAL.items() if key != "dropout"},
    },
}


def write_lists(folder: Path, dice: random.Random) -> dict[str, Any]:
    """Write data with users' lists of items, and return the config of a model for these."""
    name, dim = dice.choice(LIST_MODELS), dice.choice([8, 16])
    kinds = [KINDS[dice.choice([kind for kind in KINDS if kind not in _NO_LIST_ITEMS])] for _ in range(2)]
    (user_type, user), (item_type, item) = kinds
    flat = item_type.value_type if pa.types.is_dictionary(item_type) else item_type

    def array(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(values, flat).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)

    def lists(count: int, longest: int) -> list[list[int]]:
        return [[int(45 * dice.random() ** 2) for _ in range(dice.randrange(longest + 1))] for _ in range(count)]

    pq.write_table(pa.table({"item": array([item(i) for i in range(45)], item_type)}), folder / "items.parquet")
    for part, count in (("train", 150), ("test", 70)):
        columns = {"user": pa.array([user(dice.randrange(60)) for _ in range(count)], _flat(user_type))}
        drawn = {"history": lists(count, 12), "near": lists(count, 5), "held_out": lists(count, 4)}
        drawn |= {"seen": lists(count, 6), "candidates": lists(count, 30)}
        for key, rows in drawn.items():
            columns[key] = pa.array([[item(i) for i in row] for row in rows], pa.list_(flat))
        columns["item"] = array([item(dice.randrange(45)) for _ in range(count)], item_type)
        columns["near_weights"] = pa.array([[dice.random() for _ in row] for row in drawn["near"]])
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")
    features: dict[str, Any] = {"history": {"table": "item"}, "item": {"table": "item"}}
    table = {"num_embeddings": 90, "embedding_dim": dim, "init_range": 0.5}
    tables = {"item": {**table, "mapping": dice.choice(["hash", "vocabulary"])}}
    model = {"name": name, "history": "history", "item_id": "item", "dim": dim}
    if name == "sasrec":
        features["history"]["max_length"] = 9
        model["max_length"] = 8
    else:
        features["user"], tables["user"], model["user_id"] = {"table": "user"}, table, "user"
    if name == "ultragcn" and dice.random() < 0.5:
        features["near"], model["neighbours"] = {"table": "item", "weights": "near_weights"}, "near"
    return {"data": {"items": f"{folder}/items.parquet"}, "features": features, "tables": tables, "model": model}


def _flat(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def add_columns(folder: Path, config: dict[str, Any], dice: random.Random) -> None:
    """Add the columns that settings may need, put some into a struct, and write files of any kind and number."""
    generator = np.random.default_rng(dice.randrange(2**32))
    features = config["features"].values()
    items = {feature.get("column") for feature in features} & _columns(config["data"].get("items"))
    nested = [
        feature
        for feature in features
        if {"column", "weights"} & feature.keys() and feature.get("nulls") != "refuse" and dice.random() < 0.3
        if feature.get("column") not in items and "weights" not in feature
    ]
    fillable = [
        feature.get("column", name)
        for name, feature in config["features"].items()
        if ("column" in feature or feature.get("type") == "float") and feature.get("nulls") != "refuse"
        if feature not in nested and "weights" not in feature and feature.get("column", name) not in items
    ]
    hidden = _hide(config, pq.read_schema(folder / "train.parquet"), items, generator.spawn(1)[0])
    for part in ("train", "test"):
        rows = pq.read_table(folder / f"{part}.parquet")
        (folder / f"{part}.parquet").unlink()
        count, numbers = len(rows), generator.random(len(rows))
        if dice.random() < 0.3:  # some rows and ids occur many times, and others never
            rows = rows.take(pa.array((count * numbers**3).astype(int)))
        rows = rows.append_column("extra", pa.array(numbers, mask=generator.random(count) < 0.1))
        rows = rows.append_column("row_weight", pa.array(generator.choice([0, 0.5, 1, 3], count)))
        for label in ("", "_like", "_stars", "_buy"):
            rows = rows.append_column(f"teacher{label}", pa.array(generator.random(count)))
        if "held_out" not in rows.column_names and "seen" in rows.column_names:
            rows = rows.append_column("held_out", rows["seen"].take(pa.array(generator.permutation(count))))
        if nested:
            names = [feature["column"] for feature in nested]
            arrays = [rows[name].combine_chunks() for name in names]
            struct = pa.StructArray.from_arrays(arrays, names, mask=pa.array(generator.random(count) < 0.05))
            rows = rows.drop_columns(names).append_column("context", struct)
        rows = rows.drop_columns([name for name in hidden if part == "test" and name in rows.column_names])
        _write_files(folder / part, rows, [name for name in fillable if name in rows.column_names], dice)
    for feature in nested:
        feature["column"] = f"context.{feature['column']}"


def _hide(config: dict[str, Any], schema: pa.Schema, items: set[str], dice: np.random.Generator) -> list[str]:
    """Hide some features of single ids; return the columns of some of them, which data to be scored need not have."""
    columns = []
    for name, feature in config["features"].items():
        column, table = feature.get("column", name), config["tables"].get(feature.get("table"), {})
        is_single = column in schema.names and not pa.types.is_nested(schema.field(column).type)
        fitting = ["empty"] if table.get("mapping") == "identity" else ["empty", "reserved"]
        is_fit = table and (is_single or "cross" in feature) and feature.get("nulls", "reserved") in fitting
        if is_fit and name != "item" and column not in items and dice.random() < 0.25:
            feature["hidden"] = float(dice.choice([0.1, 0.6]))
            columns += [column] if dice.random() < 0.5 else []
    return columns


def _write_files(folder: Path, rows: pa.Table, fillable: list[str], dice: random.Random) -> None:
    """Write rows as any number of files, some empty, in two partitions; a column may be null in one of the files."""
    cuts = [dice.randrange(len(rows)) for _ in range(dice.choice([0, 1, 1, 2, 4]))]
    cuts = sorted([0, *cuts, *(cuts[:1] if dice.random() < 0.3 else []), len(rows)])
    for number, (start, stop) in enumerate(pairwise(cuts)):
        some = rows.slice(start, stop - start)
        if number == 0 and fillable and dice.random() < 0.3:
            place = rows.column_names.index(column := dice.choice(fillable))
            some = some.set_column(place, column, pa.nulls(len(some), rows[column].type))
        size = dice.choice([3, 11, 71, 1000])
        groups = [min(size, len(some) - first) for first in range(0, len(some), size)]
        groups = dice.choice([groups, groups, [0, *groups]])
        part = 1 if stop == len(rows) else number % 2
        random_files.write(folder / f"part={part}" / f"{number}.parquet", some, groups, dice)


def _columns(path: str | None) -> set[str]:
    return set(pq.read_schema(path).names) if path else set()


def labels(model: str, dice: random.Random) -> dict[str, Any]:
    """Return random config keys of labels that a ranker may have."""
    unknown = {"nulls": "unknown"}
    if model == "esmm":
        return {"labels": {"like": "rating > 0.3", "buy": {"expression": "rating > 0.6", "weight": 2}}}
    several: dict[str, Any] = {"like": "label", "stars": {"column": "rating", "loss": "squared", "weight": 0.5}}
    several |= {"buy": {"expression": "extra > 0.4 and rating > 0.2", **unknown}} if dice.random() < 0.5 else {}
    one: list[Any] = [{"label_column": "label"}] * 3 + [
        {"labels": {"stars": {"column": "rating", "loss": "squared"}}},
        {"labels": {"buy": {"expression": "extra < 0.5", **unknown}}},
    ]
    return dice.choice(one if model in ("fm", "deepfm") else [*one, *[{"labels": several}] * 3])


def base(folder: Path, seed: int, dice: random.Random) -> dict[str, Any]:
    """Write data, and return the config of a run before settings are drawn."""
    share = dice.random()
    if share < 0.2:
        config = write_lists(folder, dice)
    else:
        config = yaml.safe_load((write_random_towers if share < 0.45 else write_random)(folder, seed).read_text())
    add_columns(folder, config, dice)
    if "items" in config["data"]:
        config["data"]["targets_column"] = "held_out"
    else:
        model = "esmm" if config["model"]["name"] in ("mmoe", "ple") and dice.random() < 0.4 else None
        config["model"] = {"name": model} if model else config["model"]
        config["data"] = labels(config["model"]["name"], dice)
        if dice.random() < 0.2:
            config["features"]["part"] = {"table": "part"}
            other = next(iter(config["tables"].values()))  # some models need the same width for all tables
            dim = other.get("projected_dim") or other["embedding_dim"]
            config["tables"]["part"] = {"num_embeddings": 9, "embedding_dim": dim, "projected_dim": None}
    # There are 150 or 300 rows: the last batch may have a single row, or an epoch a single step.
    size = dice.choice([23, 23, 31, 31, 64, 64, 100, 149, 299, 500])
    config["data"] |= {"train": f"{folder}/train", "test": f"{folder}/test", "num_streams": dice.choice([1, 2, 8, 23])}
    config["train"] = {
        **{"global_batch_size": size, "epochs": dice.choice([1, 2])},
        **{"log_every_steps": 1, "checkpoint_every_steps": dice.choice([2, 3, 5]), "keep_checkpoints": 1000},
    }
    every = dice.choice([{}, {"eval_every_steps": 3}, {"eval_every_steps": 4}, {"eval_every_epochs": 1}])
    config["train"] |= every
    config["data"] |= {"valid": f"{folder}/test"} if every or dice.random() < 0.3 else {}
    config["optimizer"], config["seed"] = {}, dice.randrange(10**6)
    return config


def write(folder: Path, seed: int, nproc: int) -> Path:
    """Write data and a config that `nproc` ranks can train on CPUs; return the path of the config."""
    dice, path = random.Random(seed), folder / "config.yaml"
    config, loaded = _loaded(path, base(folder, seed, dice), nproc)
    drawn = [(key.split("."), values, RARE.get(key, _SHARE)) for key, values in SETTINGS.items()]
    drawn += [(["model", key], values, 0.3) for key, values in MODEL_SETTINGS[config["model"]["name"]].items()]
    for name, table in config["tables"].items():
        fit = {key: values for key, values in TABLE_SETTINGS.items() if "experts" in table or "experts" not in key}
        drawn += [(["tables", name, *key.split(".")], values, 0.3) for key, values in fit.items()]
    if "items" in config["data"]:
        drawn = [one for one in drawn if one[0] != ["train", "distill"]]  # retrieval models cannot have a teacher
    if config["train"]["global_batch_size"] >= 100:  # the data may not have a whole batch
        drawn = [one for one in drawn if one[0] != ["data", "drop_last"]]
    chosen = [(keys, dice.choice(values)) for keys, values, share in drawn if dice.random() < share]
    metrics = loaded.model.metric_names(loaded)
    for place, (keys, value) in enumerate(chosen):
        if value == "METRIC":
            chosen[place] = (keys, {"metric": dice.choice(metrics), "patience": dice.choice([1, 3])})
        elif keys[-1] == "publish":
            chosen[place] = (keys, {"dir": f"{folder}/published", **value})
    config = _changed(path, config, chosen, nproc)
    path.write_text(yaml.dump(config, allow_unicode=True))
    if config["data"].get("max_bad_files"):
        (folder / "train" / "part=1" / "bad.parquet").write_bytes(b"no footer")
    file, *others = sorted((folder / "train").rglob("*/?.parquet"))
    if config["data"].get("optional_columns") and others:  # a filter may need it in one of them
        pq.write_table(pq.read_table(file, partitioning=None).drop_columns("extra"), file, row_group_size=71)
    return path


def _changed(path: Path, config: dict[str, Any], chosen: list[tuple[list[str], Any]], nproc: int) -> dict[str, Any]:
    """Return a config with the settings that fit each other: all, or else those of the first half, then the second."""
    changed = copy.deepcopy(config)
    for keys, value in chosen:
        section = changed
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        section[keys[-1]] = value
    try:
        return _loaded(path, changed, nproc)[0]
    except UserError:
        if len(chosen) == 1:  # it does not fit what was drawn before
            return config
    half = len(chosen) // 2
    return _changed(path, _changed(path, config, chosen[:half], nproc), chosen[half:], nproc)


def _loaded(path: Path, config: dict[str, Any], nproc: int) -> tuple[dict[str, Any], Config]:
    path.write_text(yaml.dump(config, allow_unicode=True))
    loaded = load_config(path)
    check_device(loaded, on_gpu=False, world_size=nproc)
    return config, loaded


def drawn_keys(config: dict[str, Any]) -> set[str]:
    """Return the keys of a config, and those for which settings are drawn; NAME stands for names."""
    sections: list[tuple[str, dict[str, list[Any]]]] = [("", SETTINGS), ("tables.NAME.", TABLE_SETTINGS)]
    sections += [("model.", settings) for settings in MODEL_SETTINGS.values()]
    found = {f"{prefix}{key}" for prefix, settings in sections for key in settings}
    for prefix, settings in sections:
        for key, values in settings.items():
            found |= {
                name for value in values if isinstance(value, dict) for name in _flat_keys(value, f"{prefix}{key}.")
            }
    return found | {*_flat_keys(config, "")}


def _flat_keys(section: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in section.items():
        name = f"{prefix}{'NAME' if prefix in ('tables.', 'features.', 'data.labels.') else key}"
        yield name
        if isinstance(value, dict):
            yield from _flat_keys(value, f"{name}.")
