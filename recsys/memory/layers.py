"""Parameters, output elements and FLOPs of every layer of a module, from a forward pass on fake tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from recsys.tables.module_names import parameter_name

_ROOT = "model"  # name of the module itself, for what it computes outside its layers


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        parameters: numbers in its parameters; outputs: elements that all its calls in a forward pass return, or, of a
            module without a formula, the products that it computes.
        flops: of the forward pass; a multiply-add counts as two; biases, activation functions and softmax do not count.
    """

    name: str
    kind: str
    parameters: int
    outputs: int
    flops: int


def analyse_layers(module: nn.Module, forward: Callable[[], Any]) -> list[Layer]:
    """Return the layers of a module that have parameters or multiply matrices, in the order of their first call.

    Linear, convolutions, MultiheadAttention, EmbeddingBag and Embedding are counted by formulas. Any other module is
    counted by the products that it computes outside modules of its own, such as cross layers or attention; its
    parameters are those that none of these has. So a block such as a TransformerEncoderLayer is shown as its parts.

    Args:
        forward: calls the module once; under FakeTensorMode it takes no memory.
    """
    counter = _Counter(module)
    with counter:
        forward()
    return counter.layers()


class _Counter(TorchDispatchMode):
    """Counts calls of a module's layers, and the products of matrices in between."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._found = module, dict[str, Layer]()
        self._inside: list[str] = []  # paths of the modules that are being called, the innermost last
        self._by_formula = False  # whether a formula counts one of them, with all that it does
        self._handles: list[Any] = []

    def __enter__(self) -> "_Counter":
        for path, child in self._module.named_modules():
            self._handles.append(child.register_forward_pre_hook(lambda m, _, path=path: self._enter(path, m)))
            leave = partial(self._leave, path)
            self._handles.append(child.register_forward_hook(leave, with_kwargs=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = function(*args, **named)
        count = _PRODUCTS.get(function.overloadpacket)
        if count is not None and self._inside and not self._by_formula:
            self._add(self._inside[-1], tree_leaves(result)[0].numel(), count(*args, **named, out_val=result))
        return result

    def layers(self) -> list[Layer]:
        """Return the layers, with the parameters of each: those of a module that was not called are its parent's."""
        parameters = dict.fromkeys(self._found, 0)
        for path, parameter in self._module.named_parameters():
            while path and path not in parameters:
                path = path.rpartition(".")[0]
            if path in parameters:
                parameters[path] += parameter.numel()
        found = [
            replace(layer, name=parameter_name(path) or _ROOT, parameters=parameters[path])
            for path, layer in self._found.items()
        ]
        return [layer for layer in found if layer.parameters or layer.outputs]

    def _enter(self, path: str, module: nn.Module) -> None:
        self._inside.append(path)
        if not self._by_formula:
            self._found.setdefault(path, Layer(path, type(module).__name__, 0, 0, 0))
            self._by_formula = _formula(module) is not None

    def _leave(self, path: str, module: nn.Module, inputs: tuple[Any, ...], named: Any, result: Any) -> None:
        self._inside.pop()
        formula = _formula(module)
        if formula is None or path not in self._found:
            return
        self._by_formula = False
        values = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor)]
        self._add(path, values[0].numel(), formula(module, tensors, values[0]))

    def _add(self, path: str, outputs: int, flops: int) -> None:
        before = self._found[path]
        self._found[path] = replace(before, outputs=before.outputs + outputs, flops=before.flops + flops)


def _formula(module: nn.Module) -> Callable[[Any, list[torch.Tensor], torch.Tensor], int] | None:
    return _FLOPS.get(type(module), _linear if isinstance(module, nn.Linear) else None)


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


def _no_product(module: Any, inputs: list[torch.Tensor], output: torch.Tensor) -> int:
    return 0  # rows are copied, or normalised


_FLOPS: dict[type, Callable[[Any, list[torch.Tensor], torch.Tensor], int]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.MultiheadAttention: _attention,
    nn.EmbeddingBag: _embedding_bag,
    nn.Embedding: _no_product,
    nn.LayerNorm: _no_product,
}
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
# PyTorch does not know the attention kernel of CPUs, which multiplies as that of GPUs does.
_PRODUCTS = {**flop_registry, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATTENTION]}


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
