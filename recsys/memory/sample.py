"""Estimates for a dataset from its first rows: bytes, lengths of lists, distinct ids."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.fields import InFile
from recsys.data.inputs import Inputs
from recsys.data.order import RowGroups
from recsys.data.parquet import read_head
from recsys.data.spec import IdColumn
from recsys.data.window import Columns, Ragged, convert_table
from recsys.ids import is_text
from recsys.runtime.environment import HEAP_BLOCK_BYTES

SAMPLE_ROWS, _EVAL_ROWS = 20_000, 2_000
_LARGE_BATCH = 2.5  # standard deviations above the mean: ids in the largest of some hundred batches
_COUNTED_IDS = 1 << 18  # ids of a column whose distinct ones are counted, which takes about 80 bytes an id
_OFFSET_BYTES = 4  # of a text in Arrow
_LEVEL_BYTES = 2  # of Parquet's level of a value, whether it is null; a value in a list has one more, for the list
_LEVEL_BITS = 3  # of the same in a file, at most
# Arrow's hash table of a dictionary's texts: bytes of a slot, slots at first, and the factor by which their number
# grows once half of them are taken.
_SLOT_BYTES, _FIRST_SLOTS, _MORE_SLOTS = 16, 32, 4
_FEW = 0.01  # of a column's values: so many plain ones are what the headers of pages take
_TEXT_PLACE_BYTES = 16  # of a text in the dictionary of Parquet's decoder: where it is, and its length


@dataclass(frozen=True)
class _Distinct:
    """Numbers of ids in the first rows of a column.

    Attributes:
        ids: how many there are. counted: how many of them, the first ones, the following numbers are about.
        distinct: different ids. once, twice: ids that occur exactly once or twice.
    """

    ids: int
    counted: int
    distinct: int
    once: int
    twice: int

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "_Distinct":
        while pa.types.is_list(column.type):
            column = pc.list_flatten(column)
        first = column.slice(0, _COUNTED_IDS)
        counts = first.value_counts().field("counts").to_numpy()
        once, twice = (int(np.count_nonzero(counts == times)) for times in (1, 2))
        return cls(len(column), len(first), len(counts), once, twice)

    def among(self, times: float) -> float:
        """Return about how many distinct ids there are in `times` as many rows.

        The unseen ones are estimated from those seen once and twice (Chao 1984, jstor.org/stable/4615964).
        """
        unseen = self.once * (self.once - 1) / (2 * (self.twice + 1)) if self.ids * times > self.counted else 0
        return min(self.ids * times, self.distinct + unseen)


@dataclass(frozen=True)
class _Column:
    """A column of the first rows: the bytes of its dictionary and of the rest, and the dictionary's entries.

    A file's dictionary is that of its whole row group. If it grew too large, further texts are stored plain, and
    Arrow's dictionary grows with the rows: then `distinct` is set.

    Attributes:
        read_bytes: what is held of these rows while they are decoded, besides Arrow's result: their bytes in the file,
            and Parquet's levels. page_bytes: the same of the file's dictionary, however many rows are decoded.
        plain: texts of these rows that are stored plain.
    """

    dictionary_bytes: int
    other_bytes: int
    entries: int
    distinct: _Distinct | None
    read_bytes: float
    page_bytes: int
    plain: float

    @classmethod
    def of(
        cls, column: pa.ChunkedArray, distinct_of: Callable[[], _Distinct], in_file: InFile, share: float
    ) -> "_Column":
        """Return the column of the first rows, which are a `share` of its row group."""
        arrays = [chunk.values if pa.types.is_list(chunk.type) else chunk for chunk in column.chunks]
        dictionaries = [array.dictionary for array in arrays if pa.types.is_dictionary(array.type)]
        sizes = [dictionary.nbytes for dictionary in dictionaries]  # a chunk's may extend the one before
        largest, entries = max(sizes, default=0), max(map(len, dictionaries), default=0)
        in_lists = _num_elements(column) if pa.types.is_list(column.type) else 0
        levels = _LEVEL_BYTES * max(len(column), 2 * in_lists)
        # The reader has decompressed the file's dictionary, and its decoder has a copy with the place of each text.
        page = largest or in_file.dictionary
        pages = (1 + in_file.is_compressed) * page + _TEXT_PLACE_BYTES * entries if in_file.dictionary else 0
        # What takes more room than the numbers of entries is plain.
        of_numbers = in_file.values * (entries.bit_length() + _LEVEL_BITS) / 8
        plain = max(0.0, in_file.raw - page - of_numbers) * entries / max(1, largest)
        distinct = distinct_of() if plain > _FEW * in_file.values else None
        other, read = max(0, column.nbytes - sum(sizes)), share * in_file.stored + levels
        return cls(largest, other, entries, distinct, read, pages, share * plain)

    def entries_among(self, times: float) -> float:
        """Return the number of entries in the dictionary of `times` as many rows."""
        if self.distinct is None:
            return self.entries
        return max(self.entries, min(self.distinct.among(times), self.entries + self.plain * times))

    def bytes_among(self, times: float) -> float:
        """Return the bytes that Arrow needs for `times` as many rows."""
        return self.dictionary_bytes * self.entries_among(times) / max(1, self.entries) + self.other_bytes * times

    def building_bytes(self, times: float) -> float:
        """Return the bytes needed besides `bytes_among` to decode `times` as many rows: buffers are copied as they grow
        and at the end, and the hash table holds the texts too."""
        slots = _FIRST_SLOTS
        while self.dictionary_bytes and 2 * self.entries_among(times) >= slots:
            slots *= _MORE_SLOTS
        return self.read_bytes * times + self.page_bytes + self.bytes_among(times) + _SLOT_BYTES * slots


class Sample:
    """The first rows of a dataset, as a window of the loader holds them."""

    def __init__(self, inputs: Inputs, role: str) -> None:
        spec, dataset = inputs.spec(role).uncounted(), inputs.datasets[role]  # a sample is not training
        table = read_head(dataset, SAMPLE_ROWS if role == "train" else _EVAL_ROWS)
        self.columns: Columns = convert_table(table, spec, dataset.head)
        self.rows = max(1, table.num_rows)
        self.names = [part.name for part in spec.ids]
        self._table, self._sources = table, [part.column for part in spec.ids]
        self._distinct = cache(lambda name: _Distinct.of(table.column(name)))
        vectors = {part.column for _, part in spec.vectors}
        lists = [
            name for name in table.column_names if pa.types.is_list(table.field(name).type) and name not in vectors
        ]
        longer = _longer_lists(dataset, table, lists)
        # Rows without lists need no correction.
        corrected = ", with lists as long as footers tell of all rows" if longer != 1 else ""
        self.source = f"the first {self.rows:,} rows{corrected}"
        self._at_once = bool(dataset.storage.root)  # columns are decoded at once, otherwise one after another
        self._num_groups = max(1, len(dataset.row_groups))
        self.group_rows = max(1.0, dataset.row_groups.total_rows / self._num_groups)
        self._heaviest, self._spread = _by_row_group(dataset)
        self._times = {name: longer if name in lists else 1.0 for name in table.column_names}
        in_file = SegmentReader(dataset).in_file(dataset.head.number)
        of_head = self.rows / max(1.0, stored_rows(dataset)[dataset.head.number])  # for rows of average length
        read = {n: (in_file.get(n, InFile(0, 0, 0, 0, False)), of_head / self._times[n]) for n in table.column_names}
        read |= {name: (_in_texts(table.column(texts)), 1.0) for name, texts in dataset.split.items()}
        self._columns = {
            name: _Column.of(column, partial(self._distinct, name), *read[name])
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
        self._lengths = {
            part.name: self._length(part, columns) if isinstance(columns, Ragged) else (1.0, 0.0, 0.0)
            for part, columns in zip(spec.ids, self.columns.ids, strict=True)
        }
        more = sum(
            (self._lengths[name][0] - len(part.values) / self.rows)
            * (spec.dtype.itemsize + (0 if part.weights is None else 4))
            for name, part in zip(self.names, self.columns.ids, strict=True)
            if isinstance(part, Ragged)
        )
        self.row_bytes = self.columns.num_bytes / self.rows + more
        self.listed = sum(len(x.values) for x in self.columns.lists if isinstance(x, Ragged)) / self.rows * longer

    def _length(self, part: IdColumn, lists: Ragged) -> tuple[float, float, float]:
        """Return how many table rows of a list feature a row of data has, with lists as long as in the whole data;
        and, as shares of that, the standard deviation within a row group and that of the means of row groups."""
        raw = None if part.column is None else self._table.column(part.column)
        most = part.max_length or math.inf
        if raw is None or not pa.types.is_list(raw.type):
            return len(lists.values) / self.rows, 0.0, 0.0
        lengths = pc.list_value_length(raw).fill_null(0).to_numpy()
        as_long = np.minimum(lengths * self._times.get(part.column or "", 1.0), most)
        longer = as_long.sum() / max(1, np.minimum(lengths, most).sum())
        mean, spread = float(len(lists.values) / self.rows * longer), as_long.std() / max(1e-9, as_long.mean())
        return mean, float(spread), self._spread

    def mean_ids(self) -> dict[str, float]:
        """Return the mean number of table rows of each feature in a row of data."""
        return {name: mean for name, (mean, *_) in self._lengths.items()}

    def most_ids(self, of_rows: int, of_groups: float) -> dict[str, float]:
        """Return the same for the largest batches of `of_rows` rows, drawn from `of_groups` row groups at once."""
        of_mean = max(0.0, 1 / of_groups - 1 / self._num_groups)  # without replacement: no spread if all are drawn
        return {
            name: mean * (1 + _LARGE_BATCH * math.sqrt((within**2 + between**2) / of_rows + between**2 * of_mean))
            for name, (mean, within, between) in self._lengths.items()
        }

    def window_bytes(self, num_rows: int, largest: int) -> float:
        """Return the bytes of windows of so many rows in all, the largest of which has `largest` (0: none is replaced).

        A block keeps the pages that a window of long lists has used when a window of short lists replaces it. Since
        sizes of blocks are powers of two, that is half of what all would take if each had once held the largest.
        """
        of_groups = max(1.0, largest / self.group_rows)
        kept = (self._heaviest - 1) / 2 / math.sqrt(of_groups) if largest else 0.0
        return num_rows * self.row_bytes * (1 + kept)

    def table_bytes(self, num_rows: int, columns: Iterable[str] | None = None) -> float:
        """Return the bytes in Arrow of columns (default: all) of so many rows."""
        names = self._columns if columns is None else columns
        return sum(self._columns[name].bytes_among(self._times[name] * num_rows / self.rows) for name in names)

    def decoding_bytes(self, num_rows: int, columns: Iterable[str] | None = None) -> float:
        """Return the most bytes that Arrow needs to decode columns (default: all) of so many rows."""
        decoded = building = peak = 0.0
        for name in self._columns if columns is None else columns:
            decoded += self.table_bytes(num_rows, [name])
            own = self._columns[name].building_bytes(self._times[name] * num_rows / self.rows)
            building = own + building * self._at_once  # otherwise buffers are freed after each column
            peak = max(peak, decoded + building)
        return peak

    def small_share(self, num_rows: int) -> float:
        """Return the share of the bytes of so many rows' columns that lies in blocks of the heap."""
        sizes = [self.table_bytes(num_rows, [name]) for name in self._columns]
        return sum(size for size in sizes if size < HEAP_BLOCK_BYTES) / max(1.0, sum(sizes))

    def text_bytes(self) -> dict[str, float]:
        """Return the mean bytes of an id and its offset, for each feature whose ids are texts."""
        sizes = {}
        for name, source in zip(self.names, self._sources, strict=True):
            column = self._table.column(source).slice(0, _EVAL_ROWS) if source is not None else pa.chunked_array([[]])
            while pa.types.is_list(column.type):
                column = pc.list_flatten(column)
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if is_text(column.type):
                sizes[name] = (pc.mean(pc.binary_length(column)).as_py() or 0) + _OFFSET_BYTES
        return sizes

    def distinct_ids(self, num_rows: int) -> Iterator[float]:
        """Yield for each feature the approximate number of distinct ids in so many rows."""
        for name in self._sources:
            yield 0.0 if name is None else self._distinct(name).among(num_rows / self.rows)


def _in_texts(texts: pa.ChunkedArray) -> InFile:
    """Return what texts are to the ids in them: held twice while they are split, out of their dictionary and in parts,
    each of which may be a new entry in the dictionary of ids."""
    num_bytes = texts.cast(pa.binary()).nbytes
    return InFile(2 * num_bytes, num_bytes, 0, 0, False)


def _by_row_group(dataset: Dataset) -> tuple[float, float]:
    """Return the largest bytes of a row in any row group, and their standard deviation, in units of the mean.

    If users are sorted by activity, some row groups have longer lists than others.
    """
    groups = dataset.row_groups
    of_mean = rows_by_bytes(groups) / groups.num_rows
    if not of_mean.any():  # there are no rows, or no column of them is read
        return 1.0, 0.0
    return float(of_mean.max()), math.sqrt(float(np.average((of_mean - 1) ** 2, weights=groups.num_rows)))


def rows_by_bytes(groups: RowGroups) -> np.ndarray:
    """Return for each row group how many rows of average size take its memory, since lists differ in length."""
    rows: np.ndarray = groups.num_bytes * (groups.total_rows / max(1, groups.num_bytes.sum()))
    return rows


def stored_rows(dataset: Dataset) -> np.ndarray:
    """Return what `rows_by_bytes` would return without a filter or a limit of rows."""
    groups = dataset.row_groups
    rows: np.ndarray = rows_by_bytes(groups) * dataset.stored_rows / np.maximum(1, groups.num_rows)
    return rows


def _longer_lists(dataset: Dataset, head: pa.Table, lists: Sequence[str]) -> float:
    """Return how many times as long lists are in a dataset as in its first rows, by the numbers in footers.

    Rows are often sorted by time, or by the activity of users, so the first ones differ from the others.

    Args:
        lists: columns of lists, without columns of vectors, whose lists are all of one length.
    """
    in_head = sum(_mean_length(head.column(name)) for name in lists)
    rows = int(dataset.row_groups.num_rows.sum())
    if not in_head or not rows:
        return 1.0
    vectors = set(head.column_names) - set(lists)
    of_vectors = sum(_mean_length(head.column(name)) for name in vectors if pa.types.is_list(head.field(name).type))
    of_files = head.num_columns - len(dataset.made)  # each counts once in a row, besides its elements
    in_all = int(dataset.row_groups.num_bytes.sum()) / 4 / rows - of_files - of_vectors
    return max(0.1, in_all / in_head)


def _mean_length(lists: pa.ChunkedArray) -> float:
    return _num_elements(lists) / max(1, len(lists))


def _num_elements(lists: pa.ChunkedArray) -> int:
    return pc.sum(pc.list_value_length(lists)).as_py() or 0
