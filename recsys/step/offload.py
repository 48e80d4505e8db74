"""Activations kept in host memory from the forward pass to the backward pass."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class Offload(saved_tensors_hooks):
    """A context in which tensors saved for the backward pass are kept in page-locked host memory.

    Like torch.autograd.graph.save_on_cpu, but parameters, which stay on the device anyway, are not copied.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        super().__init__(self._pack, self._unpack)

    def to_host(self, tensor: torch.Tensor) -> Any:
        """Start to copy a tensor to the host, and return the copy."""
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)

    def to_device(self, packed: Any, device: torch.device) -> torch.Tensor:
        """Return a result of `to_host` as a tensor on a device."""
        return packed.to(device, non_blocking=True)

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_parameter = tensor.untyped_storage()._cdata in self._parameters
        return tensor if is_parameter else (self.to_host(tensor), tensor.device)

    def _unpack(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else self.to_device(*packed)
