"""From a config to the two halves of a step, before the tables are sharded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recsys.config import Config
from recsys.config.features import float_features, model_features
from recsys.config.model import find_model
from recsys.models.base import DenseInputs, checkpoint_mlps
from recsys.models.experts import add_experts
from recsys.models.projections import add_projections
from recsys.step.step import DenseHalf, TrainStep
from recsys.tables.spec import build_embeddings


def build_step(config: Config, log_shares: Callable[[], tuple[torch.Tensor, int]]) -> TrainStep:
    """Return the step with its tables on the meta device, and the dense part on the CPU.

    Args:
        log_shares: gives `DenseInputs.log_shares` and `num_counted`; called if the model wants them.
    """
    return TrainStep(*build_embeddings(config), build_dense_half(config, log_shares))


def build_tables(config: Config) -> TrainStep:
    """Return the same step without the dense part, which may be large, to be planned for."""
    nothing: Any = nn.Module()
    return TrainStep(*build_embeddings(config), nothing)


def build_dense_half(config: Config, log_shares: Callable[[], tuple[torch.Tensor, int]]) -> DenseHalf:
    """Return the dense half of the step, with the weights that the seed gives; arguments as of `build_step`."""
    torch.manual_seed(config.seed)
    dims = {name: config.tables[config.features[name].table or ""].model_dim for name in model_features(config)}
    shares, num_counted = (None, 0) if config.model.needs().log_shares_of is None else log_shares()
    inputs = DenseInputs(dims, float_features(config), config.labels(), shares, config.train.distill, num_counted)
    model = find_model(config.model.name)(config.model, inputs)
    add_projections(model, config)
    add_experts(model, config)
    if config.train.activation_checkpointing:
        checkpoint_mlps(model)
    return DenseHalf(model, config)
