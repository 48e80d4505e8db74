"""Parameters, output elements and FLOPs of every layer of a module, from a forward pass on fake tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from recsys.tables.module_names import parameter_name


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        parameters: numbers in its parameters; outputs: elements that all its calls in a forward pass return.
        flops: of the forward pass; a multiply-add counts as two; biases, activation functions and softmax do not count.
    """

    name: str
    kind: str
    parameters: int
    outputs: int
    flops: int


def analyse_layers(module: nn.Module, forward: Callable[[], Any]) -> list[Layer]:
    """Return the layers of a module that compute something, in the order of their first call.

    These are Linear, convolutions, MultiheadAttention, EmbeddingBag and Embedding. A block such as a
    TransformerEncoderLayer is shown as its parts.

    Args:
        forward: calls the module once; under FakeTensorMode it takes no memory.
    """
    layers: dict[str, Layer] = {}
    handles = []
    for path, child in module.named_modules():
        if isinstance(child, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue  # within MultiheadAttention, which does not call it
        if type(child) in _FLOPS or isinstance(child, nn.Linear):
            handles.append(
                child.register_forward_hook(_counting(layers, parameter_name(path), child), with_kwargs=True)
            )
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return list(layers.values())


def _counting(layers: dict[str, Layer], name: str, module: nn.Module) -> Any:
    def count(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        values = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        outputs = values[0].numel() if values else 0
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor)]
        flops = _FLOPS.get(type(module), _linear)(module, tensors, values[0])
        before = layers.get(name)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        layers[name] = Layer(
            name,
            type(module).__name__,
            parameters,
            outputs + (before.outputs if before else 0),
            flops + (before.flops if before else 0),
        )

    return count


def _linear(module: Any, inputs: list[torch.Tensor], output: torch.Tensor) -> int:
    # Each output is a dot product over the inputs.
    return 2 * output.numel() * module.in_features


def _convolution(module: Any, inputs: list[torch.Tensor], output: torch.Tensor) -> int:
    # Each output is a dot product over the window in the channels of its group.
    return 2 * output.numel() * module.in_channels // module.groups * math.prod(module.kernel_size)


def _attention(module: Any, inputs: list[torch.Tensor], output: torch.Tensor) -> int:
    query, key = inputs[0], inputs[1]
    rows = query.shape[0] if query.dim() < 3 else query.shape[0] * query.shape[1]
    sequence = 0 if query.dim() < 3 else int(module.batch_first)
    keys = key.shape[sequence]
    batch = 1 if query.dim() < 3 else query.shape[1 - sequence]
    width = module.embed_dim
    key_dims = (module.kdim or width) + (module.vdim or width)
    projections = 2 * rows * width * width * 2 + 2 * batch * keys * key_dims * width  # of queries, output, keys, values
    return projections + 2 * 2 * rows * keys * width  # scores, and the sums of values weighted by them


def _embedding_bag(module: Any, inputs: list[torch.Tensor], output: torch.Tensor) -> int:
    # Every id adds a row.
    return inputs[0].numel() * module.embedding_dim


def _embedding(module: Any, inputs: list[torch.Tensor], output: torch.Tensor) -> int:
    return 0  # rows are copied


_FLOPS: dict[type, Callable[[Any, list[torch.Tensor], torch.Tensor], int]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.MultiheadAttention: _attention,
    nn.EmbeddingBag: _embedding_bag,
    nn.Embedding: _embedding,
}


def format_layers(layers: list[Layer], rows: int) -> str:
    """Return the layers as a Markdown section, with their sum.

    Args:
        rows: size of the batch that they were counted for.
    """
    lines = [
        f"## Layers: forward pass of {rows:,} rows (a multiply-add is two FLOPs)",
        "",
        "| layer | kind | parameters | output elements | FLOPs |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    total = Layer(
        "**all**",
        "",
        sum(layer.parameters for layer in layers),
        sum(layer.outputs for layer in layers),
        sum(layer.flops for layer in layers),
    )
    for layer in (*layers, total):
        lines.append(f"| {layer.name} | {layer.kind} | {layer.parameters:,} | {layer.outputs:,} | {layer.flops:,} |")
    return "\n".join(lines) + "\n"
