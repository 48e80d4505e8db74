"""Building the sharded model with its optimizers from a config and its datasets."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys.checkpoint import Tensors
from recsys.data.inputs import Inputs
from recsys.errors import UserError
from recsys.models.halves import is_in_halves, sum_in_halves
from recsys.runtime.live import Task
from recsys.runtime.machine import topology_of
from recsys.step.build import build_step
from recsys.step.dense_shards import DenseShards, shards_dense
from recsys.step.optim import build_dense_optimizer
from recsys.tables.shard import plan_tables, shard_model, shards_of
from recsys.tables.spec import Shard, fill_initial, init_range, local_shards
from recsys.tables.updates import TableUpdates, table_tensors


@dataclass
class Built:
    """A sharded model with its optimizers.

    Attributes:
        shards: every shard of every table, on any rank.
    """

    model: DistributedModelParallel
    shards: list[Shard]
    dense_optimizer: torch.optim.Optimizer
    table_updates: TableUpdates
    tensors: Tensors

    @property
    def step(self) -> Any:
        """The unsharded training step inside `model`."""
        return self.model.module

    @property
    def dense_model(self) -> torch.nn.Module:
        """The dense part of the model."""
        return self.step.dense.model


class Publishes(Protocol):
    """Publishes the model during training, inside a `with` block; see `recsys.serving.publish.Publisher`."""

    def __enter__(self) -> Any: ...
    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None: ...
    def asks(self, step: int) -> bool: ...
    def publish(self, step: int, save: Callable[[], Path | UserError]) -> None: ...


def build_model(inputs: Inputs) -> Built:
    """Build, plan, shard and initialise the model of the config; the same weights under every plan."""
    config, world = inputs.config, inputs.world
    step = build_step(config, partial(log_shares, inputs))
    dense = step.dense.model
    if config.train.compile:
        dense.compile()
    with Task("planning where the tables go", is_shown=world.rank == 0):
        plan = world.from_rank_zero(lambda: plan_tables(step, config, topology_of(config, world)))
    model = shard_model(step, plan, config, world)
    if world.device.type == "cpu" and is_in_halves(dense, config):
        sum_in_halves(dense, world.world_size)

    for table, weights in table_tensors(model).items():
        for shard, (row, column) in local_shards(weights):
            fill_initial(shard, row, column, config.seed, table, init_range(config.tables[table]))
    updates = TableUpdates(model, config, world)
    step.dense.replicated = updates.replicated
    slices = None
    if shards_dense(config, world.world_size):
        step.dense.shards = DenseShards(dense, world.rank, world.world_size)
        slices = step.dense.shards.slices
    optimizer = build_dense_optimizer(dense.parameters() if slices is None else slices, config.optimizer)
    if not (config.train.check_every_step or optimizer.defaults.get("fused")):
        raise UserError(
            f"config key 'train.check_every_step' must be true with torch {torch.__version__} and optimizer.dense.name="
            f"{config.optimizer.dense.name} on this device, which cannot skip a step afterwards"
        )
    tensors = Tensors(
        tables=lambda: table_tensors(model),
        table_optimizer=updates.state,
        dense=dense,
        dense_optimizer=optimizer,
        slices=slices,
        statistics=inputs.statistics,
        after_load=updates.forget_caches,
    )
    return Built(model, list(shards_of(plan, config, world.world_size)), optimizer, updates, tensors)


def log_shares(inputs: Inputs) -> tuple[torch.Tensor, int]:
    """Return log shares of the table rows of `Needs.log_shares_of` among ids of data.train and drawn items.

    They are float32, [num_embeddings], or [1] if data.train is not read; each table row counts at least once. The
    second result is the number of ids of data.train counted.
    """
    facts, needs = inputs.facts, inputs.config.model.needs()
    if facts is None or needs.log_shares_of is None or "train" not in inputs.datasets:
        return torch.zeros(1), 0
    counts = facts.row_counts[needs.log_shares_of]
    share = np.maximum(counts, 1) / max(1, counts.sum())
    if (number := needs.sampled_items) and needs.log_shares_of == needs.item_id:
        drawn, size = np.bincount(*inputs.item_shares(), len(counts)), inputs.config.train.global_batch_size
        share = (size * share + number * drawn) / (size + number)
    return torch.from_numpy(np.log(share).astype(np.float32)), int(counts.sum())
