"""From a config to the two halves of a step, before the tables are sharded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recsys.config import Config, FeatureType, TwoTowerConfig
from recsys.config.features import averaged_features, float_features, id_features
from recsys.models import DLRM, RankingTask, RetrievalTask, Task, TwoTower
from recsys.models.blocks import checkpoint_mlps
from recsys.step.optim import attach_table_optimizers
from recsys.step.step import DenseHalf, TrainStep
from recsys.tables.shard import table_parameters
from recsys.tables.spec import build_embeddings


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
