"""Operators of a step of the dense part, traced on fake tensors: products, bytes moved and bytes exchanged."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.memory.speeds import Speeds

_FEW = 8  # a batch of up to so many matrices counts as separate products
# Operators by the cost of an element; all others are `plain`: they read, add or multiply, and write.
_KINDS = {
    "costly": (
        "sigmoid",
        "tanh",
        "exp",
        "log",
        "erf",
        "gelu",
        "silu",
        "softmax",
        "layer_norm",
        "pow",
        "sqrt",
        "entropy",
    ),
    "indexed": ("index", "gather", "scatter", "embedding", "sort", "cumsum", "jagged", "topk"),
    "drawn": ("kept", "uniform", "bernoulli", "dropout", "rand"),
}


@dataclass
class Work:
    """The work of a step's operators.

    Attributes:
        num_operators: number of calls, including views.
        matmuls: number by (type, rows, inner, columns); batched: by (type, FLOPs of one product, products in a batch).
        moved: number of operators by (kind, bytes).
        sent: for each collective within the model, the bytes that this rank passes to it.
    """

    num_operators: int = 0
    matmuls: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    batched: Counter[tuple[str, float, int]] = field(default_factory=Counter)
    moved: Counter[tuple[str, int]] = field(default_factory=Counter)
    sent: list[int] = field(default_factory=list)

    def seconds(self, speeds: Speeds) -> float:
        """Return the time of products and of moving bytes, without the time of calls and collectives."""
        products = sum(n * speeds.matmul_seconds(*shape) for shape, n in self.matmuls.items())
        batches = sum(n * speeds.batched_seconds(*shape) for shape, n in self.batched.items())
        return products + batches + sum(n * speeds.moved_seconds(*operator) for operator, n in self.moved.items())


class OperatorTrace(TorchDispatchMode):
    """Collects the work of all operators that are called inside it.

    Attributes:
        work: that of the operators so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        space, name = func.namespace, func._schema.name.partition("::")[2]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        num_outs = sum(argument.is_out for argument in func._schema.arguments)  # they come last, and are results too
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        tensors = inputs[: len(inputs) - num_outs] + results
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if space == "prim":
            return result
        if space == "c10d":
            self.work.sent.append(num_bytes)
            return result
        self.work.num_operators += 1
        if name.strip("_") in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = [argument for argument in args if isinstance(argument, torch.Tensor)][-2:]
            number, rows, inner, columns = math.prod(a.shape[:-2]), *a.shape[-2:], b.shape[-1]
            if number <= _FEW:
                self.work.matmuls[(dtype_name(a.dtype), rows, inner, columns)] += number
            else:
                self.work.batched[(dtype_name(a.dtype), 2.0 * rows * inner * columns, number)] += 1
        elif "attention" in name:
            query, key = args[:2]
            flops = 4.0 * query.shape[-2] * key.shape[-2] * query.shape[-1] * (2.5 if "backward" in name else 1)
            self.work.batched[(dtype_name(query.dtype), flops, math.prod(query.shape[:-2]))] += 1
        elif not (_is_view(func) or "empty" in name):
            self.work.moved[(_kind(name), num_bytes)] += 1
        return result


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in `Speeds`, such as float32."""
    return str(dtype).removeprefix("torch.")


def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _kind(name: str) -> str:
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "plain")
