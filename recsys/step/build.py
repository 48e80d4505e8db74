"""From a config to the two halves of a step, before the tables are sharded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from recsys.config import Config
from recsys.config.features import float_columns, model_features, table_of_feature
from recsys.config.model import find_model
from recsys.errors import UserError
from recsys.models.base import DenseInputs, Model, checkpoint_mlps
from recsys.models.experts import add_experts
from recsys.models.projections import add_projections
from recsys.step.step import DenseHalf, TrainStep
from recsys.tables.spec import build_embeddings


def build_step(config: Config, log_shares: Callable[[], tuple[torch.Tensor, int]]) -> TrainStep:
    """Return the step with its tables on the meta device, and the dense part on the CPU.

    Args:
        log_shares: returns `DenseInputs.log_shares` and `num_counted`; called if the model needs them.
    """
    return TrainStep(*build_embeddings(config), build_dense_half(config, log_shares))


def build_tables(config: Config) -> TrainStep:
    """Return the step with an empty dense part, for planning: the real one may be large."""
    empty: Any = nn.Module()
    return TrainStep(*build_embeddings(config), empty)


def build_dense_half(config: Config, log_shares: Callable[[], tuple[torch.Tensor, int]]) -> DenseHalf:
    """Return the dense half of the step, with weights drawn by the seed; for the arguments see `build_step`."""
    torch.manual_seed(config.seed)
    dims = {name: table_of_feature(config, name).model_dim for name in model_features(config)}
    shares, num_counted = (None, 0) if config.model.needs().log_shares_of is None else log_shares()
    inputs = DenseInputs(dims, float_columns(config), config.labels(), shares, config.train.distill, num_counted)
    model = find_model(config.model.name)(config.model, inputs)
    _check_class(model, config.model.name)
    _check_modules(model)
    add_projections(model, config)
    add_experts(model, config)
    if config.train.activation_checkpointing:
        checkpoint_mlps(model)
    return DenseHalf(model, config)


def _check_class(model: Any, name: str) -> None:
    """Raise a UserError unless `model`, perhaps made by a user's own class, is a complete `Model`."""
    if not isinstance(model, Model) or not hasattr(model, "labels"):
        raise UserError(
            f"config key 'model.name': '{name}' made no recsys.models.Model that knows its labels; derive the class "
            f"from it, and call super().__init__(inputs) in its __init__"
        )
    for parameter, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise UserError(
                f"config key 'model.name': {type(model).__name__} does not know the shape of '{parameter}' before its "
                f"first batch, as with nn.Lazy layers; give its width, from inputs.dims and inputs.floats"
            )


def _check_modules(model: nn.Module) -> None:
    """Refuse modules of torch whose results depend on how rows are split over ranks and micro-batches.

    Raises:
        UserError: names the module, and what to use instead.
    """
    for name, module in model.named_modules():
        where = f"config key 'model.name': {type(model).__name__} has a {type(module).__name__} at '{name}'"
        keeps_running = isinstance(module, _NormBase) and module.track_running_stats
        if keeps_running or isinstance(module, _BatchNorm):
            raise UserError(f"{where}, whose statistics depend on which rows a rank has at once; use nn.LayerNorm")
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise UserError(f"{where}, whose masks depend on the rank, not the row; use recsys.models.RowDropout")
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:  # without a module for it
            raise UserError(
                f"{where} with dropout={module.dropout:g}, whose masks depend on the rank, not the row; set it "
                f"to 0, and apply recsys.models.RowDropout to the output of the layer"
            )
