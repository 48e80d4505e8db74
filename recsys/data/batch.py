"""The batch that travels from the loader to the model."""

from dataclasses import dataclass, replace

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys.data.order import Position


@dataclass
class Batch(Pipelineable):
    """One rank's rows of a step. Rows of weight 0 fill up the last batch of an epoch; their lists are empty.

    Attributes:
        ids: table rows of the id features, jagged, keys in config order; values int64, lengths int32.
        floats: [rows, float features] float32.
        labels, weights: [rows] float32.
        lists: retrieval's `targets` and `seen` as positions in the item corpus (-1: not in it), or None.
        num_rows: rows of the data in this batch, without the fill.
        position: where training stands once this batch is trained (host only).
    """

    ids: KeyedJaggedTensor
    floats: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    lists: KeyedJaggedTensor | None
    num_rows: int
    position: Position

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=non_blocking),
            floats=self.floats.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
            lists=None if self.lists is None else self.lists.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.ids.record_stream(stream)
        for tensor in (self.floats, self.labels, self.weights):
            tensor.record_stream(stream)
        if self.lists is not None:
            self.lists.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """Return a copy in page-locked memory. Every tensor: one that is left out makes its copy wait."""
        return replace(
            self,
            ids=self.ids.pin_memory(),
            floats=self.floats.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=self.weights.pin_memory(),
            lists=None if self.lists is None else self.lists.pin_memory(),
        )
