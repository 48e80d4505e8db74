"""Files of an export: rows of tables, and indices of ids by hash, written in chunks, with checksums."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recsys.checkpoint.tensor_files import Entry, read_rows
from recsys.config.choices import RowCode
from recsys.errors import UserError
from recsys.ids import KeptRows, read_keys
from recsys.runtime.files import naming
from recsys.runtime.parquet import write_parquet
from recsys.serving.score import sha256
from recsys.tables.bytes import CHUNK_BYTES
from recsys.tables.row_codes import encode_rows

_STORED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Files:
    """Files of a folder, with their entries in the manifest."""

    folder: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, name: str, chunks: Iterator[Any], always_verified: bool = True) -> str:
        """Write a file from chunks of bytes, synced; return its name.

        Args:
            always_verified: the checksum is compared whenever the export is opened, whatever the size of the file.
        """
        path, total, size = self.folder / name, hashlib.sha256(), 0
        path.parent.mkdir(exist_ok=True)
        with naming(path), path.open("wb") as file:
            for chunk in chunks:
                total.update(chunk)
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        self.entries[name] = {"bytes": size, "sha256": total.hexdigest(), "always_verified": always_verified}
        return name

    def parquet(self, name: str, tables: Iterator[pa.Table]) -> str:
        """Write tables as a Parquet file; return its name."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        first = next(tables)
        write_parquet(path, chain([first], (table.cast(first.schema) for table in tables)))
        self.entries[name] = {"bytes": path.stat().st_size, "sha256": sha256(path), "always_verified": True}
        return name

    def arrow(self, name: str, columns: dict[str, pa.Array]) -> str:
        """Write columns as an Arrow file, which can be memory-mapped; return its name."""
        table = pa.table(columns)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return self.write(name, iter([sink.getvalue()]))


def write_table(files: Files, name: str, checkpoint: Path, entry: Entry, encoding: str) -> dict[str, Any]:
    """Write the rows of a checkpoint's table; return their entry in the manifest.

    Args:
        encoding: a TableEncoding's name; `stored` is the type in the checkpoint.

    Raises:
        UserError: the table's type, or its width, does not go with the encoding.
    """
    num_rows, columns = entry.size
    if entry.dtype not in _STORED:
        raise UserError(f"table '{name}' is stored as {entry.dtype}, but export reads {', '.join(_STORED)}")
    encoding = _STORED[entry.dtype] if encoding == "stored" else encoding
    if encoding == "int2" and columns % 8:
        raise UserError(f"table '{name}' has embedding_dim {columns}, but int2 needs a multiple of 8; use int4")
    step, strides = max(1, CHUNK_BYTES // (4 * columns)), set()

    def chunks() -> Iterator[np.ndarray]:
        for start in range(0, num_rows, step):
            coded = encoded(read_rows(checkpoint, entry, start, min(num_rows, start + step)), encoding)
            strides.add(coded.shape[1])
            yield coded.reshape(-1).numpy()

    file = files.write(f"tables/{name}.bin", chunks(), always_verified=False)
    (stride,) = strides
    return {"file": file, "encoding": encoding, "rows": num_rows, "columns": columns, "stride": stride}


def encoded(rows: torch.Tensor, encoding: str) -> torch.Tensor:
    """Encode rows, [rows, columns], as bytes, uint8 [rows, stride], in an encoding other than `stored`."""
    if encoding in _FLOATS:
        return rows.to(_FLOATS[encoding]).view(torch.uint8)
    return encode_rows(rows.float(), RowCode[encoding.upper()])


def write_index(files: Files, name: str, ids: pa.Array, seed: int) -> dict[str, Any]:
    """Write the sorted hashes of distinct ids, the place of each id, and the ids if they are texts; return the entry in
    the manifest."""
    keys = read_keys(ids)
    hashes = keys.hashes(seed)
    places = np.arange(len(ids)) if keys.indices is None else np.argsort(keys.indices)
    order = np.argsort(hashes)
    width = np.int32 if len(ids) < 2**31 else np.int64
    columns = {"hash": pa.array(hashes[order]), "number": pa.array(places[order].astype(width))}
    if len(keys.texts):
        columns["text"] = keys.texts.take(pa.array(order))
    id_type = "texts" if len(keys.texts) else "unsigned" if keys.numbers.dtype.kind == "u" else "integers"
    return {"file": files.arrow(name, columns), "ids": id_type}


def write_kept(files: Files, table: str, kept: KeptRows) -> str:
    """Write a bit for each row that a table had before some were pruned, in words of 64; return the file's name."""
    bits = np.packbits(kept.kept.to_numpy(zero_copy_only=False), bitorder="little")
    return files.write(f"mappings/{table}.kept.bin", iter([np.pad(bits, (0, -len(bits) % 8))]))
