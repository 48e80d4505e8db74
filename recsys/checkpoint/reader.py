"""Reading checkpoint tensors: nothing is executed, and files must hold what `.metadata` describes."""

import enum
import io
import math
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from recsys.checkpoint.files import causes
from recsys.checkpoint.pieces import Pieces, PiecesLoadPlanner
from recsys.errors import UserError

METADATA_FILE = ".metadata"
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}
_Form = tuple[tuple[int, ...], torch.dtype]  # sizes and type of a tensor


class SafeReader(FileSystemReader):
    """DCP's reader, whose `.metadata` may hold descriptions of tensors in the checkpoint's files and nothing else.

    Args:
        files: (bytes, checksum) of the checkpoint's files by name; others are not opened.
    """

    def __init__(self, path: Path, files: Mapping[str, tuple[int, str]]) -> None:
        super().__init__(path)
        self._folder, self._sizes = path, {name: size for name, (size, _) in files.items()}
        self._metadata: Metadata | None = None
        self._forms: dict[MetadataIndex, _Form] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the tensors.

        Raises:
            UserError: it is damaged, names other objects, or describes what is no tensor, or tensors whose pieces are
                not all of them, each once, and the whole content of the files that they lie in.
        """
        if self._metadata is not None:
            return self._metadata
        try:
            metadata = _MetadataUnpickler(io.BytesIO((self._folder / METADATA_FILE).read_bytes())).load()
            self._forms = _forms(metadata, self._sizes)
        except Exception as error:  # unpickling damaged bytes may raise anything
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"checkpoint '{self._folder}' is corrupt: {METADATA_FILE}: {reason}; take another one"
            ) from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._metadata = metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors as DCP does, each of the size and type that is described."""
        items: dict[str, list[Any]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name in items:
            with (self._folder / name).open("rb") as file:
                for item in items[name]:
                    place, (sizes, dtype) = self.storage_data[item.storage_index], self._forms[item.storage_index]
                    tensor = torch.load(self._slice_file(file, place), map_location="cpu", weights_only=True)
                    if type(tensor) is not torch.Tensor or (tuple(tensor.shape), tensor.dtype) != (sizes, dtype):
                        raise ValueError(f"{name} does not have {item.storage_index.fqn} as {METADATA_FILE} says")
                    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        tensor = tensor.narrow(dim, start, length)
                    planner.resolve_tensor(item).detach().copy_(tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_pieces(state: dict[str, Pieces], reader: SafeReader, group: Any = None, no_dist: bool = False) -> None:
    """Read tensors into the pieces of this rank; collective, unless `no_dist`.

    Raises:
        UserError: on every rank, what a rank reads is damaged or is not what `.metadata` says.
    """
    try:
        dcp.load(dict(state), storage_reader=reader, planner=PiecesLoadPlanner(), process_group=group, no_dist=no_dist)
    except CheckpointException as error:
        raise UserError(f"checkpoint '{reader.path}' cannot be read: {causes(error)}; take another one") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


def _enum_member(kind: Any, name: str) -> Any:
    """Stand in for getattr, as which Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickle members of an Enum."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"it asks for builtins.getattr of {kind}, which describes no tensor")
    return kind[name]


def _forms(metadata: Metadata, file_sizes: Mapping[str, int]) -> dict[MetadataIndex, _Form]:
    """Return sizes and type of each piece of a tensor, by its place.

    Raises:
        ValueError: a tensor's pieces do not cover it, each element once, or do not fill the files that they lie in.
    """
    forms: dict[MetadataIndex, _Form] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata or type(name) is not str:
            raise ValueError("it describes an object that is no tensor")
        boxes, dtype = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks], entry.properties.dtype
        numbers = [number for box in [entry.size, *(side for box in boxes for side in box)] for number in box]
        if not isinstance(dtype, torch.dtype) or not _counts(numbers) or not _tile(tuple(entry.size), boxes):
            raise ValueError(f"the pieces of {name} do not cover it, each of its elements once")
        for offsets, sizes in boxes:
            index = MetadataIndex(name, offsets)
            place = metadata.storage_data.get(index)
            if place is None or index in forms or place.transform_descriptors:
                raise ValueError(f"a piece of {name} has no place of its own")
            if place.relative_path not in file_sizes:
                raise ValueError("it names a file that the checkpoint does not have")
            if not _counts([place.offset, place.length]) or math.prod(sizes) * dtype.itemsize > place.length:
                raise ValueError(f"a piece of {name} is larger than its place")
            forms[index] = sizes, dtype
            spans.setdefault(place.relative_path, []).append((place.offset, place.length))
    wrong = [path for path in spans if not _follow(spans[path], file_sizes[path])]
    if wrong or len(forms) != len(metadata.storage_data):
        raise ValueError(f"what it describes is not all that lies in {', '.join(wrong) or 'the files'}, each once")
    return forms


def _counts(numbers: Iterable[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _tile(size: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether boxes of (offsets, sizes) cover a tensor, each element once, as cut by rows, and by columns."""
    if not size or 0 in size:
        return all(sizes == size for _, sizes in boxes) and len(boxes) == 1
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
