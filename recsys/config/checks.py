"""Checks across keys: each failure is one sentence with the full key, what is allowed and the nearest right name."""

from itertools import pairwise
from math import isqrt

from recsys.config.bounds import LARGE, check_bounds, check_number
from recsys.config.choices import (
    COLUMN_SPLITS,
    UNPOOLED,
    ComputeKernel,
    DataType,
    FeatureType,
    IdMappingType,
    NullPolicy,
    ShardingChoice,
)
from recsys.config.compression_checks import check_compression, check_publishing
from recsys.config.experts import check_experts, expert_tables
from recsys.config.features import id_features
from recsys.config.initial import check_init
from recsys.config.model_checks import check_model, gives_several_rows
from recsys.config.names import check_metric_name, check_names, one_of
from recsys.config.optimizer_checks import check_optimizers, check_replicated
from recsys.config.schema import Config, FeatureConfig, TableConfig
from recsys.config.topology import check_topology, num_bytes
from recsys.errors import UserError, nearest

_WIDEST_ROW = 2048  # of FBGEMM's kernels
_LEAST_FP8_RANGE = 2**-8  # e4m3 rounds what is below 2^-10 to 0: a quarter of the weights


def check_config(config: Config) -> None:
    """Refuse a config whose parts do not fit together.

    Raises:
        UserError: names the key, what was found, what is allowed and what to do.
    """
    check_names(config)
    check_bounds(config)
    _check_numbers(config)
    _check_features(config)
    check_model(config)
    _check_tables(config)
    check_optimizers(config)
    _check_paths(config)
    _check_filter(config)
    _check_training(config)
    check_topology(config.topology)
    check_publishing(config)
    if config.memory.budget is not None:
        num_bytes("memory.budget", config.memory.budget)
    for table in config.train.init.from_parquet:
        one_of("train.init.from_parquet", table, config.tables, "table")
    check_init(config.train.init, config.train.init_from)


def _check_numbers(config: Config) -> None:
    """Refuse numbers whose bounds depend on other keys."""
    for name, feature in config.features.items():
        for key in ("clip", "boundaries"):
            for i, number in enumerate(getattr(feature, key) or []):
                check_number(f"features.{name}.{key}[{i}]", number, -LARGE, LARGE)
    for name, table in config.tables.items():
        fewest = {IdMappingType.identity: 1, IdMappingType.hash: 2}.get(table.mapping, 3)
        if table.kept_rows is not None:
            fewest = 2  # the null row, and the one that all pruned ones share
        check_number(f"tables.{name}.num_embeddings", table.num_embeddings, fewest, 2**40)
        check_number(f"tables.{name}.num_buckets", table.num_buckets, 1, max(1, table.num_embeddings - 2))
    for key in ("global_batch_size", "eval_batch_size"):
        size = getattr(config.train, key)
        if size is not None and size < config.data.num_streams:
            raise UserError(
                f"config key 'train.{key}' must be at least data.num_streams={config.data.num_streams}, so that a step "
                f"takes a row of each stream, found {size}"
            )


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
        if feature.hidden is not None:
            _check_hidden(key, feature, config.tables[feature.table])
    if not id_features(config):
        raise UserError("config key 'features' has no feature of type id, and needs at least one")


def _check_float(key: str, feature: FeatureConfig) -> None:
    for name in ("max_length", "weights", "boundaries", "cross", "separator", "integers", "hidden"):
        if getattr(feature, name) not in (None, False):
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
                f"config key '{key}.clip' must be a lower and an upper bound, one of which may be null, found {shown}"
            )


def _check_id(key: str, feature: FeatureConfig) -> None:
    for name in ("dim", "fill", "clip", "log1p", "standardise"):
        if getattr(feature, name) not in (None, False):
            raise UserError(f"config key '{key}.{name}' is for features of type float; drop it, or set type: float")
    if feature.cross is not None:
        _check_cross(key, feature)
    if feature.separator is not None:
        _check_separator(key, feature)
    elif feature.integers:
        raise UserError(
            f"config key '{key}.integers' is for ids in texts, and {key}.separator is not set; set it, or drop {key}."
            f"integers"
        )
    if feature.nulls is NullPolicy.mean:
        raise UserError(f"config key '{key}.nulls' of an id feature is reserved, empty or refuse, found mean")
    bounds = feature.boundaries
    if bounds is not None and (not bounds or any(a >= b for a, b in pairwise(bounds))):
        raise UserError(f"config key '{key}.boundaries' must be one or more ascending numbers, found {bounds}")


def _check_separator(key: str, feature: FeatureConfig) -> None:
    if not feature.separator:
        raise UserError(
            f"config key '{key}.separator' is empty, but must be what stands between two ids; YAML needs quotes around "
            f"some signs: '\"|\"'"
        )
    for name, why in (
        ("cross", "one id a row"),
        ("boundaries", "a column of numbers"),
        ("weights", "lists in the data"),
    ):
        if getattr(feature, name) is not None:
            raise UserError(
                f"config key '{key}.{name}' needs {why}, but {key}.separator makes lists of texts; drop one"
            )


def _check_hidden(key: str, feature: FeatureConfig, table: TableConfig) -> None:
    for name in ("max_length", "weights", "separator"):
        if getattr(feature, name) is not None:
            raise UserError(
                f"config key '{key}.{name}' cannot be combined with {key}.hidden, which is for one id a row, without a "
                f"weight; drop one of the two"
            )
    if feature.nulls is NullPolicy.refuse:
        raise UserError(
            f"config key '{key}.nulls' is refuse, but {key}.hidden makes nulls; set it to reserved or empty"
        )
    if feature.nulls is NullPolicy.reserved and table.mapping is IdMappingType.identity:
        raise UserError(
            f"config key '{key}.hidden': with mapping: identity a null has the row of id 0 in tables.{feature.table}; "
            f"set tables.{feature.table}.mapping=vocabulary, or {key}.nulls=empty"
        )


def _check_cross(key: str, feature: FeatureConfig) -> None:
    columns = feature.cross or []
    if len(columns) < 2 or len(set(columns)) < len(columns):
        raise UserError(f"config key '{key}.cross' must name two columns or more, each once, found {columns}")
    for name in ("column", "weights", "boundaries", "max_length"):
        if getattr(feature, name) is not None:
            raise UserError(
                f"config key '{key}.{name}' cannot be combined with {key}.cross, which gives one id a row; drop it"
            )


def _check_tables(config: Config) -> None:
    check_experts(config)
    used = {table for f in config.features.values() if f.table for table in expert_tables(config, f.table)}
    for name, table in config.tables.items():
        key = f"tables.{name}"
        if name not in used:
            raise UserError(
                f"config key '{key}': no feature uses this table{nearest(name, used)}"
                f" (name it in a feature's table, or remove it: {key}=null)"
            )
        if not 4 <= table.embedding_dim <= _WIDEST_ROW or table.embedding_dim % 4:
            raise UserError(
                f"config key '{key}.embedding_dim' must be a multiple of 4, from 4 to {_WIDEST_ROW}, "
                f"found {table.embedding_dim}"
            )
        bound = table.num_embeddings**-0.5 if table.init_range is None else table.init_range
        if table.data_type is DataType.FP8 and 0 < bound < _LEAST_FP8_RANGE:
            raise UserError(
                f"config key '{key}.init_range': FP8 has no number between 0 and 2^-9, so weights within "
                f"±{bound:.2g} would start as zeros; set it to {_LEAST_FP8_RANGE} or more, or {key}.data_type=FP16"
            )
        _check_mapping(config, name, table)
        check_sharding(config, name, table)


def check_sharding(config: Config, name: str, table: TableConfig) -> None:
    """Raise a UserError if a table's optimizer, kernel or features do not go with its sharding type."""
    optimizer, choice = config.table_optimizer(name), table.sharding_type
    key = config.table_optimizer_key(name)
    if choice in COLUMN_SPLITS and optimizer.name.is_row_wise and not optimizer.allow_column_split:
        raise UserError(
            f"config key 'tables.{name}.sharding_type': {choice.name} splits the rows that {optimizer.name.name} "
            f"sums over, so what is learned would depend on the plan; use row_wise or {key}.name=adagrad, or "
            f"allow it with {key}.allow_column_split=true"
        )
    if table.l2_all_rows or choice is ShardingChoice.data_parallel:
        check_replicated(config, name, table)
    _check_unpooled(config, name, table)
    check_compression(config, name, table)
    if optimizer.name.value.path is None and table.compute_kernel is not ComputeKernel.fused:
        raise UserError(
            f"config key 'tables.{name}.compute_kernel': {optimizer.name.name} trains tables in device memory, found "
            f"{table.compute_kernel.name}; use fused, or another {key}.name"
        )


def _check_unpooled(config: Config, name: str, table: TableConfig) -> None:
    unpooled = [feature for feature in config.unpooled_features() if config.features[feature].table == name]
    if not unpooled:
        return
    if table.sharding_type not in UNPOOLED:
        raise UserError(
            f"config key 'tables.{name}.sharding_type': model {config.model.name} looks up "
            f"feature '{unpooled[0]}' id by id, which works with {', '.join(choice.name for choice in UNPOOLED)}, "
            f"found {table.sharding_type.name}"
        )
    if gives_several_rows(table):
        raise UserError(
            f"config key 'tables.{name}.mapping' gives an id several rows, but model {config.model.name} looks "
            f"up feature '{unpooled[0]}' id by id; use mapping: hash with num_hashes=1, vocabulary or identity"
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
            f"config key 'tables.{name}.num_ids' is not set, and mapping: quotient_remainder needs the number of "
            f"distinct ids"
        )
    if table.mapping is IdMappingType.quotient_remainder and table.num_ids is not None and table.kept_rows is None:
        # q quotients and m remainders give q * m pairs, most if q and m are about equal; one more row is the null row.
        least = 2 + isqrt(4 * table.num_ids - 1)
        if table.num_embeddings < least:
            raise UserError(
                f"config key 'tables.{name}.num_embeddings' is too few for num_ids={table.num_ids}, which needs "
                f"{least} or more, found {table.num_embeddings}"
            )
    for feature, settings in config.features.items():
        makes_texts = settings.separator is not None and not settings.integers
        if settings.table == name and makes_texts and table.mapping is IdMappingType.identity:
            raise UserError(
                f"config key 'tables.{name}.mapping': identity takes integers, but features.{feature}.separator makes "
                f"lists of texts; set features.{feature}.integers=true, or use mapping: hash or vocabulary"
            )
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
    setting = config.data.filter
    roles = ("train", "valid", "test", "items")
    if isinstance(setting, dict):
        for role in setting:
            one_of("data.filter", str(role), roles, "dataset")
    expressions = list(setting.values()) if isinstance(setting, dict) else [setting]
    for text in expressions:
        if text is not None and not (isinstance(text, str) and text.strip()):
            raise UserError(
                f"config key 'data.filter' must be an expression such as \"day >= '2026-11-01'\", or a "
                f"section of these by dataset ({', '.join(roles)}), found {text!r}"
            )


def _check_training(config: Config) -> None:
    train, metric = config.train, config.train.early_stop.metric
    if train.compile and any(getattr(config.model, name, None) for name in ("dropout", "embedding_dropout")):
        raise UserError(
            "config key 'train.compile': dropout masks depend on the step, so each step would be compiled again; "
            "set model.dropout=0 (and model.embedding_dropout=0), or train.compile=false"
        )
    if config.run.resume and config.run.overwrite:
        raise UserError("run.resume=true and run.overwrite=true exclude each other; keep one of them")
    if metric is not None:
        check_metric_name("config key 'train.early_stop.metric'", metric, config.model.metric_names(config))
        if not config.data.valid:
            raise UserError("config key 'train.early_stop.metric' needs data.valid, which is not set")
        if train.eval_every_steps is None and train.eval_every_epochs is None:
            raise UserError(
                "config key 'train.early_stop.metric' needs train.eval_every_epochs (or eval_every_steps), which is "
                "not set"
            )
    publish = train.publish
    if publish.dir is not None and (publish.every_steps is None) == (publish.every_seconds is None):
        raise UserError("config key 'train.publish.dir' needs one of train.publish.every_steps and every_seconds")
    every = [key for key in ("eval_every_steps", "eval_every_epochs") if getattr(train, key) is not None]
    if len(every) > 1:
        raise UserError(
            "train.eval_every_steps and train.eval_every_epochs exclude each other; set one of them to null"
        )
    if every and not config.data.valid:
        raise UserError(f"config key 'train.{every[0]}' needs data.valid, which is not set")
