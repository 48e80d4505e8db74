"""Raw ids to table rows: whole columns at a time, the same on every version and machine.

An integer id is mixed with the finalizer of SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2714064.2660195);
a string or binary id with XXH3-64 over its UTF-8 bytes, each distinct value once. Both are seeded.
"""

from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from recsys.config import IdMappingType, TableConfig
from recsys.errors import UserError

NULL_ROW = 0


class IdMapping(Protocol):
    """Maps a column of raw ids without nulls, an Arrow array, to rows: int64 array of the same length."""

    def __call__(self, ids: pa.Array) -> np.ndarray: ...


def hash_integers(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Hash integers of any width and sign.

    Args:
        values: integers, any shape; equal numbers hash equally whatever their width.
        seed: 0 … 2**64 - 1.

    Returns:
        uint64 of the same shape.
    """
    x = values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else values.astype(np.uint64)
    with np.errstate(over="ignore"):
        x = x + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) % 2**64)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def hash_column(ids: pa.Array, seed: int = 0) -> np.ndarray:
    """Hash a column of integer, boolean, string or binary ids without nulls to uint64, shape [len(ids)].

    Raises:
        TypeError: the column holds another type.
    """
    kind = ids.type
    if pa.types.is_dictionary(kind):
        hashed = hash_column(ids.dictionary, seed)
        return hashed[ids.indices.to_numpy(zero_copy_only=False)]
    if pa.types.is_boolean(kind):
        return hash_integers(ids.to_numpy(zero_copy_only=False).astype(np.int64), seed)
    if pa.types.is_integer(kind):
        return hash_integers(ids.to_numpy(zero_copy_only=False), seed)
    if is_text(kind):
        encoded = ids.dictionary_encode()
        large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        distinct = encoded.dictionary.cast(pa.large_binary() if large else pa.binary()).to_pylist()
        hashed = np.fromiter((xxhash.xxh3_64_intdigest(v, seed) for v in distinct), np.uint64, len(distinct))
        return hashed[encoded.indices.to_numpy(zero_copy_only=False)]
    raise TypeError(f"ids must be integers or strings, found {kind}")


def is_text(kind: pa.DataType) -> bool:
    """Tell whether an Arrow type holds strings or bytes."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


class HashMapping:
    """Any id to rows 1 … num_embeddings - 1; row 0 stays for null."""

    def __init__(self, num_embeddings: int, seed: int) -> None:
        self.num_buckets = np.uint64(num_embeddings - 1)
        self.seed = seed

    def __call__(self, ids: pa.Array) -> np.ndarray:
        return (hash_column(ids, self.seed) % self.num_buckets).astype(np.int64) + 1


class IdentityMapping:
    """Integer id i to row i."""

    def __init__(self, num_embeddings: int) -> None:
        self.num_embeddings = num_embeddings

    def __call__(self, ids: pa.Array) -> np.ndarray:
        if not pa.types.is_integer(ids.type):
            raise UserError(f"mapping: identity takes integers, found {ids.type}; use mapping: hash")
        rows = ids.to_numpy(zero_copy_only=False)
        outside = (rows < 0) | (rows >= self.num_embeddings)
        if outside.any():
            raise UserError(
                f"id {rows[outside][0]} is outside 0 … {self.num_embeddings - 1} (mapping: identity); "
                f"raise num_embeddings, or use mapping: hash"
            )
        return rows.astype(np.int64)


class IndexMapping:
    """A raw id to its position in a list of distinct ids, -1 where it is not in it."""

    def __init__(self, values: pa.Array) -> None:
        self.values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values

    def __call__(self, ids: pa.Array) -> np.ndarray:
        if pa.types.is_integer(ids.type) and pa.types.is_integer(self.values.type):
            # A number that the list's type cannot hold is only not in the list.
            limits = np.iinfo(self.values.type.to_pandas_dtype())
            numbers = ids.to_numpy(zero_copy_only=False)
            ids = pc.if_else(
                pa.array((numbers >= limits.min) & (numbers <= limits.max)), ids, pa.scalar(None, ids.type)
            )
        try:
            ids = ids.cast(self.values.type)
        except pa.ArrowException as error:
            raise UserError(f"ids of type {ids.type} do not compare with ids of type {self.values.type}") from error
        found = pc.fill_null(pc.index_in(ids, value_set=self.values), -1)
        return found.to_numpy(zero_copy_only=False).astype(np.int64)


def build_mapping(table: TableConfig) -> IdMapping:
    """Return the mapping that a table's config asks for."""
    if table.mapping is IdMappingType.identity:
        return IdentityMapping(table.num_embeddings)
    return HashMapping(table.num_embeddings, table.hash_seed)
