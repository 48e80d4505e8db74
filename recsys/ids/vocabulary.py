"""Vocabularies: counting ids, choosing those with a row of their own, growth from run to run, and files."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.errors import UserError, counted
from recsys.ids.hashing import is_text, keys_in_order, keys_of_one_kind
from recsys.ids.index import IndexMapping
from recsys.runtime.parquet import write_table

_MERGED_AT_ONCE = 1 << 17
_COUNTED_AT_ONCE = (1 << 20) - 1  # a million distinct ids take 67 MB in Arrow's hash table, and one more 250
_UNSEEN = "unseen_runs"


class IdCounter:
    """Counts how often each id occurs, in memory that grows with the distinct ids."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []  # the first is the sum of all parts before the last merge
        self._num_new = 0

    def add(self, ids: pa.Array) -> None:
        """Count ids of any type that `read_keys` accepts; nulls are left out.

        Raises:
            UserError, TypeError: the type is another; or numbers follow texts, or the reverse.
        """
        if pa.types.is_dictionary(ids.type) and ids.dictionary.null_count:
            ids = ids.dictionary.take(ids.indices)  # up to 25, pyarrow counts ids whose value is null as valid
        if ids.null_count:
            ids = ids.filter(ids.is_valid())
        keys = keys_of_one_kind(ids)
        values = keys.texts if len(keys.texts) else _wide(keys.numbers)
        if keys.indices is None:
            for start in range(0, len(values), _COUNTED_AT_ONCE):
                self._append(*values.slice(start, _COUNTED_AT_ONCE).value_counts().flatten())
        else:
            self._append(values, pa.array(np.bincount(keys.indices, minlength=len(keys))))

    def add_table(self, counts: pa.Table) -> None:
        """Add the counts of another counter, as returned by `to_table`."""
        ids = counts.column("id")
        dtype = pa.large_binary() if is_text(ids.type) else ids.type
        self._append(ids.cast(dtype).combine_chunks(), counts.column("count").combine_chunks())

    def to_table(self) -> pa.Table:
        """Return columns id (int64, uint64, string or binary, each once, in no order) and count (int64)."""
        self._merge()
        if not self._parts:
            return pa.table({"id": pa.array([], pa.int64()), "count": pa.array([], pa.int64())})
        # Combined, because pickling a slice of a column includes all memory that the slices share.
        table = self._parts[0].combine_chunks()
        ids = table.column("id").combine_chunks()
        return table.set_column(0, "id", _strings(ids)) if is_text(ids.type) else table

    def _append(self, ids: pa.Array, counts: pa.Array) -> None:
        if not len(ids):
            return
        if self._parts and is_text(self._parts[0].schema.field("id").type) != is_text(ids.type):
            raise UserError(
                "ids of a table are numbers in one place and texts in another; write them with the same type"
            )
        self._parts.append(pa.table({"id": ids, "count": counts}))
        self._num_new += len(ids)
        # Merge once there are as many new ids as merged ones, so that each id is merged only a few times.
        if self._num_new >= max(_MERGED_AT_ONCE, self._parts[0].num_rows):
            self._merge()

    def _merge(self) -> None:
        if self._num_new:
            summed = _same_type(self._parts).group_by("id", use_threads=False).aggregate([("count", "sum")])
            self._parts = [summed.rename_columns(["id", "count"])]
            self._num_new = 0


def add_up(counts: Sequence[pa.Table]) -> pa.Table:
    """Return the sum of count tables of `IdCounter.to_table`, from any number of processes, as such a table."""
    if len(counts) == 1:
        return counts[0]
    total = IdCounter()
    for table in counts:
        total.add_table(table)
    return total.to_table()


def choose_vocabulary(counts: pa.Table, min_count: int, max_size: int) -> pa.Array:
    """Return the ids for a vocabulary, the most frequent first; of equally frequent ids, the least first.

    Args:
        counts: from `add_up`.
        min_count: rarer ids are left out.
        max_size: return at most this many ids.
    """
    frequent = counts.filter(pc.greater_equal(counts.column("count"), min_count))
    ordered = frequent.sort_by([("count", "descending"), ("id", "ascending")])
    return ordered.slice(0, max_size).column("id").combine_chunks()


def is_new(ids: pa.Array, vocabulary: pa.Array) -> np.ndarray:
    """Return a mask, bool [len(ids)], of the ids that a vocabulary does not have.

    Raises:
        UserError: there are numbers on one side and texts on the other.
    """
    return IndexMapping(vocabulary).rows(ids) < 0


def joined(vocabulary: pa.Array, new: pa.Array) -> pa.Array:
    """Return a vocabulary with further ids after its own, in a type that holds both.

    Raises:
        UserError: there is no such type.
    """
    if not (len(vocabulary) and len(new)):
        return vocabulary if len(vocabulary) else new
    if is_text(vocabulary.type):
        return _strings(pa.concat_arrays([ids.cast(pa.large_binary()) for ids in (vocabulary, new)]))
    parts = [pa.table({"id": ids, "count": pa.array(np.zeros(len(ids), np.int64))}) for ids in (vocabulary, new)]
    return _same_type(parts).column("id").combine_chunks()


@dataclass(frozen=True)
class KeptIds:
    """Ids that a vocabulary inherits from the run whose weights are loaded.

    Attributes:
        num_ids: number of ids in that run; their places are the first.
        evicted: places of those whose rows other ids have now, int64, ascending.
        num_left_out: number of new ids that are frequent enough, but found no free row.
    """

    num_ids: int
    evicted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_left_out: int = 0


@dataclass(frozen=True)
class Grown:
    """A vocabulary that has grown.

    Attributes:
        ids: in the order of rows.
        unseen_runs: number of runs in a row in which data.train lacked each id, int32 [len(ids)].
        kept: the inherited ids among these.
    """

    ids: pa.Array
    unseen_runs: np.ndarray
    kept: KeptIds


def grow(
    vocabulary: pa.Array | None,
    unseen_runs: np.ndarray,
    counts: pa.Table,
    min_count: int,
    max_size: int,
    evict_after: int | None,
) -> Grown:
    """Add new ids to a vocabulary, the most frequent first; the others keep their places, unless evicted.

    An id that data.train has lacked for `evict_after` runs in a row, this one included, may lose its place to a new id:
    the longest unseen first, and of equals the first in order. Ids stay if there are no more new ids.

    Args:
        vocabulary: the ids so far, or None.
        unseen_runs: `Grown.unseen_runs` of the first of these ids, before this run; the others count as 0.
        counts: of the table's ids in data.train, from `add_up`.
        min_count: rarer new ids get no place.
        max_size: size that the new vocabulary may have.

    Raises:
        UserError: ids are numbers on one side and texts on the other.
    """
    if vocabulary is None:
        ids = choose_vocabulary(counts, min_count, max_size)
        return Grown(ids, np.zeros(len(ids), np.int32), KeptIds(0))
    places = IndexMapping(vocabulary).rows(counts.column("id").combine_chunks())
    unseen = np.zeros(len(vocabulary), np.int32)
    unseen[: len(unseen_runs)] = unseen_runs
    unseen += 1
    unseen[places[places >= 0]] = 0
    stale = np.flatnonzero(unseen >= (np.inf if evict_after is None else evict_after))
    new = choose_vocabulary(counts.filter(pa.array(places < 0)), min_count, len(counts))
    num_places = len(stale) + max(0, max_size - len(vocabulary))
    num_left_out = max(0, len(new) - num_places)
    new = new.slice(0, num_places)
    evicted = np.sort(stale[np.argsort(-unseen[stale], kind="stable")][: len(new)])
    unseen[evicted] = 0
    unseen = np.concatenate([unseen, np.zeros(len(new) - len(evicted), np.int32)])
    order = np.arange(len(vocabulary) + len(new))
    order[evicted] = len(vocabulary) + np.arange(len(evicted))
    order = np.delete(order, len(vocabulary) + np.arange(len(evicted)))
    return Grown(joined(vocabulary, new).take(pa.array(order)), unseen, KeptIds(len(vocabulary), evicted, num_left_out))


def write_vocabulary(path: Path, ids: pa.Array, unseen_runs: np.ndarray | None = None) -> None:
    """Write distinct ids as Parquet, in the order of rows: columns id and unseen_runs.

    Args:
        unseen_runs: `Grown.unseen_runs` of the first ids; the others get 0.
    """
    unseen = np.zeros(len(ids), np.int32)
    if unseen_runs is not None:
        unseen[: len(unseen_runs)] = unseen_runs
    write_table(path, pa.table({"id": ids, _UNSEEN: unseen}), use_dictionary=False)


def read_vocabulary(path: Path) -> pa.Array:
    """Read the ids of a vocabulary, in the order of rows: int64, uint64, string or binary.

    Raises:
        UserError: the file cannot be read, or does not hold a list of distinct ids.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            ids = file.read(["id"]).column("id") if names.count("id") == 1 else None
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise UserError(
            f"vocabulary file '{path}' cannot be read ({reason}); name one that a run has written"
        ) from error
    if ids is None:
        raise UserError(f"vocabulary file '{path}' has the columns {', '.join(names)}, but must have one called id")
    if isinstance(ids.type, pa.BaseExtensionType):  # such as UUIDs, which are hashed as bytes when data are read
        ids = ids.cast(ids.type.storage_type)
    if pa.types.is_dictionary(ids.type):
        ids = ids.cast(ids.type.value_type)
    if not (is_text(ids.type) or pa.types.is_integer(ids.type)):
        raise UserError(f"vocabulary file '{path}' has ids of type {ids.type}, which must be integers or strings")
    if ids.null_count:
        raise UserError(
            f"vocabulary file '{path}' holds {counted(ids.null_count, 'null')} as ids, but none are allowed"
        )
    if number := num_again(ids):
        raise UserError(f"vocabulary file '{path}' lists {counted(number, 'id')} again, and may list each once")
    if is_text(ids.type):
        return _strings(ids.cast(pa.large_binary()).combine_chunks())
    return _wide(ids.combine_chunks().to_numpy())


def num_again(ids: pa.Array | pa.ChunkedArray) -> int:
    """Return how many ids of a list, without nulls, are in it before."""
    if not (pa.types.is_integer(ids.type) or is_text(ids.type)):
        return len(ids) - len(ids.unique())
    # Arrow's hash table takes 200 bytes for each id.
    chunks = ids.chunks if isinstance(ids, pa.ChunkedArray) else [ids]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(keys_in_order(chunk).hashes(0) for chunk in chunks)])
    hashes.sort()
    again = int(np.count_nonzero(hashes[1:] == hashes[:-1]))
    # Different numbers have different hashes, and different texts nearly always.
    return again if pa.types.is_integer(ids.type) or not again else len(ids) - len(ids.unique())


def read_unseen_runs(path: Path) -> np.ndarray:
    """Return the column unseen_runs that `write_vocabulary` has written, int32; empty for files without it.

    Raises:
        UserError: the column has another type, or nulls.
    """
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if _UNSEEN not in file.schema_arrow.names:
            return np.zeros(0, np.int32)
        unseen = file.read([_UNSEEN]).column(_UNSEEN)
    if unseen.type != pa.int32() or unseen.null_count:
        raise UserError(f"vocabulary file '{path}' has {unseen.type} in column {_UNSEEN}, which must be int32")
    return unseen.to_numpy()


def _wide(numbers: np.ndarray) -> pa.Array:
    """Return integers as int64, or uint64 if one does not fit."""
    if numbers.dtype == np.uint64 and len(numbers) and numbers.max() > np.iinfo(np.int64).max:
        return pa.array(numbers)
    return pa.array(numbers.astype(np.int64, copy=False))


def _strings(texts: pa.Array) -> pa.Array:
    """Return large_binary as string, or as binary if it is not UTF-8; from 2 GiB on as the large types."""
    large = texts.nbytes >= 2**31
    try:
        return texts.cast(pa.large_string() if large else pa.string())
    except pa.ArrowInvalid:
        return texts if large else texts.cast(pa.binary())


def _same_type(parts: Sequence[pa.Table]) -> pa.Table:
    dtypes = {part.schema.field("id").type for part in parts}
    if len(dtypes) == 1:
        return pa.concat_tables(parts)
    try:
        schema = pa.schema({"id": pa.uint64(), "count": pa.int64()})
        return pa.concat_tables([part.cast(schema) for part in parts])
    except pa.ArrowInvalid as error:
        raise UserError(
            "ids of one table are negative in one place and beyond 2**63 in another; write them as strings"
        ) from error
