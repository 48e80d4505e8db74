"""From a config to the two halves of a step, before the tables are sharded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recsys.config import Config
from recsys.config.features import averaged_features, float_features, id_features
from recsys.config.model import find_model
from recsys.models.base import DenseInputs
from recsys.models.blocks import checkpoint_mlps
from recsys.step.optim import attach_table_optimizers
from recsys.step.step import DenseHalf, TrainStep
from recsys.tables.shard import table_parameters
from recsys.tables.spec import build_embeddings


def build_step(config: Config, log_shares: Callable[[], torch.Tensor]) -> TrainStep:
    """Return the step with its tables on the meta device, marked with their optimizers, and the dense part on the CPU.

    Args:
        log_shares: gives `DenseInputs.log_shares`; called if the model wants them.
    """
    return _with_tables(config, build_dense_half(config, log_shares))


def build_tables(config: Config) -> TrainStep:
    """Return the same step without the dense part, which may be large, to be planned for."""
    return _with_tables(config, nn.Module())


def _with_tables(config: Config, dense: Any) -> TrainStep:
    step = TrainStep(*build_embeddings(config), dense)
    attach_table_optimizers(table_parameters(step), config)
    return step


def build_dense_half(config: Config, log_shares: Callable[[], torch.Tensor]) -> DenseHalf:
    """Return the dense half of the step, with the weights that the seed gives; arguments as of `build_step`."""
    torch.manual_seed(config.seed)
    dims = {name: config.tables[config.features[name].table or ""].embedding_dim for name in id_features(config)}
    shares = None if config.model.needs().log_shares_of is None else log_shares()
    inputs = DenseInputs(dims, float_features(config), config.labels(), shares)
    model = find_model(config.model.name)(config.model, inputs)
    if config.train.activation_checkpointing:
        checkpoint_mlps(model)
    clip_norm, unpooled = config.optimizer.dense.clip_norm, config.unpooled_features()
    l2 = {name: config.tables[config.features[name].table or ""].l2 for name in id_features(config)}
    return DenseHalf(model, config.seed, clip_norm, config.precision, averaged_features(config), unpooled, l2)
