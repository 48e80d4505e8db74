"""Settings that have no effect because of another key; a run and a dry run report them at their start."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from recsys.config.schema import (
    Config,
    DenseOptimizerConfig,
    EarlyStopConfig,
    FeatureConfig,
    PrecisionConfig,
    ScheduleConfig,
    TableConfig,
    TableOptimizerConfig,
)
from recsys.config.serving import DistillConfig, PublishConfig
from recsys.config.values import plain

# By section and key: as `ModelConfig.deciding`.
_DECIDING: dict[type, Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    DenseOptimizerConfig: {"momentum": ("name", ("sgd",))},
    ScheduleConfig: {
        "final_factor": ("name", ("linear", "cosine")),
        "plateau_factor": ("name", ("plateau",)),
        "plateau_patience": ("name", ("plateau",)),
    },
    PrecisionConfig: {"loss_scale": ("autocast", ("fp16",)), "loss_scale_growth_steps": ("autocast", ("fp16",))},
    EarlyStopConfig: {"patience": ("metric", ())},
    PublishConfig: {"every_steps": ("dir", ()), "every_seconds": ("dir", ()), "tables": ("dir", ())},
    DistillConfig: {"scores": ("teacher", ())},
    FeatureConfig: {"keep": ("max_length", ()), "fill": ("nulls", ("reserved",))},
    TableConfig: {"stochastic_rounding": ("data_type", ("FP16", "FP8"))},
}
_CACHES = {"cache_load_factor": ("compute_kernel", ("fused_uvm_caching",))}  # which memory.fit may choose


def idle_settings(config: Config) -> list[str]:
    """Return a sentence for each setting that differs from its default, and has no effect because of another one."""
    sections = {
        "model": config.model,
        "optimizer.dense": config.optimizer.dense,
        "optimizer.schedule": config.optimizer.schedule,
        "precision": config.precision,
        "train.early_stop": config.train.early_stop,
        "train.publish": config.train.publish,
        **({} if config.train.distill is None else {"train.distill": config.train.distill}),
        **{f"tables.{name}": table for name, table in config.tables.items()},
        **{f"features.{name}": feature for name, feature in config.features.items() if feature.expert_of is None},
    }
    of_tables = _DECIDING[TableConfig] if config.memory.fit else {**_DECIDING[TableConfig], **_CACHES}
    deciding = {**_DECIDING, TableConfig: of_tables, type(config.model): config.model.deciding}
    idle = [sentence for key, section in sections.items() for sentence in _idle(key, section, deciding[type(section)])]
    for key, section in {config.table_optimizer_key(n): config.table_optimizer(n) for n in config.tables}.items():
        unread = {"eps", "beta1", "beta2"} - set(section.name.value.numbers)
        idle += _idle(key, section, {number: ("name", (None,)) for number in sorted(unread)})
    if all(table.optimizer for table in config.tables.values()) and config.optimizer.tables != TableOptimizerConfig():
        idle.append("optimizer.tables changes nothing, since each table has an optimizer of its own")
    if config.train.activation_checkpointing and not config.model.has_mlps():
        idle.append("train.activation_checkpointing=true changes nothing, since the model has no MLP")
    return idle


def _idle(path: str, section: Any, deciding: Mapping[str, tuple[str, tuple[Any, ...]]]) -> Iterator[str]:
    for field in dataclasses.fields(section):
        if field.name not in deciding:
            continue
        other, values = deciding[field.name]
        own, decides = (plain(getattr(section, key)) for key in (field.name, other))
        is_read = decides in values if values else bool(decides)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if not is_read and own != plain(default):
            yield f"{path}.{field.name}={_shown(own)} changes nothing with {path}.{other}={_shown(decides)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
