"""Optimizers of the tables (in backward) and of the dense part, and one schedule for both."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.optim.optimizers import SGD as TableSGD
from torchrec.optim.optimizers import Adagrad as TableAdagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys.config import OptimizerConfig, Schedule
from recsys.config.schema import DenseOptimizer, TableOptimizer


def attach_table_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> None:
    """Mark the tables, before they are sharded, to be updated in the backward pass by FBGEMM."""
    tables = config.tables
    settings: dict[str, Any] = {"lr": tables.learning_rate}
    if tables.name is not TableOptimizer.sgd:
        settings["eps"] = tables.eps
    kinds = {
        TableOptimizer.rowwise_adagrad: RowWiseAdagrad,
        TableOptimizer.adagrad: TableAdagrad,
        TableOptimizer.sgd: TableSGD,
    }
    for parameter in parameters:
        # A copy for each: torchrec changes the dictionary that it is given.
        apply_optimizer_in_backward(kinds[tables.name], [parameter], dict(settings))


def build_dense_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the dense part."""
    dense = config.dense
    settings: dict[str, Any] = {"lr": dense.learning_rate, "weight_decay": dense.weight_decay}
    kinds: dict[DenseOptimizer, type[torch.optim.Optimizer]] = {
        DenseOptimizer.adam: torch.optim.Adam,
        DenseOptimizer.adamw: torch.optim.AdamW,
        DenseOptimizer.adagrad: torch.optim.Adagrad,
        DenseOptimizer.sgd: torch.optim.SGD,
    }
    return kinds[dense.name](model.parameters(), **settings)


class LearningRate:
    """Sets both learning rates as a function of the step alone, so that a resumed run goes on as it would have.

    Args:
        num_steps: of the whole run, for the shape of linear and cosine.
    """

    def __init__(
        self, config: OptimizerConfig, num_steps: int, fused: torch.optim.Optimizer, dense: torch.optim.Optimizer
    ) -> None:
        self._config = config
        self._num_steps = num_steps
        self._fused, self._dense = fused, dense

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
        for group in self._fused.param_groups:
            group["lr"] = self._config.tables.learning_rate * factor
        self._fused.step()  # hands the rate on to FBGEMM; the tables themselves change in backward only
