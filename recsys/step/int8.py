"""Linear layers in INT8, with inputs rounded row by row: for evaluation, and for exported graphs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

STEPS = 127  # of an input from 0 to the largest of its row
_TINY = torch.finfo(torch.float32).tiny  # the least scale: a row of zeros has none of its own


class Int8Linear(TorchFunctionMode):
    """A context in which linear layers with a bias, over rows, are computed with rounded weights and inputs.

    Inputs are rounded by row and weights by output, symmetrically around 0, so that a row's outputs do not depend on
    the other rows of its batch. `recsys export` writes the same layers in INT8.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args) == 3 and args[2] is not None and args[0].dim() == 2:
            x, weight, bias = args
            codes, scale = int8_weights(weight)
            steps = (x.float().abs().amax(1, keepdim=True) / STEPS).clamp(min=_TINY)
            return F.linear((x / steps).round() * steps, codes * scale, bias)
        return func(*args, **(kwargs or {}))


def is_rounded(module: nn.Module) -> bool:
    """Return whether `Int8Linear` rounds a module, if its input is [rows, columns]."""
    return isinstance(module, nn.Linear) and module.bias is not None


def int8_weights(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [outputs, inputs] as whole numbers from -64 to 64, and their scales, [outputs, 1], both FP32.

    They have 7 bits because processors without VNNI add up two products with bytes in 16 bits.
    """
    scale = (weight.float().abs().amax(1, keepdim=True) / 64).clamp(min=_TINY)
    return (weight / scale).round(), scale
