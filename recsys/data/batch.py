"""The batch that travels from the loader to the model, in one block of memory."""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys.data.order import Position
from recsys.data.pool import Fence
from recsys.runtime.files import replace_file


class Sampled(NamedTuple):
    """Where a batch has items drawn as negatives: rows `start` … have weight 0 and only the features of an item.

    Attributes:
        first: number of the first of these rows, counting on from the global batch and items drawn by lower ranks.
    """

    start: int
    first: int


@dataclass
class Batch(Pipelineable):
    """One rank's rows of a step. Rows of weight 0 fill up the last batch of an epoch; their lists are empty.

    Attributes:
        ids: table rows of the id features, jagged, keys in config order; values int32 if that holds all table rows
            (half the bytes to page-lock, copy and exchange), else int64; lengths int32; weights float32 if any feature
            is weighted.
        floats: [rows, columns of float features] float32; a vector has `dim` columns, and vectors come last.
        labels: [rows, labels] float32; in data.train with a teacher, its score for each label follows.
        weights: [rows] float32.
        known_labels: [rows, labels] float32, 1 where a label is known and 0 where it was null; None: all are known.
        lists: for retrieval, `targets` and `seen` as positions in the item corpus (-1: not in it), or None.
        num_rows: rows of the data in this batch, without filler rows and bad rows.
        num_bad_rows: rows that could not be read; their weight is 0.
        micro_batches: bounds of the rows that the dense part computes together, from 0 to the number of rows.
        position: where training stands once this batch is trained (host only).
        fence: guards the host memory that the tensors lie in against reuse.
        id_bounds: by feature, the bounds of `micro_batches` among its ids; empty if there is only one micro-batch.
        first_row: place of the first row in the global batch.
        sampled: for a model with sampled negatives, the rows after those of the data.
        content: bytes of the block that the tensors lie in, if that is host memory.
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
    sampled: Sampled | None = None
    content: torch.Tensor | None = None

    def row_numbers(self, start: int, stop: int) -> torch.Tensor:
        """Return the places in the global batch of this rank's rows `start` … `stop` - 1, int64."""
        rows = torch.arange(start, stop, device=self.weights.device)
        if self.sampled is None:
            return rows + self.first_row
        first, number = self.sampled
        return torch.where(rows < first, rows + self.first_row, rows - first + number)

    def label_weights(self, label: int) -> torch.Tensor:
        """Return the weights of rows for the label with this index, [rows] float32: 0 where it is unknown."""
        return self.weights if self.known_labels is None else self.weights * self.known_labels[:, label]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device; if its tensors lie in one block of host memory, all are copied at once."""
        tensors, content = self._tensors(), self.content
        if device.type == "cpu" or content is None:
            return replace(self, **{name: part.to(device, non_blocking=non_blocking) for name, part in tensors.items()})
        copy = content.to(device, non_blocking=non_blocking)  # one copy for all tensors
        if device.type == "cuda":
            self.fence.record()  # the loader must not reuse the memory before the copy is done
        return replace(self, content=None, **{name: _moved(part, content, copy) for name, part in tensors.items()})

    def dense_rows(self, start: int, stop: int) -> "Batch":
        """Return the batch with floats, labels and weights of rows `start` … `stop` - 1 only, but with all its ids."""
        if (start, stop) == (0, len(self.weights)):
            return self
        floats, labels, weights = (t[start:stop] for t in (self.floats, self.labels, self.weights))
        known = None if self.known_labels is None else self.known_labels[start:stop]
        return replace(self, floats=floats, labels=labels, weights=weights, known_labels=known)

    def save(self, path: Path) -> None:
        """Write the tensors, for inspection, to a file that `torch.load` reads; create its folder if it is missing."""
        path.parent.mkdir(exist_ok=True)
        jagged = {}
        for name, tensor in self.ids.to(torch.device("cpu")).to_dict().items():
            jagged[name] = {"values": tensor.values(), "lengths": tensor.lengths(), "weights": tensor.weights_or_none()}
        dense = {name: value.cpu() for name, value in self._tensors().items() if isinstance(value, torch.Tensor)}
        content = io.BytesIO()  # because errors of torch.save on files do not say what is wrong
        torch.save({"ids": jagged, **dense}, content)
        replace_file(path, content.getvalue())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors from being reused before the work that is queued on a stream is done."""
        for value in self._tensors().values():
            value.record_stream(stream)

    def _tensors(self) -> dict[str, Any]:
        """Return the tensors that the batch has, by name."""
        names = ("ids", "floats", "labels", "weights", "known_labels", "lists")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class MicroBatches:
    """How many rows, and ids in their lists, a micro-batch of the dense part may have; None: any number."""

    max_rows: int | None = None
    max_ids: int | None = None

    def bounds(self, lengths: np.ndarray) -> tuple[int, ...]:
        """Return the bounds of as few micro-batches as possible, in order; a row with too many ids is one by itself.

        Args:
            lengths: how many ids each feature and row has, [features, rows].
        """
        num_rows = lengths.shape[1]
        if self.max_ids is None:
            step = self.max_rows or num_rows
            return (*range(0, num_rows, step), num_rows)
        ends, bounds = np.cumsum(lengths.sum(axis=0), dtype=np.int64), [0]
        while bounds[-1] < num_rows:
            start = bounds[-1]
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + self.max_ids, side="right")))
            bounds.append(min(stop, num_rows, start + (self.max_rows or num_rows)))
        return tuple(bounds)


def _moved(value: Any, content: torch.Tensor, copy: torch.Tensor) -> Any:
    """Return the same tensor or KeyedJaggedTensor, which is a view of a block, as a view of a copy of the block."""
    if isinstance(value, KeyedJaggedTensor):
        values, lengths, weights = value.values(), value.lengths(), value.weights_or_none()
        return KeyedJaggedTensor(
            keys=value.keys(),
            values=_moved(values, content, copy),
            lengths=_moved(lengths, content, copy),
            weights=None if weights is None else _moved(weights, content, copy),
            length_per_key=value.length_per_key(),
        )
    start = value.data_ptr() - content.data_ptr() if value.numel() else 0
    return copy[start : start + value.nbytes].view(value.dtype).view(value.shape)
