"""A GPU that is pretended: tensors that say they are on one, and compute on the CPU.

So Python code takes its way of a GPU, with real values. As on a GPU, an operator fails if its tensors are on two
devices. All that a host would wait for is counted.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.data.batch import Batch

GPU = torch.device("cuda", 0)
_IN_C = torch.device("meta")  # what torch in C++ takes for the GPU: a device that it knows without CUDA
_COPIES = {"_to_copy", "copy_"}
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)  # apart from all other operators


class OnGpu(torch.Tensor):
    """A tensor on the GPU.

    Attributes:
        values: the same in host memory.
    """

    values: torch.Tensor
    device, is_cuda = GPU, True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "OnGpu":
        made: OnGpu = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=_IN_C
        )
        made.values = values.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {}, Counter())


class _Places(TorchFunctionMode):
    """Replaces the GPU by the device that C++ knows."""

    def __init__(self, waits: "Counter[str]") -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_gpu = args and isinstance(args[0], OnGpu)
        if func is torch.Tensor.tolist and on_gpu:  # torch has none for subclasses
            self._waits[f"tolist {caller()}"] += 1
            return args[0].values.tolist()
        if func is torch.Tensor.pin_memory:
            args[0].is_locked = True
            return args[0]
        if func in _MADE_OF_NUMBERS and (on_gpu or torch.device(kwargs.get("device") or "cpu").type == "cuda"):
            self._waits[f"{func.__name__} {caller()}"] += 1
            dtype = kwargs.get("dtype") or (args[0].dtype if on_gpu else None)
            return OnGpu(torch.tensor(args[-1], dtype=dtype))
        return func(*tree_map(_known_in_c, args), **tree_map(_known_in_c, kwargs))


def _known_in_c(value: Any) -> Any:
    is_gpu = (isinstance(value, torch.device) and value.type == "cuda") or (type(value) is str and value == "cuda")
    return _IN_C if is_gpu else value


class _Operators(TorchDispatchMode):
    def __init__(self, waits: "Counter[str]") -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {}, self._waits)


def _computed(func: Any, args: Any, kwargs: dict[str, Any], waits: "Counter[str]") -> Any:
    """Return the result of an operator: on the device that it names, or that of its tensors."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    on_host = [tensor for tensor in tensors if not isinstance(tensor, OnGpu)]
    device, name = kwargs.get("device"), func.overloadpacket.__name__
    if len(on_host) == len(tensors) and device != _IN_C:
        return func(*args, **kwargs)
    to_gpu = len(on_host) < len(tensors) if device is None else device == _IN_C
    if name == "copy_":
        to_gpu = isinstance(args[0], OnGpu)
    crosses = name in _COPIES and (bool(on_host) or not to_gpu)
    if _host_waits(name, args, kwargs, crosses):
        waits[f"{name} {caller()}"] += 1
    if any(tensor.dim() for tensor in on_host) and not crosses:  # numbers pass to kernels as they are
        raise RuntimeError(f"{func} has tensors on the GPU and in host memory, in {caller()}")
    on_cpu = {} if device is None else {"device": torch.device("cpu")}
    plain_args, plain = tree_map(lambda value: value.values if isinstance(value, OnGpu) else value, (args, kwargs))
    result = func(*plain_args, **plain | on_cpu)
    if not to_gpu:
        return args[0] if name == "copy_" else result
    result = tree_map(lambda value: OnGpu(value) if isinstance(value, torch.Tensor) else value, result)
    return return_and_correct_aliasing(func, args, kwargs, result)


def _host_waits(name: str, args: Any, kwargs: dict[str, Any], crosses: bool) -> bool:
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if crosses:
        source = args[1] if name == "copy_" else args[0]
        may_go_on = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        return not may_go_on or not (isinstance(source, OnGpu) or getattr(source, "is_locked", False))
    return name in _WAITS


def caller() -> str:
    """Return file and function of the innermost place outside torch."""
    frame: Any = sys._getframe(1)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


@contextmanager
def pretended_gpu(waits: "Counter[str] | None" = None) -> Iterator[None]:
    """Let tensors be made and copied on the GPU; count by operator and place what the host would wait for."""
    waits = Counter() if waits is None else waits
    # What a mode passes on runs without it, and a backward pass makes tensors too.
    with patch("torch.autograd.has_torch_function", lambda _: False), _Places(waits), _Operators(waits):
        yield


def move(module: nn.Module) -> None:
    """Move a module's parameters and buffers to the GPU."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(OnGpu(parameter), parameter.requires_grad)
        part._buffers.update({name: OnGpu(buffer) for name, buffer in part._buffers.items() if buffer is not None})


class ToGpu(torch.autograd.Function):
    """A copy on the GPU, whose gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return OnGpu(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        copy: torch.Tensor = gradients[0].values
        return copy


def on_gpu(value: Any) -> Any:
    """Return a copy of a batch, or of vectors that were looked up, on the GPU."""
    if value is None or isinstance(value, torch.Tensor):
        return None if value is None else ToGpu.apply(value)
    if isinstance(value, dict):
        return {key: on_gpu(part) for key, part in value.items()}
    if isinstance(value, JaggedTensor):
        return JaggedTensor(on_gpu(value.values()), lengths=on_gpu(value.lengths()))
    if isinstance(value, KeyedJaggedTensor):
        tensors = (on_gpu(tensor) for tensor in (value.values(), value.weights_or_none(), value.lengths()))
        return KeyedJaggedTensor(value.keys(), *tensors, length_per_key=value.length_per_key())
    if isinstance(value, Batch):
        names = ("ids", "floats", "labels", "weights", "known_labels", "lists")
        return replace(value, content=None, **{name: on_gpu(getattr(value, name)) for name in names})
    # A KeyedTensor, or what torchrec returns before it has exchanged one.
    return KeyedTensor(value.keys(), value.length_per_key(), on_gpu(value.values()))
