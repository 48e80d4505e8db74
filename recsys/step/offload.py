"""Activations in host memory, from the forward pass to the backward pass that wants them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class Offload(saved_tensors_hooks):
    """Within it, what autograd keeps for the backward pass is kept in page-locked host memory, and brought back there.

    As by torch.autograd.graph.save_on_cpu, save that parameters stay where they are: the device has them anyway.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._kept = {parameter.untyped_storage()._cdata for parameter in parameters}
        super().__init__(self._pack, self._unpack)

    def to_host(self, tensor: torch.Tensor) -> Any:
        """Return what stands for a tensor on the host; the copy is not waited for."""
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)

    def to_device(self, packed: Any, device: torch.device) -> torch.Tensor:
        """Return the tensor that `to_host` was given."""
        return packed.to(device, non_blocking=True)

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_kept = tensor.untyped_storage()._cdata in self._kept
        return tensor if is_kept else (self.to_host(tensor), tensor.device)

    def _unpack(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else self.to_device(*packed)
