"""Hidden neurons of a model's MLPs that pruning may take: where they are, and what a model without some is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from recsys.config import ModelConfig
from recsys.tables.module_names import parameter_name


@dataclass(frozen=True)
class HiddenLayer:
    """A layer of an MLP whose outputs one linear layer reads alone.

    Attributes:
        key, place: of its width in the model's section of the config.
        following: the layer that reads it. parameters: the names of its own, weight and bias; next: of `following`.
        num_weights: that a neuron has, of its own and in `following`.
    """

    key: str
    place: int
    following: nn.Linear
    parameters: tuple[str, str]
    next: str
    num_weights: int


def hidden_layers(model: nn.Module, config: ModelConfig) -> dict[str, HiddenLayer]:
    """Return by name the layers of `ModelConfig.mlps` whose neurons can go; the last layer of an MLP stays.

    Those of layers that are normalised stay too: a neuron is then a part of what the others give.
    """
    modules, layers = dict(model.named_modules()), dict[str, HiddenLayer]()
    for key, path in config.mlps.items():
        of_mlp = {name: module for name, module in modules.items() if parameter_name(name).startswith(f"{path}.")}
        if any(isinstance(module, nn.LayerNorm) for module in of_mlp.values()):
            continue
        linears = [(name, module) for name, module in of_mlp.items() if isinstance(module, nn.Linear)]
        for place, ((name, layer), (next_name, following)) in enumerate(pairwise(linears)):
            own, after = parameter_name(name), parameter_name(next_name)
            parameters = f"{own}.weight", f"{own}.bias"
            num_weights = layer.in_features + 1 + following.out_features
            layers[own] = HiddenLayer(key, place, following, parameters, f"{after}.weight", num_weights)
    return layers


def without_neurons(
    parameter: str, tensor: torch.Tensor, layers: Mapping[str, HiddenLayer], kept: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return a parameter, or what an optimizer holds for its elements, rows or columns, without neurons not kept.

    Args:
        kept: by layer, bool [width].
    """
    for name, marks in kept.items():
        # Adafactor holds one number for all rows of a weight, or for all columns.
        if parameter in layers[name].parameters and tensor.dim() and len(tensor) == len(marks):
            tensor = tensor[marks]
        if parameter == layers[name].next and tensor.dim() and tensor.shape[1] == len(marks):
            tensor = tensor[:, marks]
    return tensor.contiguous()


def narrower(config: ModelConfig, layers: Mapping[str, HiddenLayer], kept: Mapping[str, torch.Tensor]) -> Any:
    """Return the model's section with the widths that are left."""
    widths: dict[str, Any] = {layers[name].key: list(getattr(config, layers[name].key)) for name in kept}
    for name, marks in kept.items():
        widths[layers[name].key][layers[name].place] = int(marks.sum())
    return replace(config, **widths)
