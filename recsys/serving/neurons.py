"""Pruning of hidden neurons in the MLPs of a model: layers where it is possible, and weights without some neurons."""

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
    """A layer of an MLP whose outputs only one linear layer reads.

    Attributes:
        key, place: where its width is: the key in section `model` of the config, and the place in its list.
        own: the layer itself. following: the one that reads it. parameters: names of its weight and bias. next: name of
            the weight of the one that reads it.
        num_weights: of a neuron, its own and those in `following`.
    """

    key: str
    place: int
    own: nn.Linear
    following: nn.Linear
    parameters: tuple[str, str]
    next: str
    num_weights: int


def hidden_layers(model: nn.Module, config: ModelConfig) -> dict[str, HiddenLayer]:
    """Return, by name, the layers of `ModelConfig.mlps` whose neurons can be pruned; the last layer of an MLP cannot.

    Neither can layers that are normalised: there, the outputs of neurons depend on each other.
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
            num_weights = layer.in_features + (layer.bias is not None) + following.out_features
            layers[own] = HiddenLayer(key, place, layer, following, parameters, f"{after}.weight", num_weights)
    return layers


@torch.no_grad()
def hide_neurons(layers: Mapping[str, HiddenLayer], kept: Mapping[str, torch.Tensor]) -> None:
    """Set the weights of neurons that are not kept to 0, in place; the model then computes as if they were gone.

    The weights before a neuron are set too: in INT8, its output would otherwise count in the scale of its row.

    Args:
        kept: by layer, bool [width].
    """
    for name, marks in kept.items():
        layer = layers[name]
        is_hidden = ~marks.to(layer.own.weight.device)
        layer.own.weight[is_hidden] = 0
        if layer.own.bias is not None:
            layer.own.bias[is_hidden] = 0
        layer.following.weight[:, is_hidden] = 0


def without_neurons(
    parameter: str, tensor: torch.Tensor, layers: Mapping[str, HiddenLayer], kept: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return a parameter, or the optimizer state of its elements, rows or columns, with only the kept neurons.

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
    """Return the section `model` with the widths after pruning."""
    widths: dict[str, Any] = {layers[name].key: list(getattr(config, layers[name].key)) for name in kept}
    for name, marks in kept.items():
        widths[layers[name].key][layers[name].place] = int(marks.sum())
    return replace(config, **widths)
