"""Checks across keys: each failure is one sentence with the full key, what is allowed and the nearest right name."""

from itertools import pairwise
from math import isqrt

from recsys.config.choices import (
    COLUMN_SPLITS,
    REPLICATED,
    ROWWISE,
    UNPOOLED,
    WITHOUT_DECAY,
    ComputeKernel,
    FeatureType,
    IdMappingType,
    NullPolicy,
    ShardingChoice,
    StateType,
    TableOptimizer,
)
from recsys.config.initial import check_init
from recsys.config.model_checks import check_dlrm, check_two_tower, one_of
from recsys.config.names import check_names
from recsys.config.schema import Config, FeatureConfig, TableConfig, TableOptimizerConfig, TwoTowerConfig
from recsys.config.topology import check_memory, check_topology
from recsys.errors import UserError, nearest

RANKING_METRICS = ("auc", "log_loss", "normalized_entropy")
_LARGE = 1e30  # still finite in FP32
_MOST = 2**63 - 1  # of 64 bits
_WIDEST_ROW = 2048  # of FBGEMM's kernels


def check_config(config: Config) -> None:
    """Refuse a config whose parts do not fit together.

    Raises:
        UserError: names the key, what was found, what is allowed and what to do.
    """
    check_names(config)
    _check_numbers(config)
    _check_features(config)
    if isinstance(config.model, TwoTowerConfig):
        check_two_tower(config, config.model)
    else:
        check_dlrm(config, config.model)
    _check_tables(config)
    _check_paths(config)
    _check_filter(config)
    _check_training(config)
    check_topology(config.topology)
    check_memory(config.memory)
    check_init(config.train.init, config.train.init_from, list(config.tables))


def metric_names(config: Config) -> list[str]:
    """Return the names of the metrics that an evaluation of this config's model gives."""
    if isinstance(config.model, TwoTowerConfig):
        return [f"{name}@{k}" for k in config.model.top_k for name in ("recall", "ndcg")]
    return list(RANKING_METRICS)


def _check_numbers(config: Config) -> None:
    data, train, optimizer = config.data, config.train, config.optimizer
    limits: dict[str, tuple[float | None, float, float]] = {
        "data.num_streams": (data.num_streams, 1, 2**20),
        "data.window_mib": (data.window_mib, 1, 2**20),
        "data.num_threads": (data.num_threads, 0, 1024),
        "data.prefetch_batches": (data.prefetch_batches, 0, 2**20),
        "data.max_rows": (data.max_rows, 1, _MOST),
        "data.retries": (data.retries, 0, 100),
        "data.max_bad_files": (data.max_bad_files, 0, _MOST),
        "data.max_bad_rows": (data.max_bad_rows, 0, _MOST),
        "train.global_batch_size": (train.global_batch_size, 1, 2**31),
        "train.micro_batch_size": (train.micro_batch_size, 1, _MOST),
        "train.micro_batch_ids": (train.micro_batch_ids, 1, _MOST),
        "train.eval_batch_size": (train.eval_batch_size, 1, 2**31),
        "train.epochs": (train.epochs, 1, _MOST),
        "train.max_steps": (train.max_steps, 1, _MOST),
        "precision.loss_scale": (config.precision.loss_scale, 1, 2.0**24),
        "precision.loss_scale_growth_steps": (config.precision.loss_scale_growth_steps, 1, _MOST),
        "train.max_bad_steps": (train.max_bad_steps, 0, _MOST),
        "train.eval_every_steps": (train.eval_every_steps, 1, _MOST),
        "train.eval_every_epochs": (train.eval_every_epochs, 1, _MOST),
        "train.log_every_steps": (train.log_every_steps, 1, _MOST),
        "train.checkpoint_every_steps": (train.checkpoint_every_steps, 1, _MOST),
        "train.keep_checkpoints": (train.keep_checkpoints, 1, _MOST),
        "train.early_stop.patience": (train.early_stop.patience, 1, _MOST),
        "run.num_threads": (config.run.num_threads, 1, 1024),
        "run.profile_steps": (config.run.profile_steps, 0, 10_000),
        "run.stuck_after_s": (config.run.stuck_after_s, 2, 1e8),  # three years
        "optimizer.schedule.warmup_steps": (optimizer.schedule.warmup_steps, 0, _MOST),
        "optimizer.schedule.final_factor": (optimizer.schedule.final_factor, 0, _LARGE),
        "optimizer.dense.learning_rate": (optimizer.dense.learning_rate, 0, _LARGE),
        "optimizer.dense.weight_decay": (optimizer.dense.weight_decay, 0, _LARGE),
        "optimizer.dense.momentum": (optimizer.dense.momentum, 0, 1),
        "optimizer.dense.clip_norm": (optimizer.dense.clip_norm, 1e-30, _LARGE),
        "seed": (config.seed, 0, _MOST),
    }
    limits |= _optimizer_limits("optimizer.tables", optimizer.tables)
    for name, feature in config.features.items():
        limits[f"features.{name}.max_length"] = (feature.max_length, 1, _MOST)
        limits[f"features.{name}.fill"] = (feature.fill, -_LARGE, _LARGE)
        for i, number in enumerate([*(feature.clip or []), *(feature.boundaries or [])]):
            limits[f"features.{name}.{'clip' if feature.clip else 'boundaries'}[{i}]"] = (number, -_LARGE, _LARGE)
    for name, table in config.tables.items():
        fewest = {IdMappingType.identity: 1, IdMappingType.hash: 2}.get(table.mapping, 3)
        limits[f"tables.{name}.num_embeddings"] = (table.num_embeddings, fewest, 2**40)
        limits[f"tables.{name}.hash_seed"] = (table.hash_seed, 0, _MOST)
        limits[f"tables.{name}.num_hashes"] = (table.num_hashes, 1, 16)
        limits[f"tables.{name}.num_ids"] = (table.num_ids, 1, 2**62)
        limits[f"tables.{name}.min_count"] = (table.min_count, 1, _MOST)
        limits[f"tables.{name}.num_buckets"] = (table.num_buckets, 1, max(1, table.num_embeddings - 2))
        limits[f"tables.{name}.init_range"] = (table.init_range, 0, 65504)  # the largest FP16
        limits[f"tables.{name}.cache_load_factor"] = (table.cache_load_factor, 1e-6, 1)
        if table.optimizer is not None:
            limits |= _optimizer_limits(f"tables.{name}.optimizer", table.optimizer)
    for key, (value, least, most) in limits.items():
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise UserError(f"config key '{key}' must be {bound}, found {value}")
    for key, size in (
        ("train.global_batch_size", train.global_batch_size),
        ("train.eval_batch_size", train.eval_batch_size),
    ):
        if size is not None and size < data.num_streams:
            raise UserError(
                f"config key '{key}' must be at least data.num_streams={data.num_streams}, so that a step takes a row "
                f"of each stream, found {size}"
            )


def _optimizer_limits(key: str, optimizer: TableOptimizerConfig) -> dict[str, tuple[float | None, float, float]]:
    return {
        f"{key}.learning_rate": (optimizer.learning_rate, 0, _LARGE),
        f"{key}.eps": (optimizer.eps, 1e-30, _LARGE),  # 0 / 0 is the step of a row without gradient
        f"{key}.beta1": (optimizer.beta1, 0, 1),
        f"{key}.beta2": (optimizer.beta2, 0, 1),
        f"{key}.weight_decay": (optimizer.weight_decay, 0, _LARGE),
    }


def _check_features(config: Config) -> None:
    if not config.features:
        raise UserError("config key 'features' is empty, and needs at least one feature")
    for name, feature in config.features.items():
        key = f"features.{name}"
        if feature.type is FeatureType.float:
            if feature.table is not None:
                raise UserError(f"config key '{key}.table': a float feature has no table; drop it, or set type: id")
            _check_float(key, feature)
            continue
        _check_id(key, feature)
        if feature.table is None:
            hint = nearest(name, [other for other in config.features if other != name], "features.")
            raise UserError(
                f"config key '{key}.table' is not set, and an id feature needs a table "
                f"(known: {', '.join(config.tables)}; for a number set {key}.type=float){hint}"
            )
        one_of(f"{key}.table", feature.table, config.tables, "table")
    if all(feature.type is not FeatureType.id for feature in config.features.values()):
        raise UserError("config key 'features' has no feature of type id, and needs at least one")


def _check_float(key: str, feature: FeatureConfig) -> None:
    for name in ("max_length", "weights", "boundaries"):
        if getattr(feature, name) is not None:
            raise UserError(f"config key '{key}.{name}' is for features of type id; drop it, or set type: id")
    if feature.nulls is NullPolicy.empty:
        raise UserError(
            f"config key '{key}.nulls' of a float feature is reserved (its fill), mean or refuse, found empty"
        )
    if feature.clip is not None:
        ends = [end for end in feature.clip if end is not None]
        if len(feature.clip) != 2 or not ends or ends != sorted(set(ends)):
            shown = str(feature.clip).replace("None", "null")
            raise UserError(
                f"config key '{key}.clip' must be a least and a greater value, one of which may be null, found {shown}"
            )


def _check_id(key: str, feature: FeatureConfig) -> None:
    for name, given in (
        ("clip", feature.clip is not None),
        ("log1p", feature.log1p),
        ("standardise", feature.standardise),
    ):
        if given:
            raise UserError(f"config key '{key}.{name}' is for features of type float; drop it, or set type: float")
    if feature.nulls is NullPolicy.mean:
        raise UserError(f"config key '{key}.nulls' of an id feature is reserved, empty or refuse, found mean")
    bounds = feature.boundaries
    if bounds is not None and (not bounds or any(a >= b for a, b in pairwise(bounds))):
        raise UserError(f"config key '{key}.boundaries' must be ascending numbers, one at least, found {bounds}")


def _check_tables(config: Config) -> None:
    used = {feature.table for feature in config.features.values()}
    for name, table in config.tables.items():
        key = f"tables.{name}"
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
        _check_mapping(config, name, table)
        _check_state(config.table_optimizer(name), config.table_optimizer_key(name))
        _check_sharding(config, name, table)


def _check_state(optimizer: TableOptimizerConfig, key: str) -> None:
    if optimizer.state_dtype is StateType.FP16 and optimizer.name is not TableOptimizer.partial_rowwise_adam:
        raise UserError(
            f"config key '{key}.state_dtype': FBGEMM keeps FP16 state for partial_rowwise_adam alone, found "
            f"{key}.name={optimizer.name.name}; use FP32, or that"
        )


def _check_sharding(config: Config, name: str, table: TableConfig) -> None:
    optimizer, choice = config.table_optimizer(name), table.sharding_type
    key = config.table_optimizer_key(name)
    if choice in COLUMN_SPLITS and optimizer.name in ROWWISE and not optimizer.allow_column_split:
        raise UserError(
            f"config key 'tables.{name}.sharding_type': {choice.name} splits the rows that {optimizer.name.name} "
            f"averages over, so what is learned would depend on the plan; use row_wise, {key}.name=adagrad, or insist "
            f"with {key}.allow_column_split=true"
        )
    _check_unpooled(config, name, table)
    if table.compute_kernel is ComputeKernel.key_value and table.storage_dir is None:
        raise UserError(
            f"config key 'tables.{name}.storage_dir' is not set, and compute_kernel: key_value needs a folder on a disk"
        )
    if choice is ShardingChoice.data_parallel and table.compute_kernel is not ComputeKernel.fused:
        raise UserError(
            f"config key 'tables.{name}.compute_kernel': a table that every rank holds lies in device memory, found "
            f"{table.compute_kernel.name}; use fused, or another sharding_type"
        )
    if optimizer.weight_decay and optimizer.name in WITHOUT_DECAY:
        raise UserError(
            f"config key '{key}.weight_decay': FBGEMM's kernels of {optimizer.name.name} leave it out without a word, "
            f"found {optimizer.weight_decay}; set it to 0, or use {key}.name=rowwise_adagrad"
        )
    if choice is ShardingChoice.data_parallel and optimizer.weight_decay:
        raise UserError(
            f"config key '{key}.weight_decay': tables that every rank holds are trained without, found "
            f"{optimizer.weight_decay}; set it to 0, or tables.{name}.sharding_type to another"
        )
    if choice is ShardingChoice.data_parallel and optimizer.name not in REPLICATED:
        allowed = ", ".join(each.name for each in REPLICATED)
        raise UserError(
            f"config key 'tables.{name}.sharding_type': tables that every rank holds are trained by {allowed}, found "
            f"{key}.name={optimizer.name.name}; use another sharding_type"
        )


def _check_unpooled(config: Config, name: str, table: TableConfig) -> None:
    unpooled = [feature for feature in config.unpooled_features() if config.features[feature].table == name]
    if not unpooled:
        return
    if table.sharding_type not in UNPOOLED:
        raise UserError(
            f"config key 'tables.{name}.sharding_type': feature '{unpooled[0]}' is looked up id by id, for "
            f"model.attention, which goes with {', '.join(each.name for each in UNPOOLED)}, found "
            f"{table.sharding_type.name}"
        )
    if table.num_hashes > 1 or table.mapping is IdMappingType.quotient_remainder:
        raise UserError(
            f"config key 'tables.{name}.mapping' gives an id several rows, and feature '{unpooled[0]}' is looked up id "
            f"by id, for model.attention; use mapping: hash with num_hashes=1, vocabulary or identity"
        )


def _check_mapping(config: Config, name: str, table: TableConfig) -> None:
    default = TableConfig(num_embeddings=table.num_embeddings, embedding_dim=table.embedding_dim)
    for key, mapping in (
        ("num_hashes", IdMappingType.hash),
        ("num_ids", IdMappingType.quotient_remainder),
        ("min_count", IdMappingType.vocabulary),
        ("num_buckets", IdMappingType.vocabulary),
        ("vocabulary", IdMappingType.vocabulary),
    ):
        if getattr(table, key) != getattr(default, key) and table.mapping is not mapping:
            raise UserError(
                f"config key 'tables.{name}.{key}' is for mapping: {mapping.name}, found {table.mapping.name}; drop "
                f"it, or set tables.{name}.mapping={mapping.name}"
            )
    if table.mapping is IdMappingType.quotient_remainder and table.num_ids is None:
        raise UserError(
            f"config key 'tables.{name}.num_ids' is not set, and mapping: quotient_remainder needs the number of ids "
            f"that are to be told apart"
        )
    if table.mapping is IdMappingType.quotient_remainder and table.num_ids is not None:
        # With q quotients and m remainders there are q * m pairs: most with q and m alike, beside the null row.
        least = 2 + isqrt(4 * table.num_ids - 1)
        if table.num_embeddings < least:
            raise UserError(
                f"config key 'tables.{name}.num_embeddings' is too few for num_ids={table.num_ids}, which takes "
                f"{least} or more, found {table.num_embeddings}"
            )
    for feature, settings in config.features.items():
        if settings.table == name and settings.boundaries and table.mapping is IdMappingType.vocabulary:
            raise UserError(
                f"config key 'tables.{name}.mapping': feature '{feature}' has boundaries, so its ids are 0 … "
                f"{len(settings.boundaries)}; use mapping: identity with num_embeddings={len(settings.boundaries) + 1}"
            )


def _check_paths(config: Config) -> None:
    for key in ("train", "valid", "test", "items"):
        value = getattr(config.data, key)
        paths = value if isinstance(value, list) else [value]
        if key == "train" and value is None:
            raise UserError("config key 'data.train' is empty, and needs a path, a glob or a list of them")
        if value is not None and not (paths and all(isinstance(path, str) and path for path in paths)):
            raise UserError(f"config key 'data.{key}' must be a path, a glob or a list of them, found {value!r}")


def _check_filter(config: Config) -> None:
    given = config.data.filter
    roles = ("train", "valid", "test", "items")
    if isinstance(given, dict):
        for role in given:
            one_of("data.filter", str(role), roles, "dataset")
    expressions = list(given.values()) if isinstance(given, dict) else [given]
    for text in expressions:
        if text is not None and not (isinstance(text, str) and text.strip()):
            raise UserError(
                f"config key 'data.filter' must be an expression such as \"day >= '2026-11-01'\", or a "
                f"section of these by dataset ({', '.join(roles)}), found {text!r}"
            )


def _check_training(config: Config) -> None:
    train, metric = config.train, config.train.early_stop.metric
    if train.compile and any(getattr(config.model, name, 0) > 0 for name in ("dropout", "embedding_dropout")):
        raise UserError(
            "config key 'train.compile': the masks of dropout follow the step, so that each step would be compiled "
            "anew; set model.dropout=0 (and model.embedding_dropout=0), or train.compile=false"
        )
    if config.run.resume and config.run.overwrite:
        raise UserError("run.resume=true and run.overwrite=true exclude each other; keep one of them")
    if metric is not None:
        one_of("train.early_stop.metric", metric, metric_names(config), "metric")
        if not config.data.valid:
            raise UserError("config key 'train.early_stop.metric' needs data.valid, which is not set")
        if train.eval_every_steps is None and train.eval_every_epochs is None:
            raise UserError(
                "config key 'train.early_stop.metric' needs train.eval_every_epochs (or eval_every_steps), which is "
                "not set"
            )
    every = [key for key in ("eval_every_steps", "eval_every_epochs") if getattr(train, key) is not None]
    if len(every) > 1:
        raise UserError(
            "train.eval_every_steps and train.eval_every_epochs exclude each other; set one of them to null"
        )
    if every and not config.data.valid:
        raise UserError(f"config key 'train.{every[0]}' needs data.valid, which is not set")
