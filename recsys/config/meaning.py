"""Settings that give rows and numbers of a checkpoint their meaning, and must be the same when it is loaded.

Every key of a config is compared unless it is listed here as free, so a key that is added later is compared too.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from fnmatch import translate
from typing import Any

from recsys.config.choices import FeatureType, IdMappingType
from recsys.config.features import float_features, model_features
from recsys.config.initial import InitConfig, Take
from recsys.config.schema import Config
from recsys.config.values import as_value, flat, plain
from recsys.errors import UserError, nearest

# Keys that may differ when a checkpoint is loaded.
FREE = (
    # where a run writes, what it runs on, and what is predicted and measured of it
    *("run.*", "memory.*", "topology.*", "debug"),
    # which files, since they are compared by their footers; how they are read
    *("data.train", "data.valid", "data.test", "data.items", "data.filter.*", "data.num_threads"),
    *("data.processes", "data.optional_columns"),
    *("data.prefetch_batches", "data.verify_checksums", "data.retries", "data.max_bad_*", "data.drop_last"),
    "data.candidates_column",
    # how fast and in what micro-batches to train, what is saved, and types of numbers that are not saved
    *("train.eval_batch_size", "train.micro_batch_*", "train.epochs", "train.max_*steps", "train.*_every_*"),
    *("train.keep_checkpoints", "train.async_checkpoints", "train.activation_checkpointing", "train.compile"),
    *("train.activation_offload", "train.dense_sharding", "train.check_every_step", "train.publish.*"),
    *("train.init_from", "train.init.*", "train.early_stop.patience", "optimizer.schedule.*", "precision.*"),
    *(f"*optimizer*.{name}" for name in ("learning_rate", "eps", "l1", "beta1", "beta2", "momentum", "weight_decay")),
    *("*optimizer*.state_dtype", "*optimizer*.allow_column_split", "optimizer.dense.clip_norm"),
    # of tables: where their rows are, and their first weights; ids of a vocabulary are compared by its digest
    *("tables.*.sharding_type", "tables.*.compute_kernel", "tables.*.cache_load_factor", "tables.*.min_count"),
    *("tables.*.stochastic_rounding", "tables.*.init_range", "tables.*.l2", "tables.*.l2_all_rows"),
    *("tables.*.sparsity*", "tables.*.vocabulary"),
)
# Keys that a run that goes on must keep, and one that starts from its weights need not: they give their meaning to the
# position in the data and the best metric so far, or say how weights are read.
_OF_ONE_RUN = (
    *("seed", "data.shuffle", "data.num_streams", "data.window_mib", "data.max_rows", "data.filter"),
    *("data.keep_negatives", "train.global_batch_size", "tables.*.quantize", "train.distill*", "features.*.hidden"),
)
_STOPPING = ("train.early_stop.metric", "data.targets_column", "data.seen_column")
# Keys that change the shape of a tensor, which is compared when tensors are loaded, with options of its own.
_SHAPES = ("tables.*.data_type", "tables.*.embedding_dim", "tables.*.projected_dim", "features.*.dim")
_INPUTS = "inputs."
_NOT_SET = "not set"


def meaning(config: Config) -> dict[str, Any]:
    """Return the settings that are compared, by full key, with defaults filled in, as JSON holds them.

    `inputs.PARAMETER` holds the features that a layer of the dense part reads, in order.
    """
    content = asdict(replace(config, given=(None, None)))  # which are as large as all keys
    content.pop("given")
    content["optimizer"].pop("tables")
    for name, table in content["tables"].items():
        table["optimizer"] = asdict(config.table_optimizer(name))
        if config.tables[name].mapping is IdMappingType.vocabulary:
            table.pop("num_embeddings")  # a bound
        if table["kept_rows"] is not None:
            table["kept_rows"] = "a file"  # its content is in the checkpoint, like the ids of a vocabulary
    for name, feature in content["features"].items():
        feature["column"] = feature["column"] or name
        feature["integers"] = feature["integers"] or None  # as in a checkpoint from before it was a key
    if isinstance(config.data.filter, dict):
        content["data"]["filter"] = config.data.filter.get("train")
    content["model"] = config.model.meaning(config)
    settings = dict(flat("", plain(content)))
    is_free = _pattern([*FREE, *(f"model.{key}" for key in config.model.free)])
    return {key: value for key, value in settings.items() if not is_free.match(key)} | {
        f"{_INPUTS}{layer}": names for layer, names in _inputs(config).items()
    }


def changed_inputs(saved: dict[str, Any], config: Config) -> set[str]:
    """Return the dense parameters that read other features than in a checkpoint, or the same in another order.

    Args:
        saved: the `meaning` of the config that wrote it.
    """
    return {layer for layer, names in _inputs(config).items() if saved.get(_INPUTS + layer, names) != names}


def changed_optimizers(saved: dict[str, Any], config: Config) -> set[str]:
    """Return the tables whose optimizer differs from that in a checkpoint's `meaning`."""
    names = {table: config.table_optimizer(table).name.name for table in config.tables}
    return {table for table, name in names.items() if saved.get(f"tables.{table}.optimizer.name", name) != name}


def refuse_differences(config: Config, saved: dict[str, Any], path: object, init: InitConfig | None) -> None:
    """Raise a UserError if rows or numbers of a checkpoint mean something else in this config.

    Args:
        saved: the `meaning` of the config that wrote it. path: of the checkpoint, for messages.
        init: differences allowed to a run that starts from its weights; None: the run resumes.

    Raises:
        UserError: names each such key, its value here and there, and what to set.
    """
    here = meaning(config)
    # A key of the model that the checkpoint lacks was added later, with a default that changes nothing.
    defaults = dict(flat("model", plain(asdict(type(config.model)()))))
    saved = {**{key: value for key, value in defaults.items() if key in here}, **saved}
    changed = {key: _shown_key(key, config) for key in {**here, **saved} if here.get(key) != saved.get(key)}
    free = _pattern(_free(config, saved, init))
    if init is not None:
        _check_allowed(init, [*here, *saved, *(_shown_key(key, config) for key in here)])
    allowed = _pattern(init.allow_changes if init else ())
    shown_values: dict[str, tuple[str, str]] = {}
    for key, shown in changed.items():
        if not (free.match(key) or allowed.match(key) or allowed.match(shown)):
            shown_values.setdefault(shown, (_shown(here, key), _shown(saved, key)))
    if not shown_values:
        return
    differences = "; ".join(f"'{key}' is {new}, and was {old}" for key, (new, old) in list(shown_values.items())[:8])
    more = f"; and {len(shown_values) - 8} more" if len(shown_values) > 8 else ""
    before = {key: old for key, (_, old) in list(shown_values.items())[:8] if key != "features" and old != _NOT_SET}
    raise UserError(
        f"config key {differences}{more}, where checkpoint '{path}' was trained, so its rows and numbers would "
        f"mean something else; {_back(before, config)}, or {_advice(path, list(shown_values), init)}"
    )


def _back(before: Mapping[str, str], config: Config) -> str:
    """Return how to give keys the values that they had before."""
    # For a model of the user's own, whose class may have changed since.
    gone = [key for key in before if key.startswith("model.") and not hasattr(config.model, key.split(".")[1])]
    # A shell would take the quotes away that YAML needs.
    values = {key: shlex.quote(value) if value.startswith('"') else value for key, value in before.items()}
    settings = " ".join(f"{key}={value}" for key, value in values.items() if key not in gone)
    class_back = f"give the class of model.name its key {', '.join(gone)} back" if gone else ""
    set_back = f"set {settings or 'them as they were'}" if settings or not gone else ""
    return " and ".join(filter(None, (set_back, class_back)))


def _advice(path: object, keys: list[str], init: InitConfig | None) -> str:
    if init is None:
        source = shlex.quote(as_value(path))
        return f"start a run of its own with train.init_from={source}, to which train.init.* may allow more"
    options = []
    if "features" in keys:
        options.append("train.init.dense=matching, with which layers that read other features start from scratch")
    if any(key.endswith("optimizer.name") or key.startswith("optimizer.") for key in keys):
        options.append("train.init.optimizers=matching, with which changed optimizers start from scratch")
    options.append(f"train.init.allow_changes=[{','.join(keys)}]")
    return f"allow it with {' or '.join(options)}"


def _check_allowed(init: InitConfig, keys: list[str]) -> None:
    for pattern in init.allow_changes:
        if not any(map(_pattern([pattern]).match, keys)):
            raise UserError(
                f"config key 'train.init.allow_changes': '{pattern}' is not a key that is compared"
                f"{nearest(pattern, keys)}; remove it"
            )


def _free(config: Config, saved: dict[str, Any], init: InitConfig | None) -> list[str]:
    """Return patterns of keys that are not compared."""
    tables = {key.split(".")[1] for key in saved if key.startswith("tables.")}
    # A table that only one config has is compared by its tensors, a feature by the layer that reads it.
    common = tables & set(config.tables)
    free = [f"tables.{name}.*" for name in tables ^ set(config.tables)]
    features = {key.split(".")[1] for key in saved if key.startswith("features.")}
    free += [f"features.{name}.*" for name in features ^ set(config.features)]
    if saved.get("train.early_stop.metric") is None:
        free += _STOPPING
    if init is None:
        sizes = config.train.global_batch_size, saved.get("train.global_batch_size", 1)
        # The streams are then equally long, whatever the rows of a step.
        if not any(size % config.data.num_streams for size in sizes):
            free.append("train.global_batch_size")
        return free
    free += [*_OF_ONE_RUN, *_STOPPING, *_SHAPES, *(f"model.{key}" for key in config.model.shapes)]
    # What is not loaded need not agree.
    loaded = common if init.tables is not Take.none else set()
    free += [f"tables.{name}.*" for name in config.tables if name not in loaded]
    free += [f"tables.{n}.num_embeddings" for n, t in config.tables.items() if t.mapping is IdMappingType.identity]
    for name, feature in config.features.items():
        if init.dense is Take.none if feature.type is FeatureType.float else feature.table not in loaded:
            free.append(f"features.{name}.*")
    # An entry of a mapping in `model` that only one config has is compared by the tensors of its layer.
    free += [key for key in meaning(config).keys() ^ saved.keys() if re.match(r"model\.\w+\.", key)]
    if init.dense is not Take.all:
        free += [f"{_INPUTS}*", "model.interaction"]
    if init.dense is Take.none:
        free.append("model.*")
    if init.optimizers is not Take.all:
        free.append("tables.*.optimizer.name")
    if init.optimizers is not Take.all or init.dense is Take.none:
        free.append("optimizer.dense.name")
    return free


def _inputs(config: Config) -> dict[str, list[str]]:
    """Return the features that a layer reads side by side, by its parameter; vectors as NAME[DIM]."""
    inputs = config.model.layer_inputs(model_features(config), float_features(config))
    dims = {name: feature.dim for name, feature in config.features.items() if feature.dim is not None}
    return {layer: [f"{n}[{dims[n]}]" if n in dims else n for n in names] for layer, names in inputs.items()}


def _pattern(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


def _shown_key(key: str, config: Config) -> str:
    """Return a key of `meaning` as a user writes it in a config."""
    if key.startswith(_INPUTS):
        return "features"
    section, _, below = key.partition(".")
    name, _, below = below.partition(".")
    if section == "tables" and below.startswith("optimizer.") and name in config.tables:
        return f"{config.table_optimizer_key(name)}.{below.removeprefix('optimizer.')}"
    return key


def _shown(settings: dict[str, Any], key: str) -> str:
    value = settings.get(key, _NOT_SET)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return f"[{', '.join(value)}]"
    return as_value(value) if isinstance(value, str) else json.dumps(value)
