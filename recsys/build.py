"""From a config and its datasets to the sharded model with its optimizers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys.checkpoint import Tensors
from recsys.config import Config, FeatureType, TwoTowerConfig
from recsys.data.counts import count_ids
from recsys.distributed import (
    iteration_setters,
    learning_rate_setters,
    plan_tables,
    replicated_tables,
    shard_model,
    shards,
    table_optimizer_tensors,
    table_parameters,
    table_tensors,
)
from recsys.inputs import Inputs
from recsys.models import DLRM, DenseHalf, RankingTask, RetrievalTask, Task, TrainStep, TwoTower, checkpoint_mlps
from recsys.optim import attach_table_optimizers, build_dense_optimizer
from recsys.tables import (
    Shard,
    averaged_features,
    build_embeddings,
    fill_initial,
    float_features,
    id_features,
    init_range,
    local_pieces,
)
from recsys.topology import topology_of


@dataclass
class Built:
    """The sharded model and what trains it.

    Attributes:
        pieces: every piece of every table, on any rank.
        set_learning_rates: what sets the learning rate of each group of tables, after the name of one of them.
        set_iterations: what sets the number of updates done, of groups whose optimizer corrects by it.
    """

    model: DistributedModelParallel
    pieces: list[Shard]
    dense_optimizer: torch.optim.Optimizer
    tensors: Tensors
    set_learning_rates: list[tuple[str, Callable[[float], None]]]
    set_iterations: list[Callable[[int], None]]

    @property
    def step(self) -> Any:
        return self.model.module

    @property
    def dense_model(self) -> torch.nn.Module:
        return self.step.dense.task.model


def build_model(inputs: Inputs) -> Built:
    """Build, plan, shard and initialise the model of the config; the same weights under every plan."""
    config, world = inputs.config, inputs.world
    step = build_step(config, partial(log_q, inputs))
    task = step.dense.task
    if config.train.compile:
        task.model.compile()
    plan = world.from_rank_zero(lambda: plan_tables(step, config, topology_of(config, world)))
    model = shard_model(step, plan, config, world)

    for table, weights in table_tensors(model).items():
        for shard, (row, column) in local_pieces(weights):
            fill_initial(shard, row, column, config.seed, table, init_range(config.tables[table]))
    replicated = replicated_tables(model, config)
    if replicated.tables:
        step.dense.replicated = replicated
    optimizer = build_dense_optimizer(task.model, config.optimizer)
    tensors = Tensors(
        tables=lambda: table_tensors(model),
        table_optimizer=lambda: table_optimizer_tensors(model, replicated),
        dense=task.model,
        dense_optimizer=optimizer,
        statistics=inputs.statistics,
    )
    pieces = list(shards(plan, config, world.world_size))
    rates, iterations = learning_rate_setters(model, replicated), iteration_setters(model, config)
    return Built(model, pieces, optimizer, tensors, rates, iterations)


def build_step(config: Config, log_q: Callable[[], torch.Tensor]) -> TrainStep:
    """Return the step with its tables on the meta device, marked with their optimizers, and the dense part on the CPU.

    Args:
        log_q: gives what logQ correction subtracts, if the model has it.
    """
    return _with_tables(config, build_dense_half(config, log_q))


def build_tables(config: Config) -> TrainStep:
    """Return the same step without the dense part, which may be large, to be planned for."""
    return _with_tables(config, nn.Module())


def _with_tables(config: Config, dense: Any) -> TrainStep:
    step = TrainStep(*build_embeddings(config), dense)
    attach_table_optimizers(table_parameters(step), config)
    return step


def build_dense_half(config: Config, log_q: Callable[[], torch.Tensor]) -> DenseHalf:
    """Return the dense half of the step, with the weights that the seed gives; arguments as of `build_step`."""
    torch.manual_seed(config.seed)
    task = _build_task(config, log_q)
    if config.train.activation_checkpointing:
        checkpoint_mlps(task.model)
    clip_norm, unpooled = config.optimizer.dense.clip_norm, config.unpooled_features()
    return DenseHalf(task, config.seed, clip_norm, config.precision, averaged_features(config), unpooled)


def _build_task(config: Config, log_q: Callable[[], torch.Tensor]) -> Task:
    dims = {name: _dim(config, name) for name in id_features(config)}
    floats = float_features(config)
    if isinstance(config.model, TwoTowerConfig):
        correction = log_q() if config.model.logq_correction else None
        model = TwoTower(config.model, dims, floats)
        return RetrievalTask(model, config.model.item_id, config.model.temperature, correction)
    return RankingTask(DLRM(config.model, dims, len(floats)))


def _dim(config: Config, feature: str) -> int:
    assert config.features[feature].type is FeatureType.id
    return config.tables[config.features[feature].table or ""].embedding_dim


def log_q(inputs: Inputs) -> torch.Tensor:
    """Return the log of each item row's share of the training rows, [num_embeddings] float32; [1] where none train."""
    config, world, train = inputs.config, inputs.world, inputs.datasets.get("train")
    if train is None:
        return torch.zeros(1)
    spec = inputs.spec("train")
    part = next(part for part in spec.ids if part.name == config.model.item_id)
    size = config.tables[config.features[part.name].table or ""].num_embeddings
    mine = world.agree(lambda: count_ids(train, part, size, world.rank, world.world_size))
    counts = world.sum(torch.from_numpy(mine)).numpy()
    share = np.maximum(counts, 1) / max(1, counts.sum())
    return torch.from_numpy(np.log(share).astype(np.float32))
