"""Tensors as ranks hold them, and byte for byte in files: a file for each rank, and an index of what lies where."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsys.checkpoint.files import HashedFile
from recsys.errors import UserError
from recsys.runtime.files import naming
from recsys.tables.bytes import CHUNK_BYTES
from recsys.tables.spec import local_shards

SUFFIX = ".bin"


@dataclass(frozen=True)
class LocalShard:
    """A part of a tensor on this rank: `tensor` begins at `offsets` of the whole."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class LocalTensor:
    """One tensor of a checkpoint, as far as this rank holds it.

    Attributes:
        size: that of the whole tensor.
        shards: those on this rank; when loading, they may cover only a part, or the same rows twice.
        replicated: every rank holds all of it.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[LocalShard, ...]
    replicated: bool = False

    @classmethod
    def of(cls, value: Any) -> "LocalTensor":
        """Wrap a ShardedTensor, or a tensor that every rank holds; nothing is copied."""
        shards = tuple(LocalShard(tensor.detach(), offsets) for tensor, offsets in local_shards(value))
        if isinstance(value, ShardedTensor):
            metadata = value.metadata()
            return cls(tuple(metadata.size), metadata.tensor_properties.dtype, shards)
        return cls(tuple(value.shape), value.dtype, shards, replicated=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds of the tensor."""
        return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in self.shards)

    def copy(self) -> "LocalTensor":
        """Return a copy in host memory."""
        to_host = partial(torch.Tensor.to, device="cpu", copy=True, memory_format=torch.contiguous_format)
        return replace(self, shards=tuple(LocalShard(to_host(s.tensor), s.offsets) for s in self.shards))

    def moved(self, size: tuple[int, ...], spans: list[tuple[int, int, int]]) -> "LocalTensor":
        """Return the rows that a checkpoint's tensor has too, as shards at their places there.

        Args:
            size: that of the checkpoint's tensor. spans: (first row here, first row there, number of rows).
        """
        moved = []
        for shard in self.shards:
            first, stop = shard.offsets[0], shard.offsets[0] + shard.tensor.shape[0]
            for here, there, count in spans:
                start, end = max(first, here), min(stop, here + count)
                if start < end:
                    offsets = (there + start - here, *shard.offsets[1:])
                    moved.append(LocalShard(shard.tensor[start - first : end - first], offsets))
        return LocalTensor(size, self.dtype, tuple(moved))


@dataclass(frozen=True)
class Place:
    """Part of a tensor in a file: its first byte there, and its offsets and sizes in the tensor, row-major."""

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """Shape and type (`float32` …) of a tensor, and its places in a checkpoint."""

    size: tuple[int, ...]
    dtype: str
    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, local: LocalTensor) -> "Entry":
        """Describe a tensor that is in no file yet."""
        return cls(local.size, str(local.dtype).removeprefix("torch."))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Entry":
        """Return an entry from its parsed JSON.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        size, dtype, places = _whole(content["size"]), content["dtype"], content["places"]
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"there is no number type {dtype}")
        parts = [Place(p["file"], _whole([p["start"]])[0], _whole(p["offsets"]), _whole(p["sizes"])) for p in places]
        return cls(size, dtype, tuple(parts))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as a torch.dtype."""
        return getattr(torch, self.dtype)

    def empty(self) -> torch.Tensor:
        """Return a new tensor of this shape and type in host memory."""
        return torch.empty(self.size, dtype=self.torch_dtype)


def write_tensors(path: Path, tensors: Mapping[str, LocalTensor]) -> tuple[dict[str, Entry], tuple[int, str]]:
    """Write this rank's shards into one new file; return the entries of tensors, and size and checksum of the file.

    Raises:
        OSError: it cannot be written; its `filename` is set.
    """
    entries = {}
    with naming(path), HashedFile(path) as file:
        for name, local in tensors.items():
            places = []
            for shard in local.shards:
                if shard.tensor.numel():
                    places.append(Place(path.name, file.num_bytes, shard.offsets, tuple(shard.tensor.shape)))
                    for content in _contents(shard.tensor):
                        file.write(content)
            entries[name] = replace(Entry.of(local), places=tuple(places))
    return entries, file.entry


def _contents(tensor: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor, some rows at a time."""
    for rows in torch.atleast_1d(tensor).split(_rows_at_once(tensor.shape, tensor.dtype)):
        yield rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _rows_at_once(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return max(1, CHUNK_BYTES // max(1, math.prod(size[1:]) * dtype.itemsize))


def read_tensors(folder: Path, entries: Mapping[str, Entry], targets: Mapping[str, LocalTensor]) -> None:
    """Fill this rank's shards from the files of a checkpoint, however the tensors were cut when they were written.

    Args:
        targets: by name in `entries`; numbers of another type are converted.

    Raises:
        UserError: a file cannot be read, or is shorter than it was.
    """
    try:
        for name, local in targets.items():
            for place in entries[name].places:
                for shard in local.shards:
                    _read_common(folder / place.file, place, entries[name].torch_dtype, shard)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"checkpoint '{folder}' cannot be read: {reason}; use another one") from error


def pick_rows(folder: Path, entry: Entry, rows: np.ndarray) -> torch.Tensor:
    """Return some rows of a tensor [rows, columns], by their numbers, int64, without reading the others."""
    picked = torch.empty(len(rows), entry.size[1], dtype=entry.torch_dtype)
    for place in entry.places:
        (first, column), (count, width) = place.offsets, place.sizes
        there = np.flatnonzero((rows >= first) & (rows < first + count))
        bits = f"u{picked.itemsize}"  # NumPy lacks some types
        content = np.memmap(folder / place.file, bits, "r", place.start, (count, width))
        values = torch.from_numpy(content[rows[there] - first]).view(picked.dtype)
        picked[torch.from_numpy(there), column : column + width] = values
    return picked


def read_rows(folder: Path, entry: Entry, start: int, stop: int) -> torch.Tensor:
    """Return rows of a checkpoint's tensor, in its type; raises the errors of `read_tensors`."""
    rows = torch.empty((stop - start, *entry.size[1:]), dtype=entry.torch_dtype)
    shard = LocalShard(rows, (start, *[0] * (rows.dim() - 1)))
    read_tensors(folder, {"": entry}, {"": LocalTensor(entry.size, rows.dtype, (shard,))})
    return rows


def _read_common(path: Path, place: Place, dtype: torch.dtype, shard: LocalShard) -> None:
    """Copy the elements that a place in a file and a shard have in common, some rows at a time."""
    target, sizes = torch.atleast_1d(shard.tensor.detach()), place.sizes or (1,)
    there, here = place.offsets or (0,), shard.offsets or (0,)
    sides = zip(there, sizes, here, target.shape, strict=True)
    common = [(max(a, b), min(a + length, b + width)) for a, length, b, width in sides]
    if any(start >= stop for start, stop in common):
        return
    (first, stop), *others = common
    row_size, step = math.prod(sizes[1:]) * dtype.itemsize, _rows_at_once(sizes, dtype)
    with path.open("rb") as file:
        file.seek(place.start + (first - there[0]) * row_size)
        for row in range(first, stop, step):
            end = min(stop, row + step)
            values = torch.from_numpy(np.fromfile(file, np.uint8, (end - row) * row_size)).view(dtype)
            rows = values.reshape(end - row, *sizes[1:])[_within([(row, end), *others], (row, *there[1:]))]
            target[_within([(row, end), *others], here)].copy_(rows)


def _within(box: Iterable[tuple[int, int]], offsets: Iterable[int]) -> tuple[slice, ...]:
    """Return the slices that a box of (start, stop) takes from a tensor that begins at `offsets`."""
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(box, offsets, strict=True))


def check_entries(entries: Mapping[str, Entry], file_sizes: Mapping[str, int]) -> None:
    """Refuse entries whose places do not cover each tensor, and the files of tensors, exactly once.

    Args:
        file_sizes: bytes of each file of the checkpoint by name.

    Raises:
        ValueError: names the tensor or the files.
    """
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in file_sizes if name.endswith(SUFFIX)}
    for name, entry in entries.items():
        if not _tile(entry.size, [(place.offsets, place.sizes) for place in entry.places]):
            raise ValueError(f"the pieces of {name} do not cover it, each of its elements once")
        for place in entry.places:
            if place.file not in spans:
                raise ValueError("it names a file that the checkpoint does not have")
            spans[place.file].append((place.start, math.prod(place.sizes) * entry.torch_dtype.itemsize))
    if wrong := [name for name in spans if not _follow(spans[name], file_sizes[name])]:
        raise ValueError(f"what it describes is not all that lies in {', '.join(wrong)}, each once")


def _whole(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} is not a list of whole numbers")
    return tuple(numbers)


def _tile(size: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether boxes of (offsets, sizes), cut by columns, then by rows, cover each element of a tensor once."""
    if any(len(side) != len(size) for box in boxes for side in box):
        return False
    if 0 in size:
        return not boxes
    if not size:
        return len(boxes) == 1
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for offsets, sizes in boxes:
        rows.setdefault((offsets[1:], sizes[1:]), []).append((offsets[0], sizes[0]))
    if len(size) == 2:
        covered = _follow([(offset, width) for (offset,), (width,) in rows], size[1])
    else:
        covered = list(rows) == [((0,) * (len(size) - 1), size[1:])]
    return covered and all(_follow(spans, size[0]) for spans in rows.values())


def _follow(spans: Iterable[tuple[int, int]], end: int) -> bool:
    """Return whether spans of (start, length) cover 0 … end, each number once."""
    at = 0
    for start, length in sorted(spans):
        if start != at:
            return False
        at += length
    return at == end
