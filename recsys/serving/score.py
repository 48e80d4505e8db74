"""Score rows and recommend items with an exported model; needs numpy, pyarrow and onnxruntime, and nothing else.

    python score.py predict DATA OUT.parquet [--keep a,b]
    python score.py recommend USERS OUT.parquet --k 20 [--keep a,b]

DATA is a Parquet file, a folder of such, or a glob. In a program:

    from score import Scorer
    scorer = Scorer("folder of the export")
    scores = scorer.score(table)                    # Arrow in, Arrow out, row for row
    best = scorer.recommend(users, k=20)

manifest.json describes the files, and how a column becomes numbers. A batch goes from raw ids to hashes, to rows of
tables, to vectors, to the sum of the vectors of each list; all vectors and floats then enter the ONNX graph.
"""

import argparse
import copy
import glob
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

FORMAT, MANIFEST, PROGRAM = 1, "manifest.json", "dense.pt2"  # torch's program, which may be missing
NULL_ROW = 0
ROWS_AT_ONCE = 8192  # of a file
STREAMED: Any = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": 1 << 20}  # else read whole
VERIFIED_BYTES = 64 << 20  # larger files of vectors are read by row, and verified on request
SCORES_AT_ONCE = 1 << 24  # of users with items
PAIRS_AT_ONCE = 1 << 22  # of ids in a list, for which attention needs several numbers
BITS, LOW = 2**64 - 1, 2**32 - 1
NANOSECONDS = {"day": 86_400 * 10**9, "ms": 10**6, "us": 10**3, "ns": 1}  # of dates and times


class ExportError(Exception):
    """A mistake in the data, or a damaged export, in one sentence."""


# Hashes: SplitMix64's finalizer for integers, XXH3-64 for texts; both are seeded.


def mix(x: np.ndarray) -> np.ndarray:
    """Return SplitMix64's finalizer of uint64 [n]."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def seeded(x: np.ndarray, seed: int) -> np.ndarray:
    """Return the hashes of uint64 [n] by a seed."""
    return mix(x + (0x9E3779B97F4A7C15 * (seed + 1) & BITS))


def hash_numbers(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Return the hashes of integers of any type, uint64 [n]: equal numbers have equal ones."""
    return seeded(numbers.astype(np.int64 if numbers.dtype.kind == "i" else np.uint64).view(np.uint64), seed)


def hash_texts(texts: pa.Array, seed: int) -> np.ndarray:
    """Return the XXH3-64 of a large_binary array, uint64 [n], for texts of one length at a time."""
    bounds = np.frombuffer(texts.buffers()[1], np.int64, len(texts) + 1, texts.offset * 8) if len(texts) else [0]
    content = np.frombuffer(texts.buffers()[2] or b"", np.uint8) if len(texts) else np.zeros(0, np.uint8)
    starts, lengths, hashes = np.asarray(bounds)[:-1], np.diff(bounds), np.empty(len(texts), np.uint64)
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length)
        hashes[places] = xxh3(content[starts[places, None] + np.arange(length)], seed)
    return hashes


SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def word(at: int) -> int:
    """Return 64 bits of the secret."""
    return int.from_bytes(SECRET[at : at + 8], "little")


def folded(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the low half of the 128 bits of a product XOR the high one, uint64."""
    (al, ah), (bl, bh) = (a & LOW, a >> 32), (b & LOW, b >> 32)
    middle = (al * bl >> 32) + (ah * bl & LOW) + al * bh
    return (a * b) ^ ((ah * bl >> 32) + (middle >> 32) + ah * bh)


def avalanche(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 37)) * 0x165667919E3779F9
    return x ^ (x >> 32)


def xxh3(texts: np.ndarray, seed: int) -> np.ndarray:
    """Return the XXH3-64 of texts of one length, uint8 [n, length], as uint64 [n]."""
    n, length = texts.shape

    def read(at: int, width: int = 8) -> np.ndarray:
        return np.ascontiguousarray(texts[:, at : at + width]).view(f"<u{width}")[:, 0].astype(np.uint64)

    def mixed(at: int, secret: int) -> np.ndarray:
        return folded(read(at) ^ (word(secret) + seed & BITS), read(at + 8) ^ (word(secret + 8) - seed & BITS))

    if length <= 3:
        x: np.ndarray = np.full(n, seed ^ word(56) ^ word(64), np.uint64)
        if length:
            first, middle, last = (texts[:, at].astype(np.uint64) for at in (0, length >> 1, length - 1))
            key = ((word(0) & LOW) ^ (word(0) >> 32)) + seed & BITS
            x = (first << 16 | middle << 24 | last | length << 8) ^ key
        x = (x ^ (x >> 33)) * PRIME64[1]
        x = (x ^ (x >> 29)) * PRIME64[2]
        return x ^ (x >> 32)
    if length <= 8:
        seed ^= int.from_bytes((seed & LOW).to_bytes(4, "little"), "big") << 32
        x = (read(length - 4, 4) + (read(0, 4) << 32)) ^ ((word(8) ^ word(16)) - seed & BITS)
        x = (x ^ (x << 49 | x >> 15) ^ (x << 24 | x >> 40)) * 0x9FB21C651E98DF25
        x = (x ^ ((x >> 35) + length)) * 0x9FB21C651E98DF25
        return x ^ (x >> 28)
    if length <= 16:
        low = read(0) ^ ((word(24) ^ word(32)) + seed & BITS)
        high = read(length - 8) ^ ((word(40) ^ word(48)) - seed & BITS)
        return avalanche(low.byteswap() + high + folded(low, high) + length)
    total = np.full(n, length * PRIME64[0] & BITS, np.uint64)
    if length <= 128:
        for i in range((length + 31) // 32):
            total += mixed(16 * i, 32 * i) + mixed(length - 16 * (i + 1), 32 * i + 16)
    elif length <= 240:
        for i in range(8):
            total += mixed(16 * i, 16 * i)
        total = avalanche(total) + mixed(length - 16, 119)
        for i in range(8, length // 16):
            total += mixed(16 * i, 16 * (i - 8) + 3)
    else:
        total += xxh3_sums(texts, seed)
    return avalanche(total)


def xxh3_sums(texts: np.ndarray, seed: int) -> np.ndarray:
    """Return what XXH3 computes from the 64-byte stripes of texts above 240 bytes, uint64 [n]."""
    n, length = texts.shape
    pairs = [(word(at) + seed & BITS, word(at + 8) - seed & BITS) for at in range(0, len(SECRET), 16)]
    secret = b"".join(number.to_bytes(8, "little") for pair in pairs for number in pair)
    sums = np.tile(np.array([PRIME32[2], *PRIME64[:4], PRIME32[1], PRIME64[4], PRIME32[0]], np.uint64), (n, 1))

    def add(at: int, where: int) -> None:
        data = np.ascontiguousarray(texts[:, at : at + 64]).view("<u8")
        keyed = data ^ np.frombuffer(secret, "<u8", 8, where)
        sums[:] += data[:, [1, 0, 3, 2, 5, 4, 7, 6]] + (keyed & LOW) * (keyed >> 32)

    for stripe in range((length - 1) // 64):
        add(64 * stripe, 8 * (stripe % 16))
        if stripe % 16 == 15:
            sums[:] = (sums ^ (sums >> 47) ^ np.frombuffer(secret, "<u8", 8, 128)) * PRIME32[0]
    add(length - 64, 121)
    keyed = sums ^ np.frombuffer(secret, "<u8", 8, 11)
    return np.add.reduce([folded(keyed[:, i], keyed[:, i + 1]) for i in range(0, 8, 2)])


# Columns: what Parquet would hold for an Arrow column, and the ids and numbers in it


class Keys(NamedTuple):
    """Ids as integers of any type [numbers], then as texts, large_binary [texts]; `places` [ids] says which each is,
    None: one after the other. Only decimals may be both."""

    numbers: np.ndarray
    texts: pa.Array
    places: np.ndarray | None
    kind: pa.DataType

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return values of ids, given those of keys."""
        return values if self.places is None else values[self.places]

    def hashes(self, seed: int) -> np.ndarray:
        """Return the hashes of keys, uint64 [keys]."""
        return np.concatenate([hash_numbers(self.numbers, seed), hash_texts(self.texts, seed)])


def stored(array: pa.Array) -> pa.Array:
    """Return a column as Parquet would hold it, so that it is read as in training, whatever its Arrow type is."""
    kind, is_a = array.type, pa.types
    if is_a.is_run_end_encoded(kind) or isinstance(kind, pa.BaseExtensionType):  # such as of UUIDs
        return stored(pc.run_end_decode(array) if is_a.is_run_end_encoded(kind) else array.storage)
    if is_a.is_dictionary(kind):
        return stored(array.dictionary).take(array.indices)  # Arrow decodes none of views, which Polars gives
    if is_a.is_large_list(kind) or is_a.is_fixed_size_list(kind) or "list_view" in str(kind):
        # Arrow's cast of views silently leaves out values.
        ends = pa.array(np.append(0, np.cumsum(pc.list_value_length(array).fill_null(0))), pa.int32())
        return pa.ListArray.from_arrays(ends, array.flatten(), mask=array.is_null())
    if is_a.is_timestamp(kind) and kind.unit == "s":
        return array.cast(pa.timestamp("ms", kind.tz))
    others = {"string_view": "string", "binary_view": "binary", "date64[ms]": "date32", "time32[s]": "time32[ms]"}
    return array.cast("int64" if is_a.is_duration(kind) or is_a.is_null(kind) else others.get(str(kind), kind))


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type holds strings or bytes."""
    return any(name in str(kind) for name in ("string", "binary")) and not pa.types.is_nested(kind)


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type holds numbers, booleans, or points or lengths of time."""
    return (pa.types.is_primitive(kind) or pa.types.is_decimal(kind)) and not pa.types.is_interval(kind)


def raw_times(array: pa.Array) -> np.ndarray:
    """Return dates and times without nulls as their integers."""
    return array.view(pa.int32() if array.type.bit_width == 32 else pa.int64()).to_numpy()


def read_keys(ids: pa.Array, where: str = "") -> Keys:
    """Return the keys of a `stored` column of ids without nulls; errors begin with `where`."""
    kind, none = ids.type, pa.array([], pa.large_binary())
    if is_text(kind):
        encoded = ids.dictionary_encode()
        texts = encoded.dictionary.cast(pa.large_binary())
        return Keys(np.zeros(0, np.int64), texts, encoded.indices.to_numpy(), kind)
    if pa.types.is_decimal(kind):
        return decimal_keys(ids)
    if not is_number(kind):
        raise ExportError(f"{where}ids must be integers or strings, found {kind}")
    if pa.types.is_temporal(kind):
        return Keys(raw_times(ids) * np.int64(NANOSECONDS[getattr(kind, "unit", "day")]), none, None, kind)
    numbers = (ids.cast(pa.uint8()) if pa.types.is_boolean(kind) else ids).to_numpy()
    if numbers.dtype.kind == "f":
        bits = np.finfo(numbers.dtype).nmant + 1
        wrong = (numbers != np.rint(numbers)) | ~(np.abs(numbers) < 2**bits)
        if wrong.any():
            raise ExportError(f"{where}ids must be whole numbers below 2**{bits}, found {numbers[wrong][0]}")
        numbers = numbers.astype(np.int64)
    return Keys(numbers, none, None, kind)


def decimal_keys(ids: pa.Array) -> Keys:
    """Return the keys of decimals: numbers if they are whole and fit int64, otherwise the text of their digits."""
    encoded = ids.cast(pa.decimal256(76, ids.type.scale)).dictionary_encode()
    values = encoded.dictionary.to_pylist()
    whole = np.array([-(2**63) <= value < 2**63 and value == int(value) for value in values], bool)
    numbers = [int(value) for value, is_whole in zip(values, whole, strict=True) if is_whole]
    digits = [format(value, "f") for value, is_whole in zip(values, whole, strict=True) if not is_whole]
    texts = [(text.rstrip("0").rstrip(".") if "." in text else text).encode() for text in digits]
    order = np.where(whole, np.cumsum(whole) - 1, len(numbers) + np.cumsum(~whole) - 1)
    places = order[encoded.indices.to_numpy()]
    return Keys(np.array(numbers, np.int64), pa.array(texts, pa.large_binary()), places, ids.type)


def numbers_of(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a `stored` column (seconds of times), and a mask of what is not null."""
    valid, kind = array.is_valid().to_numpy(zero_copy_only=False), array.type
    if pa.types.is_decimal(kind):
        return np.array([0.0 if value is None else float(value) for value in array.to_pylist()]), valid
    array = pa.Array.from_buffers(kind, len(array), [None, *array.buffers()[1:]], offset=array.offset)
    if pa.types.is_date32(kind):
        return raw_times(array) * 86400.0, valid
    if pa.types.is_temporal(kind):
        return raw_times(array) / float(10**9 // NANOSECONDS[kind.unit]), valid
    return array.to_numpy(zero_copy_only=False), valid


def split(texts: pa.Array, separator: str, integers: bool) -> pa.Array:
    """Return the ids in texts as lists, of texts or integers, without spaces around ids and without empty ones."""
    if not is_text(texts.type) and texts.null_count < len(texts):
        raise ExportError(f"only texts have a separator in them, found {texts.type}")
    lists = pc.split_pattern(texts.cast(pa.string()).fill_null(""), separator)
    is_there = pc.not_equal(ids := pc.utf8_trim_whitespace(lists.values), "")
    before = np.append(0, np.cumsum(is_there.to_numpy(zero_copy_only=False)))[lists.offsets.to_numpy()]
    return pa.ListArray.from_arrays(before, ids.filter(is_there).cast(pa.int64() if integers else pa.string()))


def lists_of(array: pa.Array, max_length: int | None = None, keep: str = "last") -> tuple[pa.Array, np.ndarray]:
    """Return the elements of lists that are kept, end to end, and how many each list has."""
    bounds = array.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(bounds) * array.is_valid().to_numpy(zero_copy_only=False)
    kept = lengths if max_length is None else np.minimum(lengths, max_length)
    starts = bounds[:-1] + (lengths - kept if keep == "last" else 0)
    places = np.repeat(starts - (np.cumsum(kept) - kept), kept) + np.arange(kept.sum())
    return stored(array.values).take(pa.array(places)), kept


def has_field(kind: pa.DataType, name: str) -> bool:
    """Return whether structs, or those in lists, in any encoding, have a field `name`, or one inside a field."""
    if (inner := getattr(kind, "value_type", getattr(kind, "storage_type", None))) is not None:
        return has_field(inner, name)
    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    outer = (field for field in fields if name.startswith(f"{field}."))
    return name in fields or any(has_field(fields[field], name[len(field) + 1 :]) for field in outer)


def column(table: pa.Table, name: str, untyped: bool = False) -> pa.Array:
    """Return a column in one piece, `stored`; `device.os` is a field of a struct, `items.id` one of those in lists.
    `untyped`: one of nulls alone, without a type, stays so."""
    name, names = str(name), table.column_names
    begins = [] if name in names else [each for each in table.schema if name.startswith(f"{each.name}.")]
    fits = (each for each in begins if has_field(each.type, name[len(each.name) + 1 :]))  # the first, as in training
    first = next((each.name for each in chain(fits, begins)), name)
    if names.count(first) != 1:
        problem, more = "is there twice" if first in names else "is missing", " …" if len(names) > 20 else ""
        raise ExportError(f"column '{name}' {problem}; the columns are {', '.join(map(repr, names[:20]))}{more}")
    chunks = table.column(first).chunks or [pa.nulls(0, table.schema.field(first).type)]
    array = pa.concat_arrays([each if untyped and pa.types.is_null(each.type) else stored(each) for each in chunks])
    if first == name:
        return array
    inner, rest = array.values if pa.types.is_list(array.type) else array, name[len(first) + 1 :]
    inner = column(pa.Table.from_struct_array(inner) if pa.types.is_struct(inner.type) else pa.table({}), rest, untyped)
    if not pa.types.is_list(array.type):
        return inner
    return pa.Array.from_buffers(pa.list_(inner.type), len(array), array.buffers()[:2], -1, array.offset, [inner])


def as_table(rows: Any) -> pa.Table:
    """Return an Arrow table of an Arrow table or batch, a dict of columns or a data frame."""
    try:
        rows = {name: _values(name, values) for name, values in rows.items()} if isinstance(rows, dict) else rows
        return rows if isinstance(rows, pa.Table) else pa.table(rows)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        allowed = "an Arrow table or batch, a dict of columns or a data frame, numbers from 2**63 on as uint64"
        raise ExportError(f"rows are of type {type(rows).__name__}, and may be {allowed}: {error}") from error


def _values(name: str, values: Any) -> Any:
    if isinstance(values, str | bytes | dict):  # Arrow would read each letter or key as a row
        raise TypeError(f"column {name!r} is of type {type(values).__name__}, but must be a list of values")
    try:
        return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        kind = ValueError if isinstance(error, UnicodeError) else type(error)  # a UnicodeError accepts no text of ours
        raise kind(f"column {name!r}: {error}") from error


def crossed(table: pa.Table, names: list[str]) -> pa.Array:
    """Return an id for each combination of the ids in some columns; it is null if one of them is, and of no columns."""
    columns = [column(table, name) for name in names]
    valid = np.all([each.is_valid().to_numpy(False) for each in columns] or [np.zeros(len(table), bool)], axis=0)
    hashes = np.zeros(int(valid.sum()), np.uint64)
    for place, array in enumerate(columns):
        keys = read_keys(array.filter(pa.array(valid)))
        hashes = hash_numbers(hashes ^ keys.spread(keys.hashes(place)), 0)
    ids = np.zeros(len(valid), np.int64)
    ids[valid] = hashes.view(np.int64)
    return pa.array(ids, mask=~valid)


# Mappings: keys to rows of a table, int64 [keys, rows of an id]


class Index:
    """Numbers of distinct ids, from a file of their sorted hashes, with the ids themselves if they are texts."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        self._entry = entry
        table = pa.ipc.open_file(pa.memory_map(str(folder / entry["file"]))).read_all()
        parts = {name: table.column(name).chunks for name in table.column_names}
        self._columns = {name: chunks[0] if chunks else pa.array([], pa.uint64()) for name, chunks in parts.items()}
        self._hashes, self._numbers = (self._columns[name].to_numpy() for name in ("hash", "number"))

    def find(self, keys: Keys, hashes: np.ndarray, where: str = "") -> np.ndarray:
        """Return the numbers of keys, -1 for those not in it; hashes use its seed, and errors begin with `where`."""
        kind = self._entry["ids"]
        if len(self._hashes) and ((len(keys.texts) and kind != "texts") or (len(keys.numbers) and kind == "texts")):
            raise ExportError(f"{where}ids of type {keys.kind} are not {kind}, which the model reads; write those")
        if not len(self._hashes):
            return np.full(len(hashes), -1)
        places = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        present = self._hashes[places] == hashes
        if kind == "texts":
            same = pc.equal(self._columns["text"].take(pa.array(places[present])), keys.texts.filter(pa.array(present)))
            present[present] = same.to_numpy(zero_copy_only=False)
        elif keys.numbers.dtype.kind != ("u" if kind == "unsigned" else "i"):  # -1 and 2**64 - 1 have the same bits
            present &= (keys.numbers >= 0) & (keys.numbers <= np.uint64(2**63 - 1))
        return np.where(present, self._numbers[places], -1)


class Mapping:
    """Keys to rows of a table, as the manifest describes it."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        self._entry = entry
        self._index: Any = Index(folder, entry["index"]) if entry["type"] == "vocabulary" else None
        if "kept" in entry:
            self._kept = np.fromfile(folder / entry["kept"], "<u8")
            ends = np.cumsum(np.bitwise_count(self._kept), dtype=np.int64)
            self._before, self._shared = np.append(0, ends[:-1]), ends[-1]

    def rows(self, keys: Keys) -> np.ndarray:
        """Return the rows of keys, int64 [keys, rows of an id]. Pruned rows share the one behind the others: `kept` has
        a bit for each row, which is set if the row was kept."""
        rows = self._before_pruning(keys)
        if "kept" not in self._entry:
            return rows
        words, bits = self._kept[rows >> 6], (rows & 63).astype(np.uint64)
        places = self._before[rows >> 6] + np.bitwise_count(words & ((np.uint64(1) << bits) - np.uint64(1)))
        return np.where(words >> bits & np.uint64(1), places, self._shared)

    def _before_pruning(self, keys: Keys) -> np.ndarray:
        entry, size = self._entry, self._entry["rows"]
        if entry["type"] == "identity":
            return self._identity(keys)
        hashes = keys.hashes(entry["seed"])
        if self._index is not None:
            places = self._index.find(keys, hashes)
            shared = 1 + entry["num_ids"] + (hashes % entry["num_buckets"]).view(np.int64)
            return np.where(places < 0, shared, 1 + places)[:, None]
        if entry["type"] == "quotient_remainder":
            n = size - 1
            quotients = (n - math.isqrt(n**2 - 4 * entry["num_ids"])) // 2
            quotients += quotients * (n - quotients) < entry["num_ids"]
            q, r = np.divmod(hashes % entry["num_ids"], np.uint64(n - quotients))
            return np.stack([1 + q, 1 + quotients + r], axis=1).astype(np.int64)
        all_hashes = [hashes, *(seeded(hashes, j) for j in range(1, entry["num_hashes"]))]
        return np.stack([1 + hashed % (size - 1) for hashed in all_hashes], axis=1).astype(np.int64)

    def _identity(self, keys: Keys) -> np.ndarray:
        if len(keys.texts) or pa.types.is_temporal(keys.kind):
            raise ExportError(f"ids are rows of the table themselves (mapping: identity), found {keys.kind}")
        rows, size = keys.numbers, self._entry["rows"]
        if len(wrong := rows[(rows < 0) | (rows >= size)]):
            raise ExportError(f"id {wrong[0]} is outside 0 … {size - 1} (mapping: identity), and has no row")
        return rows.astype(np.int64)[:, None]

    def has(self, keys: Keys) -> np.ndarray:
        """Return which keys a vocabulary has, bool [keys]."""
        return np.asarray(self._index.find(keys, keys.hashes(self._entry["seed"])) >= 0)


def chosen(keys: Keys, route: dict[str, Any], mappings: dict[str, Mapping]) -> np.ndarray:
    """Return for which keys a feature is looked up, bool [keys]: by a hash, or by vocabularies; `mappings` by table."""
    if "active" in route:
        has = np.array([route["place"] in some for some in combinations(range(route["experts"]), route["active"])])
        return has[keys.hashes(route["seed"]) % len(has)]
    num_keys = len(keys.numbers) + len(keys.texts)
    is_chosen = np.ones(num_keys, bool) if route["own"] is None else mappings[route["own"]].has(keys)
    for table in route["before"]:
        is_chosen &= ~mappings[table].has(keys)
    return is_chosen


# Features: a column to rows of a table, or to float32


class Ids(NamedTuple):
    """Rows of a table, int64 [ids]; how many each row of data has, [rows], None: one each; their weights, [ids]."""

    rows: np.ndarray
    lengths: np.ndarray | None
    weights: np.ndarray | None

    def numbers(self, num_rows: int) -> np.ndarray:
        """Return how many each row of data has."""
        return np.ones(num_rows, np.int64) if self.lengths is None else self.lengths.astype(np.int64)


def convert_ids(table: pa.Table, feature: dict[str, Any], mappings: dict[str, Mapping], text: bool | None) -> Ids:
    """Return the table rows of a feature; `text` says whether the ids of the table were texts in training, if known."""
    mapping, lengths = mappings[feature["table"]], None
    array = crossed(table, feature["cross"]) if feature["column"] is None else column(table, feature["column"])
    array = split(array, feature["separator"], text is False) if feature.get("separator") else array
    weights = column(table, feature["weights"]) if feature.get("weights") else None
    if pa.types.is_list(array.type):
        weights = None if weights is None else weights_of_lists(weights, array, feature)
        array, lengths = lists_of(array, feature.get("max_length"), feature["keep"])
    elif weights is not None and pa.types.is_list(weights.type):
        raise ExportError(f"one id a row goes with one weight a row, but column '{feature['weights']}' has lists")
    check_kind(array, lengths is not None, feature, text)
    if feature.get("boundaries") is not None:
        array = buckets(array, feature["boundaries"])
    if pa.types.is_nested(array.type):
        raise ExportError(f"ids must be integers or strings, or one list of them a row, found {array.type}")
    nulls = "empty" if feature.get("lists") and lengths is None else feature["nulls"]  # a column of nulls is no list
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if not valid.all() and nulls == "refuse":
        raise ExportError(f"{int((~valid).sum())} nulls found, and nulls: refuse allows none")
    keys = read_keys(array.drop_null())
    rows, present = keys.spread(mapping.rows(keys)), valid
    if feature.get("route") is not None:
        here = keys.spread(chosen(keys, feature["route"], mappings))
        rows, present = rows[here], valid.copy()
        present[valid] = here
    if nulls != "empty" and not valid.all():
        mapped, all_rows = present, np.full((len(array), rows.shape[1]), NULL_ROW)
        all_rows[mapped] = rows
        rows = all_rows[present := present | ~valid]
    if not present.all():
        weights = None if weights is None else weights.filter(pa.array(present))
        row_of = np.repeat(np.arange(len(table)), 1 if lengths is None else lengths)
        lengths = np.bincount(row_of[present], minlength=len(table))
    k, about = rows.shape[1], {"column": feature.get("weights"), "name": "weights of its ids", "fill": None}
    factors = None if weights is None else np.repeat(convert_floats(weights, about), k)
    lengths = lengths if k == 1 else np.full(len(table), k) if lengths is None else lengths * k
    return Ids(rows.reshape(-1), lengths, factors)


def check_kind(ids: pa.Array, in_lists: bool, feature: dict[str, Any], text: bool | None) -> None:
    """Refuse ids (of lists, all ids in one array) that are not of the kind that they were in training."""
    if ids.null_count == len(ids):
        return
    if feature.get("lists") not in (None, in_lists):
        now, then = ("lists of ids", "one id a row")[:: 1 if in_lists else -1]
        raise ExportError(f"rows have {now} here, and had {then} in training; write both alike")
    if text not in (None, is_text(ids.type)):
        raise ExportError(f"ids were {'strings' if text else 'numbers'} in training, and are {ids.type} here")


def weights_of_lists(weights: pa.Array, ids: pa.Array, feature: dict[str, Any]) -> pa.Array:
    """Return the weights of the ids that are kept of lists."""
    if not pa.types.is_list(weights.type):
        raise ExportError(f"lists of ids go with lists of weights, but column '{feature['weights']}' is {weights.type}")
    (_, own), (_, other) = map(lists_of, (ids, weights))
    if len(wrong := np.flatnonzero(own != other)):
        row = wrong[0]
        raise ExportError(f"row {row} has {own[row]} ids, but {other[row]} weights in column '{feature['weights']}'")
    return lists_of(weights, feature.get("max_length"), feature["keep"])[0]


def buckets(array: pa.Array, boundaries: list[float]) -> pa.Array:
    """Return how many boundaries are <= each number; null for NaN and null."""
    if not is_number(array.type):
        raise ExportError(f"boundaries take numbers, found {array.type}")
    numbers, valid = numbers_of(array)
    return pa.array(np.searchsorted(boundaries, numbers.astype(float), side="right"), mask=np.isnan(numbers) | ~valid)


def convert_floats(array: pa.Array, feature: dict[str, Any]) -> np.ndarray:
    """Return a column of numbers as float32 [rows, 1], or of vectors [rows, dim]: nulls filled, then transformed."""
    title, dim = f"column '{feature['column']}' ({feature['name']})", feature.get("dim")
    if not (is_number(array.type) if dim is None else pa.types.is_list(array.type) or array.null_count == len(array)):
        what = "numbers" if dim is None else f"lists of {dim} numbers"
        raise ExportError(f"{title} must hold {what}, found {array.type}")
    numbers, valid = vectors_of(array, dim or 1, title)
    if not valid.all():
        if feature["fill"] is None:
            raise ExportError(f"{title} holds {int((~valid).sum())} nulls, but none are allowed")
        numbers = np.where(valid, numbers.astype(np.float64), feature["fill"])
    with np.errstate(over="ignore", invalid="ignore"):
        if not (finite := np.isfinite(numbers.astype(np.float32))).all():
            raise ExportError(f"{title} holds {numbers[~finite][0]}, and only finite numbers up to 3.4e38 are scored")
        x = transformed(numbers.astype(np.float64), feature, title).astype(np.float32)
    if not np.isfinite(x).all():
        raise ExportError(f"{title} is beyond 3.4e38 after its transform")
    return x


def transformed(x: np.ndarray, feature: dict[str, Any], title: str) -> np.ndarray:
    """Return numbers clipped, their logarithm taken, and standardised, as the feature asks for."""
    if feature.get("clip"):
        x = np.clip(x, *feature["clip"])
    if feature.get("log1p"):
        if x.size and x.min() <= -1:
            raise ExportError(f"{title} holds {x.min():.10g}, and log1p takes numbers above -1")
        x = np.log(x + 1) if feature.get("std") is None else np.log1p(x)
    std = feature.get("std")
    return x if std is None else (x - np.array(feature["mean"])) / np.where(std, std, 1.0)


def vectors_of(array: pa.Array, dim: int, title: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of a `stored` column, [rows, dim] (dim 1 if not lists), and a mask of what is not null."""
    if not pa.types.is_list(array.type):
        numbers, valid = (np.repeat(part, dim).reshape(-1, dim) for part in numbers_of(array))
        return numbers, valid
    elements, lengths = lists_of(array)
    is_there = lengths > 0
    if wrong := set(lengths[is_there].tolist()) - {dim}:
        raise ExportError(f"{title} must hold lists of {dim} numbers, found one of {min(wrong)}")
    if not is_number(elements.type):
        raise ExportError(f"{title} must hold lists of {dim} numbers, found {array.type}")
    given = [part.reshape(-1, dim) for part in numbers_of(elements)]
    numbers, valid = (np.zeros((len(array), dim), part.dtype) for part in given)
    numbers[is_there], valid[is_there] = given
    return numbers, valid


# Vectors: rows of a file, each of the same number of bytes, and sums of them


def whole_numbers(bits: int, raw: np.ndarray, columns: int) -> np.ndarray:
    """Return rows quantised by FBGEMM: codes, then a scale and a bias, in FP32 for 8 bits and FP16 for fewer."""
    codes, kind = raw[:, : columns * bits // 8], "<f4" if bits == 8 else "<f2"
    scale_and_bias = np.ascontiguousarray(raw[:, codes.shape[1] :]).view(kind).astype(np.float32)
    if bits < 8:  # the lowest bits of a byte are the first
        codes = (codes[:, :, None] >> np.arange(0, 8, bits, dtype=np.uint8) & 2**bits - 1).reshape(len(raw), columns)
    return codes.astype(np.float32) * scale_and_bias[:, :1] + scale_and_bias[:, 1:]


# How to decode bytes of rows, uint8 [rows, stride]: by encoding, a function to float32 [rows, columns].
DECODERS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "fp32": lambda raw, columns: raw.view("<f4"),
    "fp16": lambda raw, columns: raw.view("<f2").astype(np.float32),
    "bf16": lambda raw, columns: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32),
    **{f"int{bits}": partial(whole_numbers, bits) for bits in (8, 4, 2)},
}


class Rows:
    """Vectors by row number, memory-mapped."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        self.columns = entry["columns"]
        if entry["encoding"] not in DECODERS:
            raise ExportError(f"rows of '{entry['file']}' are {entry['encoding']}, which this score.py does not know")
        self._decode = DECODERS[entry["encoding"]]
        path, size = folder / entry["file"], (entry["rows"], entry["stride"])
        self._bytes = np.asarray(np.memmap(path, np.uint8, "r", shape=size)) if size[0] else np.zeros(size, np.uint8)
        # Rows that have been published since, in order, and their bytes.
        self._newer, self._newer_bytes = np.zeros(0, np.int64), np.zeros((0, size[1]), np.uint8)

    def take(self, rows: Any) -> np.ndarray:
        """Return the vectors of some rows, float32 [rows, columns]: an array of numbers, or before deltas a slice."""
        return self._decode(self.bytes_of(rows), self.columns)

    def bytes_of(self, rows: Any) -> np.ndarray:
        """Return some rows as they are stored, uint8 [rows, stride]."""
        base = self._bytes[rows]
        if not len(self._newer):
            return base
        places = np.searchsorted(self._newer, rows).clip(max=len(self._newer) - 1)
        return np.where((self._newer[places] == rows)[:, None], self._newer_bytes[places], base)

    def changed(self, path: Path) -> "Rows":
        """Return these vectors with the rows of a delta in place of theirs; it has records of number and bytes."""
        records = np.fromfile(path, np.dtype([("row", "<i8"), ("bytes", np.uint8, self._newer_bytes.shape[1])]))
        newer = copy.copy(self)
        newer._newer = np.union1d(self._newer, records["row"])
        newer._newer_bytes = np.empty((len(newer._newer), self._newer_bytes.shape[1]), np.uint8)
        newer._newer_bytes[np.searchsorted(newer._newer, self._newer)] = self._newer_bytes
        newer._newer_bytes[np.searchsorted(newer._newer, records["row"])] = records["bytes"]
        return newer


def sums(vectors: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the sums of the vectors of each list, [rows, columns]."""
    total = np.zeros((len(lengths), vectors.shape[1]), np.float32)
    if (filled := lengths > 0).any():
        total[filled] = np.add.reduceat(vectors, (np.cumsum(lengths) - lengths)[filled], axis=0)
    return total


# The export


def checksum(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own checksum."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        total = hashlib.sha256()
        while chunk := file.read(8 << 20):
            total.update(chunk)
    return total.hexdigest()


def read_manifest(folder: str | Path, verify: bool) -> dict[str, Any]:
    """Return the manifest of an export after checking its files: sizes, and checksums (of large ones with `verify`)."""
    try:
        path = Path(folder, MANIFEST)
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["sha256"] != checksum(manifest):
            raise ExportError(f"'{path}' has changed since it was written; export the run again")
        if manifest["format"] != FORMAT:
            raise ExportError(f"'{path}' has format {manifest['format']}, and this score.py reads {FORMAT}")
        beside = {k: v for k, v in manifest.get("beside", {}).items() if k == PROGRAM and Path(folder, k).exists()}
        for name, entry in (manifest["files"] | beside).items():
            size, path = entry["bytes"], Path(folder, name)
            if (num_bytes := path.stat().st_size) != size:
                raise ExportError(f"'{path}' has {num_bytes} bytes, and was written with {size}")
            if (verify or entry.get("always_verified") or size <= VERIFIED_BYTES) and sha256(path) != entry["sha256"]:
                raise ExportError(f"'{path}' has changed since it was written; export the run again")
    except OSError as error:
        raise ExportError(f"'{error.filename}' cannot be read ({os.strerror(error.errno or 0)})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"'{folder}/{MANIFEST}' is not the manifest of an export ({error!r})") from error
    return manifest


class Scorer:
    """An exported model, opened to score rows and to recommend items.

    Args:
        folder: of the export. verify: compare all files with their checksums. num_threads: of the dense part; several
            wait for each other in a loop, which costs a request of a hundred rows more than it gains.

    Raises:
        ExportError: a file is missing, or is not what was written; or `num_threads` is no number of threads.
    """

    def __init__(self, folder: str | Path, verify: bool = False, num_threads: int = 1) -> None:
        if not isinstance(num_threads, int | np.integer) or num_threads < 1:
            raise ExportError(f"num_threads is {num_threads!r}, but must be a whole number above 0")
        self.manifest = manifest = read_manifest(folder, verify)
        self._folder = folder = Path(folder)
        self._mappings = {name: Mapping(folder, entry["mapping"]) for name, entry in manifest["tables"].items()}
        self._vectors = {name: Rows(folder, entry["vectors"]) for name, entry in manifest["tables"].items()}
        self._features = {feature["name"]: feature for feature in manifest["features"]}
        self._num_threads = num_threads
        self._graphs = self._sessions(folder)
        self._items = items = manifest.get("items")
        if items is not None:
            ids = pa.ipc.open_file(pa.memory_map(str(folder / items["ids"]))).read_all().column(0)
            self._item_ids = ids.chunk(0) if ids.num_chunks else pa.array([], ids.type)
            self._item_vectors = Rows(folder, items["vectors"]).take(slice(None))  # still memory-mapped
            self._index = Index(folder, items["index"])

    def changed(self, folder: Path) -> "Scorer":
        """Return a scorer with a published delta applied to what this one has; this one does not change."""
        newer = copy.copy(self)
        newer._graphs = self._sessions(folder)
        newer._vectors = {name: rows.changed(folder / f"tables/{name}.bin") for name, rows in self._vectors.items()}
        if self._items is not None:
            newer._item_vectors = np.concatenate(list(newer.vectors_of_items(self._folder / self._items["rows"])))
        return newer

    def _sessions(self, folder: Path) -> dict[str, Any]:
        """Return the graphs, with the weights of the dense part from a folder."""
        import onnxruntime  # here: the export uses the rest too, and reports by itself if this is missing

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._num_threads
        options.log_severity_level = 3  # only errors: its warnings are about missed optimizations
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        opened = partial(onnxruntime.InferenceSession, sess_options=options, providers=["CPUExecutionProvider"])
        return {name: opened((self._folder / of["file"]).read_bytes()) for name, of in self.manifest["graphs"].items()}

    def vectors_of_items(self, path: Path) -> Iterator[np.ndarray]:
        """Yield the vectors of the items of a file, float32 [items, dim], some at a time."""
        for batch in pq.ParquetFile(path, **STREAMED).iter_batches(ROWS_AT_ONCE):
            yield self.outputs("item", pa.Table.from_batches([batch]))[0]

    def score(self, rows: Any) -> pa.Table:
        """Return the scores of rows, in any form that `as_table` accepts: a column for each output of the model."""
        outputs = self.outputs("score", as_table(rows))
        return pa.table(dict(zip(self.manifest["graphs"]["score"]["outputs"], outputs, strict=True)))

    def recommend(self, users: Any, k: int = 20, seen: str | None = "", candidates: str | None = "") -> pa.Table:
        """Return the best `k` items of users as lists `items`, raw ids, best first, and `scores`.

        Args:
            users: rows, in any form that `as_table` accepts.
            seen: a column with the ids of items to leave out. candidates: one with the ids of those to choose from.
                Default: the columns of the run's config; None: no such column.
        """
        items = self._items
        if items is None:
            raise ExportError(f"model '{self.manifest['model']}' has no vectors of items to recommend; score its rows")
        if not isinstance(k, int | np.integer) or k < 1:
            raise ExportError(f"k is {k!r}, but must be a whole number above 0")
        users = as_table(users)
        names = (items[key] if name == "" else name for key, name in (("seen", seen), ("candidates", candidates)))
        vectors, best = self.outputs("user", users)[0], []
        lists = [None if name is None else self._positions(users, name) for name in names]
        step = max(1, SCORES_AT_ONCE // max(1, len(self._item_ids)))
        for start in range(0, len(vectors), step):
            scores = vectors[start : start + step] @ self._item_vectors.T
            for is_barred, pairs in zip((True, False), lists, strict=True):
                if pairs is not None:
                    mine = slice(*np.searchsorted(pairs[0], (start, start + step)))
                    mask = np.full(scores.shape, not is_barred)
                    mask[pairs[0][mine] - start, pairs[1][mine]] = is_barred
                    scores[mask] = -np.inf
            for row in scores:
                places = best_places(row, k)
                best.append((places, row[places]))
        bounds = pa.array(np.cumsum([0, *(len(places) for places, _ in best)]), pa.int32())
        places, scores = (np.concatenate([np.zeros(0), *(pair[i] for pair in best)]) for i in (0, 1))
        values = {"items": self._item_ids.take(places.astype(np.int64)), "scores": pa.array(scores.astype(np.float32))}
        return pa.table({name: pa.ListArray.from_arrays(bounds, flat) for name, flat in values.items()})

    def id_columns(self, graph: str) -> list[str]:
        """Return the columns of ids that a graph reads, without those that are known to hold lists."""
        names = self.manifest["graphs"].get(graph, {"features": []})["features"]  # for rankers `recommend` says more
        ids = [each for name in names if (each := self._features[name])["type"] == "id" and not each.get("lists")]
        return list(dict.fromkeys(each["column"] for each in ids if each["column"]))

    def outputs(self, graph: str, table: pa.Table) -> list[np.ndarray]:
        """Return the outputs of a graph (`score`; in two towers `user`, `item`) for rows, each [rows, …] float32."""
        padded = [entry.get("max_length") or 1 for entry in self._features.values() if entry.get("pooling") == "none"]
        step = max(1, PAIRS_AT_ONCE // max(padded, default=1) ** 2)
        pieces = [self._outputs(graph, table.slice(start, step)) for start in range(0, max(1, len(table)), step)]
        return [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]

    def _outputs(self, graph: str, table: pa.Table) -> list[np.ndarray]:
        entry, session = self.manifest["graphs"][graph], self._graphs[graph]
        ids = (each for name in entry["features"] if (each := self._features[name])["type"] == "id")
        inputs = dict(chain.from_iterable(self._inputs(table, feature).items() for feature in ids))
        numbers = [self._features[name] for name in self.manifest["floats"]]
        ends = np.cumsum([0, *(feature.get("dim") or 1 for feature in numbers)])
        inputs["floats"] = floats = np.zeros((len(table), ends[-1]), np.float32)
        for feature, start, end in zip(numbers, ends[:-1], ends[1:], strict=True):
            if feature["name"] in entry["features"]:
                floats[:, start:end] = convert_floats(column(table, feature["column"]), feature)
        if not len(table):
            return [np.zeros((0, *tensor.shape[1:]), np.float32) for tensor in session.get_outputs()]
        return session.run(None, {tensor.name: inputs[tensor.name] for tensor in session.get_inputs()})

    def _inputs(self, table: pa.Table, feature: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the inputs of a graph from an id feature: a vector for each row, or for each id of its lists."""
        name, ids = feature["name"], self._ids(table, feature)
        vectors = self._vectors[feature["table"]].take(ids.rows)
        if feature["pooling"] == "none":
            lengths = ids.numbers(len(table))
            weights = np.ones(len(vectors), np.float32) if ids.weights is None else ids.weights
            return {f"values:{name}": vectors, f"lengths:{name}": lengths, f"weights:{name}": weights}
        if ids.weights is not None:
            vectors = vectors * ids.weights[:, None]
        if ids.lengths is not None:
            vectors = sums(vectors, ids.lengths)
        others = [self._features[other] for other in feature.get("averaged_over") or [] if other != name]
        if feature["pooling"] == "mean" and (others or ids.lengths is not None):
            numbers = sum((self._ids(table, other).numbers(len(table)) for other in others), ids.numbers(len(table)))
            vectors = vectors / np.maximum(numbers, 1)[:, None].astype(np.float32)
        return {f"vector:{name}": np.ascontiguousarray(vectors)}

    def _ids(self, table: pa.Table, feature: dict[str, Any]) -> Ids:
        try:
            return convert_ids(table, feature, self._mappings, self.manifest["tables"][feature["table"]].get("text"))
        except (ExportError, pa.ArrowException) as error:
            where = feature.get("column") or " × ".join(feature["cross"])
            raise ExportError(f"column '{where}' (feature '{feature['name']}'): {error}") from error

    def _positions(self, users: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the row, and the position among the items, of each id in a column, without null and unknown ids."""
        array, lengths = column(users, name), np.ones(len(users), np.int64)
        if separator := (items := self._items or {}).get("separators", {}).get(name):
            array = split(array, separator, items["index"]["ids"] != "texts")
        if pa.types.is_list(array.type):
            array, lengths = lists_of(array)
        keys = read_keys(array.drop_null(), where := f"column '{name}': ")
        positions = keys.spread(self._index.find(keys, keys.hashes(0), where))
        rows = np.repeat(np.arange(len(users)), lengths)[array.is_valid().to_numpy(zero_copy_only=False)]
        return rows[positions >= 0], positions[positions >= 0]


def best_places(scores: np.ndarray, k: int) -> np.ndarray:
    """Return where the best `k` scores are, best first, the first of equal ones, without those of -inf."""
    places = np.flatnonzero(scores >= np.partition(scores, -k)[-k]) if k < len(scores) else np.arange(len(scores))
    places = places[np.argsort(-scores[places], kind="stable")[:k]]
    return places[scores[places] > -np.inf]


# The command


def files_of(data: str) -> list[str]:
    """Return the Parquet files of a folder, a file, or a glob of either, in order: as in training without what is
    hidden, or begins with `_`, unless `data` names it."""
    is_glob = glob.has_magic(data) and not os.path.exists(data)
    found = sorted(glob.glob(data, recursive=True)) if is_glob else [data]
    inside = (sorted(glob.glob(f"{glob.escape(path)}/**/*.parquet", recursive=True)) or [path] for path in found)
    files = dict.fromkeys(path.replace("//", "/") for path in chain(*inside) if not os.path.isdir(path))
    named = data.split("/")
    paths = [path for path in files if not any(part[:1] in ("_", ".") for part in path.split("/") if part not in named)]
    if not paths:
        raise ExportError(f"'{data}' holds no Parquet file")
    return paths


def partitions_of(paths: list[str], texts: list[str]) -> dict[str, dict[str, pa.Scalar]]:
    """Return the Hive partition keys in each path: texts if training had texts, others int32 if all are numbers."""
    pairs = [[part.partition("=") for part in Path(path).parts[:-1] if "=" in part] for path in paths]
    null, text = "__HIVE_DEFAULT_PARTITION__", partial(unquote, errors="strict")
    by_path = [{text(key): None if value == null else text(value) for key, _, value in parts} for parts in pairs]
    columns = {key: pa.array([keys.get(key) for keys in by_path], pa.string()) for key in set().union(*by_path)}
    for key in columns.keys() - set(texts):
        with suppress(pa.ArrowInvalid):
            columns[key] = columns[key].cast(pa.int32())
    return {path: {key: columns[key][i] for key in by_path[i]} for i, path in enumerate(paths)}


def opened(path: str) -> pq.ParquetFile:
    """Return a file as training reads it: in the types of Parquet, not in those of its writer."""
    content = memoryview(pa.memory_map(path).read_buffer())
    tail = bytes(content[-8 - int.from_bytes(content[-8:-4], "little") :])
    metadata = pq.read_metadata(pa.BufferReader(tail.replace(b"\x18\x0cARROW:schema\x18", b"\x18\x0carrow:schema\x18")))
    return pq.ParquetFile(path, metadata=metadata, coerce_int96_timestamp_unit="us", **STREAMED)


def types_of(files: dict[str, dict[str, pa.Scalar]], names: list[str]) -> dict[str, pa.DataType]:
    """Return types of columns that hold the values of every file, given the partition keys in each path."""
    types: dict[str, pa.DataType] = {}
    for path, keys in files.items():
        rows = pa.Table.from_batches([], opened(path).schema_arrow)
        for name in names:
            kind = keys[name].type if name in keys.keys() - set(rows.column_names) else column(rows, name, True).type
            try:
                types[name] = unified(before := types.get(name, kind), kind)
            except pa.ArrowException as error:
                others = f"but {before} in the files before it; write it with the same type, or name others as --keep"
                raise ExportError(f"column '{name}' is {kind} in '{path}', {others}") from error
    return types


def unified(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a type that the values of both can be cast to, as training does; pa.ArrowException: there is none."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(unified(one.value_type, other.value_type))
    if any(map(pa.types.is_decimal, kinds := [one, other])):
        kinds = [pa.decimal128(len(str(2**kind.bit_width)), 0) if pa.types.is_integer(kind) else kind for kind in kinds]
        kinds = [pa.float64() if pa.types.is_floating(kind) else kind for kind in kinds]
    return pa.unify_schemas([pa.schema([("", kind)]) for kind in kinds], promote_options="permissive").types[0]


def results_of(scorer: Scorer, words: argparse.Namespace) -> Iterator[pa.Table]:
    """Yield kept columns and results for the rows of all files, some at a time, with one schema."""
    of_rows, keep = words.command == "predict", words.keep
    try:
        files = partitions_of(files_of(words.data), scorer.manifest.get("texts", []))
        types = types_of(files, scorer.id_columns("score" if of_rows else "user") if keep is None else keep)
        kept = {name: kind for name, kind in types.items() if keep is not None or not pa.types.is_nested(kind)}
        for path, keys in files.items():
            for batch in opened(path).iter_batches(ROWS_AT_ONCE):
                rows = pa.Table.from_batches([batch])
                for name in keys.keys() - set(rows.column_names):
                    rows = rows.append_column(name, pa.repeat(keys[name], len(rows)))
                results = scorer.score(rows) if of_rows else scorer.recommend(rows, words.k)
                if twice := kept.keys() & set(results.column_names):
                    raise ExportError(f"--keep: column '{min(twice)}' would be there twice; leave it out")
                columns = {name: column(rows, name, True).cast(kind) for name, kind in kept.items()}
                yield pa.table({**columns, **dict(zip(results.column_names, results.columns, strict=True))})
    except (pa.ArrowException, OSError, UnicodeError) as error:  # the last of names that are not UTF-8
        raise ExportError(f"'{words.data}' cannot be scored ({' '.join(str(error).split())[:300]})") from error


def write(tables: Iterator[pa.Table], words: argparse.Namespace) -> int:
    """Write tables to a file, which appears once it is complete; return the number of rows."""
    aside, num_rows = f"{words.out}.{os.getpid()}.tmp", 0
    if os.path.isdir(words.out) or not os.path.isdir(os.path.dirname(os.path.abspath(words.out))):
        raise ExportError(f"'{words.out}' is a folder, or is to lie in none; name a file")
    try:
        if (first := next(tables, None)) is None:
            raise ExportError(f"'{words.data}' holds no rows")
        is_there = os.path.exists(words.out) and os.path.getsize(words.out) > 0
        if is_there and pq.read_schema(words.out).names[-1:] != first.column_names[-1:]:
            raise ExportError(f"'{words.out}' exists and has no {first.column_names[-1]}; name another file")
        with pq.ParquetWriter(aside, first.schema, compression="zstd") as writer:
            for table in chain([first], tables):
                writer.write_table(table)
                num_rows += len(table)
        os.replace(aside, words.out)
    except (pa.ArrowException, OSError) as error:
        raise ExportError(f"'{words.out}' cannot be written ({' '.join(str(error).split())[:300]})") from error
    finally:
        with suppress(OSError):  # for example if it is not there
            os.remove(aside)
    return num_rows


def names(text: str) -> list[str]:
    """Return names that are separated by commas; one that holds a comma stands in double quotes."""
    pairs = re.findall(r'"((?:[^"]|"")*)"(?=,|$)|([^,]+)', text)
    return [quoted.replace('""', '"') or plain for quoted, plain in pairs]


def main() -> None:
    """Predict or recommend; a mistake is one sentence, and status 1."""
    parser = argparse.ArgumentParser(description="Score rows, or recommend items, with the exported model.")
    parser.add_argument("command", choices=["predict", "recommend"])
    parser.add_argument("data", metavar="DATA", help="Parquet: a file, a folder or a glob")
    parser.add_argument("out", metavar="OUT.parquet")
    parser.add_argument("--keep", type=names, help="columns to copy to OUT.parquet, separated by commas")
    parser.add_argument("--k", type=int, default=20, help="items for each row (20)")
    parser.add_argument("--verify", action="store_true", help="also compare checksums of large files of vectors")
    words = parser.parse_args()
    try:
        print(f"{words.out}: {write(results_of(Scorer(Path(__file__).parent, words.verify), words), words):,} rows")
    except ExportError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
