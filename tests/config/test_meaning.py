"""Which settings a checkpoint is tied to: each key of a config is refused by name where it differs, or is free."""

import json
import typing
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from recsys.config import Config, TableOptimizerConfig, load_config
from recsys.config.initial import InitConfig, Take
from recsys.config.meaning import changed_inputs, changed_optimizers, meaning, refuse_differences
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError

RANKER = """
data: {train: [a, b], valid: v, label_column: label, filter: {train: x > 1, valid: x > 2}}
features:
  user: {table: user}
  item: {table: item, boundaries: [1.0, 2.0]}
  history: {table: list, max_length: 5, weights: w}
  next: {table: list}
  price: {type: float, clip: [0.0, 1.0]}
  age: {type: float, column: years}
tables:
  user: {num_embeddings: 100, embedding_dim: 8, optimizer: {name: adagrad}}
  item: {num_embeddings: 100, embedding_dim: 8, mapping: identity}
  list: {num_embeddings: 100, embedding_dim: 8, mapping: vocabulary, vocabulary: ids.parquet}
model: {name: dlrm, attention: {history: next}}
train: {early_stop: {metric: auc}, eval_every_steps: 10}
"""
TOWERS = """
data: {train: a, valid: v, items: i}
features: {user: {table: user}, city: {table: user}, age: {type: float}, item: {table: item}, genre: {table: item}}
tables:
  user: {num_embeddings: 100, embedding_dim: 8}
  item: {num_embeddings: 100, embedding_dim: 8}
model: {name: two_tower, user_features: [user, city, age], item_features: [item, genre], item_id: item}
train: {early_stop: {metric: recall@10}, eval_every_steps: 10}
"""

# Every key that may differ from what a run began with, and why nothing that is in its checkpoints means another thing.
FREE = {
    "where a run writes and what it runs on; what is predicted and measured of it": (
        *("run.name", "run.dir", "run.resume", "run.overwrite", "run.stop_file", "run.plan", "run.device"),
        *("run.num_threads", "run.profile_steps", "run.stuck_after_s", "memory.budget", "memory.fit", "memory.allow"),
        *(f"run.track.{name}" for name in ("to", "project", "row_norms", "item_vectors")),
        *("memory.snapshot", "topology.world_size", "topology.local_world_size", "topology.device"),
        *("topology.device_memory", "topology.host_memory", "topology.speeds", "debug"),
    ),
    "paths: the files are told by their footers, those of data.valid where early stopping compares by them": (
        *("data.train", "data.valid", "data.test", "data.items"),
    ),
    "other data than those trained on": ("data.filter.valid", "data.candidates_column"),
    "how data are read, and what is done with those that cannot be": (
        *("data.processes", "data.optional_columns"),
        *("data.num_threads", "data.prefetch_batches", "data.verify_checksums", "data.retries", "data.max_bad_files"),
        *("data.max_bad_rows", "data.drop_last"),
    ),
    "what is published on the way": (
        *("train.publish.dir", "train.publish.every_steps", "train.publish.every_seconds", "train.publish.tables"),
    ),
    "how much at a time, how long, and what happens on the way": (
        *("train.micro_batch_size", "train.micro_batch_ids", "train.eval_batch_size"),
        *(
            "train.epochs",
            "train.max_steps",
            "train.max_bad_steps",
            "train.eval_every_steps",
            "train.eval_every_epochs",
        ),
        *("train.log_every_steps", "train.checkpoint_every_steps", "train.keep_checkpoints", "train.async_checkpoints"),
        *(
            "train.activation_checkpointing",
            "train.activation_offload",
            "train.dense_sharding",
            "train.check_every_step",
        ),
        *("train.compile", "train.early_stop.patience"),
        *("model.top_k", "model.metrics"),
    ),
    "a run that goes on has begun": (
        *("train.init_from", "train.init.tables", "train.init.resize_tables", "train.init.convert_tables"),
        *("train.init.dense", "train.init.optimizers", "train.init.allow_changes", "train.init.grow_vocabularies"),
        *("train.init.evict_after_runs", "train.init.from_parquet", "tables.*.init_range"),
    ),
    "how large a step is, and which way: what is there goes on from where it is": (
        *(f"optimizer.dense.{name}" for name in ("learning_rate", "momentum", "weight_decay", "clip_norm")),
        *("tables.*.l2", "tables.*.l2_all_rows", "tables.*.sparsity"),
        *(
            f"optimizer.schedule.{name}"
            for name in ("name", "warmup_steps", "final_factor", "plateau_factor", "plateau_patience")
        ),
        *(
            f"{section}.{name}"
            for section in ("optimizer.tables", "tables.user.optimizer")
            for name in ("learning_rate", "eps", "l1", "beta1", "beta2", "weight_decay", "state_dtype")
        ),
        *("optimizer.tables.allow_column_split", "tables.user.optimizer.allow_column_split"),
        *("model.dropout", "model.embedding_dropout"),
    ),
    "types of numbers that no checkpoint holds": (
        *("precision.autocast", "precision.loss_scale", "precision.loss_scale_growth_steps", "precision.output_dtype"),
        *("precision.forward_wire", "precision.backward_wire", "precision.tf32", "precision.dense_int8"),
    ),
    "where rows lie and how they are rounded": (
        *("tables.*.sharding_type", "tables.*.compute_kernel", "tables.*.cache_load_factor"),
        *("tables.*.stochastic_rounding",),
    ),
    "how a vocabulary was made, which is kept with the run and told by its digest": (
        *("tables.*.vocabulary", "tables.*.min_count", "tables.list.num_embeddings"),
    ),
}


def load(folder: Path, text: str, *options: str) -> Config:
    (folder / "config.yaml").write_text(text)
    return load_config(folder / "config.yaml", options)


def saved(config: Config) -> dict[str, Any]:
    """What the checkpoint of a run with this config holds."""
    return json.loads(json.dumps(meaning(config)))


def leaves(value: Any, hint: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Every key of a config with its value and type."""
    if is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        found = [(f.name, getattr(value, f.name), hints[f.name]) for f in fields(value) if f.name != "given"]
    elif isinstance(value, dict) and value:
        found = [(name, part, (typing.get_args(hint) or [Any])[-1]) for name, part in value.items()]
    else:
        return [(key, value, hint)]
    return [leaf for name, part, kind in found for leaf in leaves(part, kind, f"{key}.{name}".lstrip("."))]


def other(value: Any, hint: Any) -> Any:
    """Another value of the type."""
    kinds = [kind for kind in (typing.get_args(hint) or [hint]) if kind is not type(None)]
    if value is None:
        kind = hint if typing.get_origin(hint) is list else kinds[0]
        if isinstance(kind, type) and is_dataclass(kind):
            return kind(name=TableOptimizer.sgd) if kind is TableOptimizerConfig else kind()
        if typing.get_origin(kind) is list:
            return [1.5]
        if isinstance(kind, type) and issubclass(kind, Enum):
            return next(iter(kind))
        return {int: 7, float: 0.5, bool: True}.get(kind, "other")
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(each for each in type(value) if each is not value)
    if isinstance(value, list):
        return value[::-1] if len(value) > 1 else [*value, "other"]
    if isinstance(value, dict):
        return {"other": "other"}
    return value + ("other" if isinstance(value, str) else 1)


def changed(config: Config, key: str, hint: Any) -> Config:
    config, names = deepcopy(config), key.split(".")
    parent: Any = config
    for name in names[:-1]:
        parent = parent[name] if isinstance(parent, dict) else getattr(parent, name)
    into = parent if isinstance(parent, dict) else vars(parent)
    into[names[-1]] = other(into[names[-1]], hint)
    return config


def matches(key: str, pattern: str) -> bool:
    return key == pattern or ("*" in pattern and key.startswith("tables.") and key.split(".", 2)[2] == pattern[9:])


def test_a_key_that_came_after_the_checkpoint_counts_as_its_default(tmp_path: Path) -> None:
    before = saved(load(tmp_path, TOWERS))
    del before["model.correct_own"]
    refuse_differences(load(tmp_path, TOWERS), before, "there", None)
    with pytest.raises(UserError, match=r"model\.correct_own' is false, and was true"):
        refuse_differences(load(tmp_path, TOWERS, "model.correct_own=false"), before, "there", None)


@pytest.mark.parametrize("text", [RANKER, TOWERS], ids=["ranker", "towers"])
def test_every_key_is_refused_by_name_or_free(text: str, tmp_path: Path) -> None:
    config = load(tmp_path, text)
    before, unnamed = saved(config), []
    for key, _, hint in leaves(config, Config):
        free = [group for group, patterns in FREE.items() if any(matches(key, pattern) for pattern in patterns)]
        try:
            refuse_differences(changed(config, key, hint), before, "there", None)
            assert free, f"{key} may differ unnoticed: refuse it, or say here why it may"
        except UserError as error:
            assert not free, error
            if f"'{key}" not in str(error) or "train.init_from=there" not in str(error):
                unnamed.append((key, str(error)))
        assert len(free) <= 1, key
    # What a layer reads is told as a whole, and of the filters the one of data.train.
    as_a_whole = {"data.filter.train": "'data.filter' is", "model.user_features": "'features' is ["}
    as_a_whole["model.item_features"] = "'features' is ["
    for key, said in unnamed:
        assert as_a_whole[key] in said


def test_no_key_is_free_by_mistake(tmp_path: Path) -> None:
    """What is listed as free is there: a name that is changed takes its entry along."""
    keys = {key for text in (RANKER, TOWERS) for key, _, _ in leaves(load(tmp_path, text), Config)}
    for patterns in FREE.values():
        for pattern in patterns:
            assert any(matches(key, pattern) for key in keys), pattern


@pytest.mark.parametrize(
    "options, said",
    [
        (("tables.user.hash_seed=1",), "'tables.user.hash_seed' is 1, and was 0, .* set tables.user.hash_seed=0"),
        (("features.user.column=item",), "'features.user.column' is item, and was user"),
        (("features.user.hidden=0.1",), "'features.user.hidden' is 0.1, and was null"),
        (("features.age.column=age", "seed=2"), "'features.age.column' is age, and was years; 'seed' is 2, and was 1"),
        (("optimizer.tables.name=adam",), "'optimizer.tables.name' is adam, and was rowwise_adagrad"),
        (("tables.user.optimizer.name=sgd",), "'tables.user.optimizer.name' is sgd, and was adagrad"),
        (("tables.user.optimizer=null",), "'optimizer.tables.name' is rowwise_adagrad, and was adagrad"),
        (("model.embedding_dim=4",), "'model.embedding_dim' is 4, and was 8"),
        (("features.more={type: float}",), r"'features' is \[price, age, more\], and was \[price, age\]"),
        (("model.attention.history=item",), "'model.attention.history' is item, and was next"),
        (("model.attention.user=next",), "'model.attention.user' is next, and was not set"),
        (("train.early_stop.metric=null",), "'train.early_stop.metric' is null, and was auc"),
    ],
)
def test_what_a_run_that_goes_on_is_told(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    before = saved(load(tmp_path, RANKER))
    with pytest.raises(UserError, match=said):
        refuse_differences(load(tmp_path, RANKER, *options), before, "there", None)


def test_defaults_may_be_spelled_out(tmp_path: Path) -> None:
    before = saved(load(tmp_path, RANKER))
    spelled = ("features.user.column=user", "model.embedding_dim=8", "tables.item.optimizer={name: rowwise_adagrad}")
    refuse_differences(load(tmp_path, RANKER, *spelled), before, "there", None)
    # Early stopping may begin later: there is no best metric to compare with.
    before = saved(load(tmp_path, RANKER, "train.early_stop.metric=null"))
    refuse_differences(load(tmp_path, RANKER, "data.targets_column=x"), before, "there", None)


def test_batches_of_another_size_cut_streams_alike_or_are_refused(tmp_path: Path) -> None:
    def check(size_before: int, size: int, init: InitConfig | None = None) -> None:
        before = saved(load(tmp_path, RANKER, f"train.global_batch_size={size_before}"))
        refuse_differences(load(tmp_path, RANKER, f"train.global_batch_size={size}"), before, "there", init)

    check(64, 1000)
    check(63, 63)
    check(63, 64, InitConfig())
    for sizes in ((64, 63), (63, 64), (63, 126)):
        with pytest.raises(UserError, match=f"'train.global_batch_size' is {sizes[1]}, and was {sizes[0]}"):
            check(*sizes)


def test_the_order_of_features_counts(tmp_path: Path) -> None:
    """A column of the first layer's weights is that of a feature."""
    config = load(tmp_path, RANKER)
    before = saved(config)
    swapped = dict(sorted(config.features.items(), key=lambda pair: pair[0]))  # age before price
    other_order = replace(config, features=swapped)
    with pytest.raises(UserError, match=r"'features' is \[age, price\], and was \[price, age\]"):
        refuse_differences(other_order, before, "there", None)
    assert changed_inputs(before, other_order) == {"bottom.0.weight", "top.0.weight"}
    with pytest.raises(UserError, match=r"'features' is .* train.init.dense=matching"):
        refuse_differences(other_order, before, "there", InitConfig())
    refuse_differences(other_order, before, "there", InitConfig(dense=Take.matching))
    # Floats and ids lie apart.
    floats_first = dict(sorted(config.features.items(), key=lambda pair: pair[1].type.name))
    assert list(floats_first) != list(config.features)
    refuse_differences(replace(config, features=floats_first), before, "there", None)


@pytest.mark.parametrize(
    "options, init, free",
    [
        # What begins anew need not agree.
        (("seed=2", "data.window_mib=1", "data.max_rows=5", "data.shuffle=false"), {}, True),
        (("tables.user.hash_seed=1",), {}, False),
        (("tables.user.hash_seed=1",), {"tables": Take.none}, True),
        (("tables.user.num_embeddings=101",), {"resize_tables": True}, False),  # other hashes
        (("tables.item.num_embeddings=101",), {"resize_tables": True}, True),
        (("features.user.hidden=0.1",), {}, True),
        (("features.user.max_length=3",), {"tables": Take.none}, True),
        (("features.user.max_length=3",), {"dense": Take.none}, False),
        (("features.price.log1p=true",), {"dense": Take.none}, True),
        (("features.price.log1p=true",), {"dense": Take.matching}, False),
        (("model.interaction=dot_and_embeddings",), {"dense": Take.matching}, True),
        (("model.attention.user=next",), {}, True),  # its tensors are told
        (("model.attention.history=item",), {"dense": Take.matching}, False),
        (("optimizer.tables.name=adam",), {}, False),
        (("optimizer.tables.name=adam",), {"optimizers": Take.matching}, True),
        (("optimizer.dense.name=sgd",), {"dense": Take.none}, True),
        # What is allowed by name.
        (("features.price.log1p=true",), {"allow_changes": ["features.price.log1p"]}, True),
        (("features.price.log1p=true",), {"allow_changes": ["features.*"]}, True),
        (("features.price.log1p=true",), {"allow_changes": ["features.age.*"]}, False),
        (("optimizer.tables.name=adam",), {"allow_changes": ["optimizer.tables.name"]}, True),
        (("data.label_column=other",), {}, False),
        (("data.label_column=other",), {"allow_changes": ["data.label_column"]}, True),
    ],
)
def test_what_another_run_may_change(options: Any, init: Any, free: bool, tmp_path: Path) -> None:
    before, config = saved(load(tmp_path, RANKER)), load(tmp_path, RANKER, *options)
    if free:
        refuse_differences(config, before, "there", InitConfig(**init))
    else:
        with pytest.raises(UserError, match=r"allow it with .*train\.init\.allow_changes=\["):
            refuse_differences(config, before, "there", InitConfig(**init))


def test_a_key_that_the_class_has_no_more_cannot_be_set(tmp_path: Path) -> None:
    config = load(tmp_path, RANKER, "seed=2")
    before = saved(config) | {"model.width": 8, "seed": 1}
    with pytest.raises(UserError, match=r"; set seed=1 and give the class of model\.name its key model\.width back"):
        refuse_differences(config, before, "there", None)
    with pytest.raises(UserError, match=r"; give the class of model\.name its key model\.width back, or start a run"):
        refuse_differences(config, saved(config) | {"model.width": 8}, "there", None)


def test_what_is_allowed_must_be_a_key(tmp_path: Path) -> None:
    config = load(tmp_path, RANKER)
    with pytest.raises(UserError, match=r"'features.prize.log1p' is not a key .*did you mean 'features.price.log1p'"):
        refuse_differences(config, saved(config), "there", InitConfig(allow_changes=["features.prize.log1p"]))


def test_optimizers_are_compared_by_table(tmp_path: Path) -> None:
    before = saved(load(tmp_path, RANKER))
    assert not changed_optimizers(before, load(tmp_path, RANKER))
    assert changed_optimizers(before, load(tmp_path, RANKER, "optimizer.tables.name=adam")) == {"item", "list"}
