"""Tensors as ranks hold them, in pieces."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsys.tables.spec import local_pieces


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that this rank holds: `tensor` begins at `offsets`."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Pieces:
    """One tensor of a checkpoint: the pieces that this rank holds.

    Attributes:
        size: of the whole tensor.
        pieces: this rank's; when loading they may cover a part only, and the same rows twice.
        replicated: every rank holds all of it.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    replicated: bool = False

    @classmethod
    def of(cls, value: Any) -> "Pieces":
        """Wrap a ShardedTensor, or a tensor that every rank holds; nothing is copied."""
        pieces = tuple(Piece(tensor.detach(), offsets) for tensor, offsets in local_pieces(value))
        if isinstance(value, ShardedTensor):
            metadata = value.metadata()
            return cls(tuple(metadata.size), metadata.tensor_properties.dtype, pieces)
        return cls(tuple(value.shape), value.dtype, pieces, replicated=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds of the tensor."""
        return sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self.pieces)

    def copy(self) -> "Pieces":
        """Return a copy in host memory."""
        copied = tuple(Piece(_host_copy(piece.tensor), piece.offsets) for piece in self.pieces)
        return Pieces(self.size, self.dtype, copied, self.replicated)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
