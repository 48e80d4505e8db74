"""Gradients of parameters summed over the first half of a batch, then over the second, as two processes sum them.

Sums of floats depend on their order. One process that adds up all rows at once differs by a rounding from two that have
a half each; optimizers that divide by a gradient's size, and layers with a kink, raise that to 1e-4 within 100 steps.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from recsys.config import Config
from recsys.config.choices import Autocast
from recsys.models.dropout import RowDropout
from recsys.models.products import gradients_by_parameters, product_over_rows, times


class InParts:
    """A module that reads its own parameters through `in_parts`; `sum_in_halves` sets the number of parts."""

    num_parts = 1


class PartByPart(InParts):
    """A model that computes the parts of a batch's rows one after another, by layers of [rows, width].

    Attributes:
        has_kinks: whether layers have kinks, such as ReLU's. Without any, the effect of rounding stays small, and parts
            are not worth their cost.
    """

    has_kinks = True


def is_in_halves(model: Any, config: Config) -> bool:
    """Return whether gradients can be summed in halves on a CPU: plain layers, called once for all rows of a rank.

    If a `PartByPart` model computed activations again in the backward pass, they would be those of another part.
    """
    train = config.train
    by_part = isinstance(model, PartByPart) and model.has_kinks and not train.activation_checkpointing
    is_plain = config.precision.autocast is Autocast.none and not train.compile and not train.in_micro_batches
    return is_plain and (model.loss_by_rows or by_part)


def sum_in_halves(model: nn.Module, world_size: int) -> None:
    """Replace a model's layers by ones that sum gradients in halves on one process, and in that order on several.

    This covers linear and norm layers, MLPs and modules that are `InParts`. They must read rows in the order of the
    batch, in FP32, on a CPU. One process on one thread or two, and two processes on one thread each, then get the same
    sums to the last bit. The layers of a model that is `PartByPart` see one part at a time.
    """
    if isinstance(model, PartByPart):
        model.num_parts = 2 if world_size == 1 else 1
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = _LinearOfPart
            elif type(module) is nn.LayerNorm and _is_plain(module):
                module.__class__ = _LayerNormOfPart
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear
        elif type(module) is nn.LayerNorm and _is_plain(module):
            module.__class__ = _LayerNorm
        elif type(module) is nn.Sequential and _is_mlp(module):
            module.__class__ = _MLP
        elif isinstance(module, CheckpointWrapper) and _is_mlp(module._checkpoint_wrapped_module):
            module.checkpoint_fn = partial(_computed_again, module.checkpoint_fn)
        if isinstance(module, InParts):
            module.num_parts = 2 if world_size == 1 else 1


def sum_of_rows(values: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return the sum of values, [rows], added up part by part, as `num_parts` ranks would."""
    first, *others = (part.sum() for part in values.tensor_split(num_parts))
    return sum(others, start=first)


def in_parts(function: Callable[..., torch.Tensor], num_parts: int, *rows: torch.Tensor) -> torch.Tensor:
    """Call a function of rows for one part of the rows after another, and join the results.

    Gradients of the parameters that it reads are then summed part by part.

    Args:
        num_parts: 1 or 2. rows: tensors with equally many rows, [rows, ...].
    """
    if not torch.is_grad_enabled():
        return function(*rows)
    if num_parts == 1:
        return function(*(tensor.view_as(tensor) for tensor in rows))  # views keep their gradients' sums apart, too
    first, second = zip(*(tensor.tensor_split(2) for tensor in rows), strict=True)
    return torch.cat([function(*first), function(*second)])


class _Linear(InParts, nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or x.dim() != 2:
            return super().forward(x)
        result: torch.Tensor = _LinearInParts.apply(x, self.weight, self.bias, self.num_parts)
        return result


class _LinearInParts(torch.autograd.Function):
    """`F.linear` without `in_parts`, which would copy both input and output."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_parts: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.num_parts = num_parts if len(x) % num_parts == 0 else 1
        return times(x, weight.T, bias, ctx.num_parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, *wanted, _ = ctx.needs_input_grad
        by_x = times(gradient, weight, None, ctx.num_parts) if of_x else None
        return by_x, *gradients_by_parameters(gradient, x, ctx.num_parts, *wanted), None


def _is_mlp(module: nn.Module) -> bool:
    """Return whether a module is an MLP like those of `models.base.mlp`, with at least one hidden layer."""
    layers = list(module.children())
    return (
        isinstance(module, nn.Sequential)
        and len(layers) > 2
        and len(layers) % 3 < 2
        and all(isinstance(layer, nn.Linear) for layer in layers[::3])
        and all(isinstance(layer, nn.Identity) for layer in layers[1::3])
        and all(isinstance(layer, RowDropout) and layer.relu for layer in layers[2::3])
    )


class _MLP(InParts, nn.Sequential):
    def forward(self, input: torch.Tensor, keep: bool = True) -> torch.Tensor:
        layers = list(self._modules.values())
        if not torch.is_grad_enabled() or input.dim() != 2 or any(layer._forward_pre_hooks for layer in layers):
            return super().forward(input)  # hooks run only if layers are called
        parameters = [parameter for layer in layers[::3] for parameter in (layer.weight, layer.bias)]
        result: torch.Tensor = _MLPInParts.apply(input, self.num_parts, keep, layers[2::3], *parameters)
        return result


def _computed_again(checkpoint: Callable[..., torch.Tensor], layers: _MLP, input: torch.Tensor) -> torch.Tensor:
    """Return the output of layers that keep only their input, without `checkpoint` if they can do so themselves."""
    return layers(input, keep=False) if input.dim() == 2 else checkpoint(layers, input)


class _MLPInParts(torch.autograd.Function):
    """The layers of an MLP, each as `_LinearInParts`, with gradients of ReLUs computed in place.

    On a CPU, new memory for such a gradient takes longer than computing it, and in a step of a thousand rows autograd's
    own way from layer to layer takes time.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, num_parts: int, keep: bool, relus: list[RowDropout], *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of the last layer.

        Args:
            keep: keep the other layers' outputs for the backward pass. parameters: a weight and a bias for each layer.
        """
        ctx.num_parts, ctx.relus = num_parts if len(x) % num_parts == 0 else 1, relus
        ctx.hidden = []  # not in save_for_backward, so that each can be freed when it has been used
        for result in _passed(x, ctx.num_parts, relus, parameters):
            if keep:
                ctx.hidden.append(result)
        ctx.hidden = ctx.hidden[:-1]
        ends_in_relu = 2 * len(relus) == len(parameters)
        ctx.save_for_backward(*parameters, x, result if ends_in_relu else None)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_x, _, _, _, *wanted = ctx.needs_input_grad
        *parameters, x, result = ctx.saved_tensors
        if torch.is_grad_enabled():
            by_x, *by_parameters = _differentiable_gradients(ctx, gradient, x, parameters)
            return by_x, None, None, None, *by_parameters
        last = len(wanted) // 2 - 1
        hidden = ctx.hidden or list(islice(_passed(x, ctx.num_parts, ctx.relus, parameters), last))
        ctx.hidden = []
        gradients: list[torch.Tensor | None] = []
        for i in range(last, -1, -1):
            if i < len(ctx.relus):
                memory = gradient if i < last else torch.empty_like(gradient)  # the first is not ours to change
                torch.ops.aten.threshold_backward.grad_input(gradient, result, 0, grad_input=memory)
                gradient = memory if ctx.relus[i].share == 1 else memory.div_(ctx.relus[i].share)
            result = hidden.pop() if i else x
            gradients += reversed(gradients_by_parameters(gradient, result, ctx.num_parts, *wanted[2 * i : 2 * i + 2]))
            if not (of_x or any(wanted[: 2 * i])):
                return None, None, None, None, *[None] * (2 * i), *reversed(gradients)
            gradient = times(gradient, parameters[2 * i], None, ctx.num_parts)
        return gradient, None, None, None, *reversed(gradients)


def _differentiable_gradients(
    ctx: Any, gradient: torch.Tensor, x: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return an MLP's gradients by its input and parameters, for a loss that has gradients in it (`create_graph`)."""
    outputs = x
    for weight, bias, relu in zip_longest(parameters[::2], parameters[1::2], ctx.relus):
        outputs = _LinearInParts.apply(outputs, weight, bias, ctx.num_parts)
        outputs = outputs if relu is None else relu(outputs)
    of_x, _, _, _, *wanted = ctx.needs_input_grad
    inputs = [tensor for tensor, is_wanted in zip((x, *parameters), (of_x, *wanted), strict=True) if is_wanted]
    found = iter(torch.autograd.grad(outputs, inputs, gradient, create_graph=True))
    return [next(found) if is_wanted else None for is_wanted in (of_x, *wanted)]


def _passed(
    x: torch.Tensor, num_parts: int, relus: list[RowDropout], parameters: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the output of each layer of an MLP, after its ReLU if it has one."""
    for weight, bias, relu in zip_longest(parameters[::2], parameters[1::2], relus):
        x = times(x, weight.T, bias, num_parts)
        if relu is not None:
            x = x.relu_() if relu.share == 1 else relu.without_autograd(x)
        yield x


class _LinearOfPart(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        result: torch.Tensor = _LinearByChunks.apply(x, self.weight, self.bias)
        return result


class _LinearByChunks(torch.autograd.Function):
    """`F.linear` of [rows, width]; the gradient of the weight is the same on one thread and on two."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight.T, bias, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            times(gradient, weight, None, 1) if of_x else None,
            product_over_rows(gradient, x) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _is_plain(norm: nn.LayerNorm) -> bool:
    return norm.bias is not None and norm.bias.dim() == 1


class _LayerNorm(InParts, nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or input.dim() != 2:
            return super().forward(input)
        return in_parts(partial(_normalised, self), self.num_parts, input)


class _LayerNormOfPart(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normalised(self, input) if torch.is_grad_enabled() else super().forward(input)


def _normalised(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _LayerNormByColumns.apply(x, norm.weight, norm.bias, norm.eps)
    return result


class _LayerNormByColumns(torch.autograd.Function):
    """`F.layer_norm` of [rows, width], since PyTorch sums the gradients of weight and bias by thread."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        result, mean, scale = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean, scale, weight, bias = ctx.saved_tensors
        of_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, mean, scale, weight, bias, [True, False, False]
        )
        return of_x, (x - mean).mul_(scale).mul_(gradient).sum(0), gradient.sum(0), None
