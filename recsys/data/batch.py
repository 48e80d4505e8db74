"""The batch that travels from the loader to the model."""

import io
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys.data.buffers import Fence
from recsys.data.order import Position
from recsys.runtime.files import replace_file


@dataclass
class Batch(Pipelineable):
    """One rank's rows of a step. Rows of weight 0 fill up the last batch of an epoch; their lists are empty.

    Attributes:
        ids: table rows of the id features, jagged, keys in config order; values int32 where that holds all rows, else
            int64 (half the bytes to page-lock, copy and exchange), lengths int32, and weights float32 if any feature is
            weighted.
        floats: [rows, float features] float32.
        labels: [rows, labels] float32. weights: [rows] float32.
        known_labels: [rows, labels] float32, 1 where a label is known and 0 where it was null; None: all are known.
        lists: retrieval's `targets` and `seen` as positions in the item corpus (-1: not in it), or None.
        num_rows: rows of the data in this batch, without the fill and the bad ones.
        num_bad_rows: rows that could not be read; they have become fill.
        micro_batches: bounds of the rows that the dense part computes together, from 0 to the number of rows.
        position: where training stands once this batch is trained (host only).
        fence: of the host memory that the tensors lie in.
        id_bounds: where each of `micro_batches` begins and ends in the ids of each feature; empty if there is but one.
        first_row: the place of the first row in the global batch.
    """

    ids: KeyedJaggedTensor
    floats: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    lists: KeyedJaggedTensor | None
    num_rows: int
    num_bad_rows: int
    micro_batches: tuple[int, ...]
    position: Position
    fence: Fence
    id_bounds: tuple[tuple[int, ...], ...] = ()
    first_row: int = 0
    known_labels: torch.Tensor | None = None

    def label_weights(self, label: int) -> torch.Tensor:
        """Return what each row counts for a label, by its number: [rows] float32."""
        return self.weights if self.known_labels is None else self.weights * self.known_labels[:, label]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        copy = replace(
            self,
            ids=self.ids.to(device, non_blocking=non_blocking),
            floats=self.floats.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
            known_labels=None if self.known_labels is None else self.known_labels.to(device, non_blocking=non_blocking),
            lists=None if self.lists is None else self.lists.to(device, non_blocking=non_blocking),
        )
        if device.type == "cuda" and self.floats.device.type == "cpu":
            self.fence.record()  # until then the loader must not write into the memory that is being copied
        return copy

    def dense_rows(self, start: int, stop: int) -> "Batch":
        """Return the batch with only rows `start` … `stop` - 1 of what the dense part reads; `ids` stay whole."""
        floats, labels, weights = (t[start:stop] for t in (self.floats, self.labels, self.weights))
        known = None if self.known_labels is None else self.known_labels[start:stop]
        return replace(self, floats=floats, labels=labels, weights=weights, known_labels=known)

    def save(self, path: Path) -> None:
        """Write the tensors to a file that `torch.load` reads, to be looked at; folders are made."""
        path.parent.mkdir(exist_ok=True)
        jagged = {}
        for name, each in self.ids.to(torch.device("cpu")).to_dict().items():
            jagged[name] = {"values": each.values(), "lengths": each.lengths(), "weights": each.weights_or_none()}
        tensors = {name: getattr(self, name) for name in ("floats", "labels", "weights", "known_labels")}
        dense = {name: tensor.cpu() for name, tensor in tensors.items() if tensor is not None}
        content = io.BytesIO()  # torch.save does not say what is wrong with a file
        torch.save({"ids": jagged, **dense}, content)
        replace_file(path, content.getvalue())

    def record_stream(self, stream: torch.Stream) -> None:
        self.ids.record_stream(stream)
        for tensor in (self.floats, self.labels, self.weights, self.known_labels):
            if tensor is not None:
                tensor.record_stream(stream)
        if self.lists is not None:
            self.lists.record_stream(stream)
