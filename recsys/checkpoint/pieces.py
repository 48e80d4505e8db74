"""Tensors as ranks hold them, in pieces, and DCP planners that write and read them in chunks of rows."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from recsys.tables.bytes import CHUNK_BYTES
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

    def chunks(self) -> Iterator[Piece]:
        """Yield the pieces in chunks of whole rows; all pieces of a tensor are cut at the same rows."""
        if not self.size or 0 in self.size:
            yield from self.pieces
            return
        row_bytes = self.dtype.itemsize * torch.Size(self.size[1:]).numel()
        step = max(1, CHUNK_BYTES // row_bytes)
        for piece in self.pieces:
            first, stop = piece.offsets[0], piece.offsets[0] + piece.tensor.shape[0]
            while first < stop and piece.tensor.numel():
                end = min(stop, (first // step + 1) * step)
                rows = piece.tensor[first - piece.offsets[0] : end - piece.offsets[0]]
                yield Piece(rows, (first, *piece.offsets[1:]))
                first = end


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


class PiecesSavePlanner(DefaultSavePlanner):
    """Writes a state dict of `Pieces`, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: Mapping[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state dict as it is; DCP's own flattens it."""
        self.state_dict, self.is_coordinator = dict(state_dict), is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return a write for each chunk of this rank."""
        items = []
        for name, pieces in self.state_dict.items():
            for chunk in pieces.chunks():
                index = MetadataIndex(name, chunk.offsets)
                self._chunks[index] = chunk.tensor
                items.append(_write_item(index, pieces, chunk))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the chunk of a write."""
        return _with_own_storage(self._chunks[index])


def _with_own_storage(chunk: torch.Tensor) -> torch.Tensor:
    """Return a view with a storage of just its bytes, where it is in host memory.

    DCP copies what is a part of a larger storage, and keeps the last such copy of every tensor until all are written.
    """
    if chunk.device.type != "cpu" or not chunk.is_contiguous() or chunk.dim() == 0:  # which is no view of bytes
        return chunk
    return torch.from_numpy(chunk.view(torch.uint8).numpy()).view(chunk.dtype)


def _write_item(index: MetadataIndex, pieces: Pieces, chunk: Piece) -> WriteItem:
    place = ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.shape)
    data = TensorWriteData(place, TensorProperties(dtype=pieces.dtype), torch.Size(pieces.size))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class PiecesLoadPlanner(DefaultLoadPlanner):
    """Reads tensors into a state dict of `Pieces`, whatever chunks they were written in, and nothing else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Mapping[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state dict as it is; DCP's own flattens it."""
        self.state_dict, self.metadata, self.is_coordinator = dict(state_dict), metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill the pieces of this rank."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, pieces in self.state_dict.items():
            places = [ChunkStorageMetadata(torch.Size(p.offsets), p.tensor.shape) for p in pieces.pieces]
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, entry, places)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        # By number: with a column split two pieces of a row-wise state begin at the same row.
        """Return the part of a piece that a read fills."""
        return self.state_dict[index.fqn].pieces[index.index].tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse objects: a checkpoint holds tensors alone."""
        raise ValueError(f"{read_item.storage_index.fqn} is not a tensor")
