"""Optimizers of the tables (in backward) and of the dense part, and one schedule for both."""

import math
import pydoc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from recsys.config import Config, OptimizerConfig, Schedule
from recsys.config.choices import DenseOptimizer, StateType


class _StateTypes(dict[str, SparseType]):
    """Types by name of the state, as FBGEMM takes them, that torchrec can group tables by."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((name, kind.value) for name, kind in self.items())))


def attach_table_optimizers(parameters: Mapping[str, torch.nn.Parameter], config: Config) -> None:
    """Mark the tables, before they are sharded, to be updated in the backward pass by FBGEMM.

    Args:
        parameters: weights by table.
    """
    for table, parameter in parameters.items():
        settings = config.table_optimizer(table)
        rule = settings.name.value
        arguments: dict[str, Any] = {name: getattr(settings, name) for name in rule.numbers}
        arguments["lr"] = settings.learning_rate
        if settings.weight_decay:
            arguments["weight_decay"] = settings.weight_decay
        if settings.state_dtype is StateType.FP16:
            arguments["optimizer_state_dtypes"] = _StateTypes(momentum1=SparseType.FP16)
        apply_optimizer_in_backward(pydoc.locate(rule.path), [parameter], arguments)
        if settings.weight_decay and rule.decay_has_modes:
            # FBGEMM has three kinds for it and takes none by default. torchrec hands on what stands here when it
            # shards; its own class knows no such argument.
            arguments["weight_decay_mode"] = WeightDecayMode.DECOUPLE


def build_dense_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the dense part."""
    dense = config.dense
    settings: dict[str, Any] = {"lr": dense.learning_rate, "weight_decay": dense.weight_decay}
    if dense.name is DenseOptimizer.sgd:
        settings["momentum"] = dense.momentum
    if dense.name is DenseOptimizer.lamb:
        from pytorch_optimizer import Lamb  # here, because it takes a second

        return Lamb(model.parameters(), **settings)
    kinds: dict[DenseOptimizer, type[torch.optim.Optimizer]] = {
        DenseOptimizer.adam: torch.optim.Adam,
        DenseOptimizer.adamw: torch.optim.AdamW,
        DenseOptimizer.adagrad: torch.optim.Adagrad,
        DenseOptimizer.sgd: torch.optim.SGD,
        DenseOptimizer.adafactor: torch.optim.Adafactor,
    }
    if dense.name is not DenseOptimizer.adafactor:
        settings["fused"] = True  # one kernel in place of ten
    return kinds[dense.name](model.parameters(), **settings)


class LearningRate:
    """Sets both learning rates as a function of the step alone, so that a resumed run goes on as it would have.

    Args:
        num_steps: of the whole run, for the shape of linear and cosine.
        tables: for each group of tables its configured rate, and what sets the rate of its next updates.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        num_steps: int,
        tables: Iterable[tuple[float, Callable[[float], None]]],
        dense: torch.optim.Optimizer,
    ) -> None:
        self._config = config
        self._num_steps = num_steps
        self._tables, self._dense = list(tables), dense

    def factor(self, step: int) -> float:
        """Return the share of the configured learning rates that step `step` (from 0) trains with."""
        schedule = self._config.schedule
        if step < schedule.warmup_steps:
            return (step + 1) / schedule.warmup_steps
        progress = (step - schedule.warmup_steps) / max(1, self._num_steps - 1 - schedule.warmup_steps)
        progress = min(1.0, progress)
        if schedule.name is Schedule.constant:
            return 1.0
        if schedule.name is Schedule.linear:
            return 1.0 + (schedule.final_factor - 1.0) * progress
        return schedule.final_factor + (1 - schedule.final_factor) * (1 + math.cos(math.pi * progress)) / 2

    def set(self, step: int) -> None:
        """Make the next backward and optimizer step those of step `step`."""
        factor = self.factor(step)
        for group in self._dense.param_groups:
            group["lr"] = self._config.dense.learning_rate * factor
        for rate, set_rate in self._tables:
            set_rate(rate * factor)
