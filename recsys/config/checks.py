"""Checks across keys: each failure is one sentence with the full key, what is allowed and the nearest right name."""

import math
from collections.abc import Iterable, Sequence

from recsys.config.schema import (
    Config,
    DLRMConfig,
    FeatureType,
    IdMappingType,
    Interaction,
    ShardingChoice,
    TableOptimizer,
    TwoTowerConfig,
)
from recsys.errors import UserError, nearest

RANKING_METRICS = ("auc", "log_loss", "normalized_entropy")
_LARGE = 1e30  # still finite in FP32
_WIDEST_ROW = 2048  # of FBGEMM's kernels


def check_config(config: Config) -> None:
    """Refuse a config whose parts do not fit together.

    Raises:
        UserError: names the key, what was found, what is allowed and what to do.
    """
    _check_numbers(config)
    _check_features(config)
    _check_tables(config)
    if isinstance(config.model, TwoTowerConfig):
        _check_two_tower(config, config.model)
    else:
        _check_dlrm(config, config.model)
    _check_paths(config)
    _check_training(config)


def metric_names(config: Config) -> list[str]:
    """Return the names of the metrics that an evaluation of this config's model gives."""
    if isinstance(config.model, TwoTowerConfig):
        return [f"{name}@{k}" for k in config.model.top_k for name in ("recall", "ndcg")]
    return list(RANKING_METRICS)


def one_of(key: str, name: str, allowed: Iterable[str], what: str) -> None:
    """Raise a UserError unless `name`, given by config key `key`, is among `allowed`."""
    allowed = list(allowed)
    if name not in allowed:
        raise UserError(
            f"config key '{key}': there is no {what} '{name}'{nearest(name, allowed)} (known: {', '.join(allowed)})"
        )


def _check_numbers(config: Config) -> None:
    data, train, optimizer = config.data, config.train, config.optimizer
    limits: dict[str, tuple[float | None, float, float]] = {
        "data.num_streams": (data.num_streams, 1, 2**20),
        "data.window_mib": (data.window_mib, 1, 2**20),
        "data.num_threads": (data.num_threads, 0, 1024),
        "data.prefetch_batches": (data.prefetch_batches, 0, 2**20),
        "data.max_rows": (data.max_rows, 1, math.inf),
        "train.global_batch_size": (train.global_batch_size, 1, 2**31),
        "train.eval_batch_size": (train.eval_batch_size, 1, 2**31),
        "train.epochs": (train.epochs, 1, math.inf),
        "train.max_steps": (train.max_steps, 1, math.inf),
        "train.eval_every_steps": (train.eval_every_steps, 1, math.inf),
        "train.log_every_steps": (train.log_every_steps, 1, math.inf),
        "train.checkpoint_every_steps": (train.checkpoint_every_steps, 1, math.inf),
        "train.keep_checkpoints": (train.keep_checkpoints, 1, math.inf),
        "train.early_stop.patience": (train.early_stop.patience, 1, math.inf),
        "run.num_threads": (config.run.num_threads, 1, 1024),
        "optimizer.schedule.warmup_steps": (optimizer.schedule.warmup_steps, 0, math.inf),
        "optimizer.schedule.final_factor": (optimizer.schedule.final_factor, 0, _LARGE),
        "optimizer.tables.learning_rate": (optimizer.tables.learning_rate, 0, _LARGE),
        "optimizer.tables.eps": (optimizer.tables.eps, 1e-30, _LARGE),  # 0 / 0 is the step of a row without gradient
        "optimizer.dense.learning_rate": (optimizer.dense.learning_rate, 0, _LARGE),
        "optimizer.dense.weight_decay": (optimizer.dense.weight_decay, 0, _LARGE),
        "seed": (config.seed, 0, 2**63 - 1),
    }
    for name, feature in config.features.items():
        limits[f"features.{name}.max_length"] = (feature.max_length, 1, math.inf)
        limits[f"features.{name}.fill"] = (feature.fill, -_LARGE, _LARGE)
    for name, table in config.tables.items():
        fewest = 2 if table.mapping is IdMappingType.hash else 1
        limits[f"tables.{name}.num_embeddings"] = (table.num_embeddings, fewest, 2**40)
        limits[f"tables.{name}.hash_seed"] = (table.hash_seed, 0, 2**63 - 1)
        limits[f"tables.{name}.init_range"] = (table.init_range, 0, 65504)  # the largest FP16
    for key, (value, least, most) in limits.items():
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if value < least or most == math.inf else f"at most {most}"
            raise UserError(f"config key '{key}' must be {bound}, found {value}")
    for key, size in (
        ("train.global_batch_size", train.global_batch_size),
        ("train.eval_batch_size", train.eval_batch_size),
    ):
        if size is not None and size % data.num_streams:
            raise UserError(
                f"config key '{key}' must be a multiple of data.num_streams={data.num_streams}, "
                f"found {size}; the nearest is {max(1, round(size / data.num_streams)) * data.num_streams}"
            )


def _check_features(config: Config) -> None:
    if not config.features:
        raise UserError("config key 'features' is empty, and needs at least one feature")
    for name, feature in config.features.items():
        key = f"features.{name}"
        _check_name(key, name)
        if feature.type is FeatureType.float:
            if feature.table is not None:
                raise UserError(f"config key '{key}.table': a float feature has no table; drop it, or set type: id")
            continue
        if feature.table is None:
            hint = nearest(name, [other for other in config.features if other != name], "features.")
            raise UserError(
                f"config key '{key}.table' is not set, and an id feature needs a table "
                f"(known: {', '.join(config.tables)}; for a number set {key}.type=float){hint}"
            )
        one_of(f"{key}.table", feature.table, config.tables, "table")
    if all(feature.type is not FeatureType.id for feature in config.features.values()):
        raise UserError("config key 'features' has no feature of type id, and needs at least one")


def _check_name(key: str, name: str) -> None:
    if not name or "." in name:
        raise UserError(f"config key '{key}': a name must not be empty or hold a dot (a feature's column may)")


def _check_tables(config: Config) -> None:
    used = {feature.table for feature in config.features.values()}
    for name, table in config.tables.items():
        key = f"tables.{name}"
        _check_name(key, name)
        if name not in used:
            raise UserError(
                f"config key '{key}': no feature uses this table{nearest(name, [t for t in used if t])}"
                " (name it in a feature's table, or remove it)"
            )
        if not 4 <= table.embedding_dim <= _WIDEST_ROW or table.embedding_dim % 4:
            raise UserError(
                f"config key '{key}.embedding_dim' must be a multiple of 4, from 4 to {_WIDEST_ROW}, "
                f"found {table.embedding_dim}"
            )
        rowwise = config.optimizer.tables.name is TableOptimizer.rowwise_adagrad
        if table.sharding_type is ShardingChoice.column_wise and rowwise:
            raise UserError(
                f"config key '{key}.sharding_type': column_wise splits the rows that rowwise_adagrad averages over, so "
                f"what is learned would depend on the plan; use row_wise, or optimizer.tables.name=adagrad"
            )


def _check_dlrm(config: Config, model: DLRMConfig) -> None:
    dims = {name: table.embedding_dim for name, table in config.tables.items()}
    if len(set(dims.values())) > 1:
        listed = ", ".join(f"tables.{name}.embedding_dim={dim}" for name, dim in dims.items())
        raise UserError(f"model dlrm takes dot products of all embeddings, so they need one embedding_dim: {listed}")
    if config.data.items is not None:
        raise UserError("config key 'data.items': model dlrm ranks rows, and reads no item corpus; remove it")
    if len(config.features) == 1 and model.interaction is Interaction.dot:
        raise UserError(
            "model dlrm with interaction=dot needs two features to take dot products of; add a feature, or set "
            "model.interaction=dot_and_embeddings"
        )
    if config.data.label_column is None:
        raise UserError("config key 'data.label_column' is not set, and model dlrm needs a column with 0 or 1")
    if not 0 <= model.embedding_dropout < 1:
        found = model.embedding_dropout
        raise UserError(f"config key 'model.embedding_dropout' must be from 0 to below 1, found {found}")
    _check_layers(model.dropout, bottom_mlp=model.bottom_mlp, top_mlp=model.top_mlp)


def _check_two_tower(config: Config, model: TwoTowerConfig) -> None:
    for key in ("user_features", "item_features"):
        names = getattr(model, key)
        if not names:
            raise UserError(f"config key 'model.{key}' is empty, and needs at least one feature")
        for name in names:
            one_of(f"model.{key}", name, config.features, "feature")
            if names.count(name) > 1:
                raise UserError(f"config key 'model.{key}' names '{name}' twice; name each feature once")
    one_of("model.item_id", model.item_id, model.item_features, "item feature")
    both = set(model.user_features) & set(model.item_features)
    if both:
        raise UserError(
            f"feature '{min(both)}' stands in model.user_features and model.item_features; keep one of them"
        )
    unused = set(config.features) - set(model.user_features) - set(model.item_features)
    if unused:
        raise UserError(
            f"feature '{min(unused)}' is in neither model.user_features nor model.item_features; add it there, or "
            f"remove features.{min(unused)}"
        )
    if config.features[model.item_id].type is not FeatureType.id:
        raise UserError(f"config key 'model.item_id': feature '{model.item_id}' must be of type id")
    if model.temperature <= 0:
        raise UserError(f"config key 'model.temperature' must be above 0, found {model.temperature}")
    if not model.top_k or min(model.top_k) < 1:
        raise UserError(f"config key 'model.top_k' needs numbers of 1 or more, found {model.top_k}")
    if (config.data.valid or config.data.test) and not config.data.items:
        raise UserError(
            "config key 'data.items' is not set, and data.valid and data.test are evaluated over a file of all items"
        )
    if config.data.label_column is not None:
        raise UserError(
            "config key 'data.label_column': model two_tower takes every row for a positive and reads no label; keep "
            "the positive rows in data.train, and set data.label_column=null"
        )
    _check_layers(model.dropout, user_mlp=model.user_mlp, item_mlp=model.item_mlp, output_dim=[model.output_dim])


def _check_layers(dropout: float, **widths: Sequence[int]) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"config key 'model.dropout' must be from 0 to below 1, found {dropout}")
    for key, values in widths.items():
        if min(values, default=1) < 1:
            raise UserError(f"config key 'model.{key}' must be at least 1, found {min(values)}")


def _check_paths(config: Config) -> None:
    for key in ("train", "valid", "test", "items"):
        value = getattr(config.data, key)
        paths = value if isinstance(value, list) else [value]
        if key == "train" and value is None:
            raise UserError("config key 'data.train' is empty, and needs a path, a glob or a list of them")
        if value is not None and not (paths and all(isinstance(path, str) and path for path in paths)):
            raise UserError(f"config key 'data.{key}' must be a path, a glob or a list of them, found {value!r}")


def _check_training(config: Config) -> None:
    train, metric = config.train, config.train.early_stop.metric
    if config.run.resume and config.run.overwrite:
        raise UserError("run.resume=true and run.overwrite=true exclude each other; keep one of them")
    if metric is not None:
        one_of("train.early_stop.metric", metric, metric_names(config), "metric")
        if not config.data.valid:
            raise UserError("config key 'train.early_stop.metric' needs data.valid, which is not set")
        if train.eval_every_steps is None:
            raise UserError("config key 'train.early_stop.metric' needs train.eval_every_steps, which is not set")
    if train.eval_every_steps is not None and not config.data.valid:
        raise UserError("config key 'train.eval_every_steps' needs data.valid, which is not set")
