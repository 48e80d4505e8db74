"""What is known of the data before anything is trained: ids a row, windows, decoding, vocabularies."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.config import Config, IdMappingType
from recsys.config.features import id_features, rank_rows, sampled_rows, with_experts
from recsys.data.dataset import Dataset
from recsys.data.decode import CACHED_ROW_GROUPS
from recsys.data.facts import counts_of
from recsys.data.inputs import Inputs
from recsys.data.order import most_shares, slice_bounds
from recsys.data.parquet import read_head
from recsys.data.spec import IdColumn
from recsys.data.wanted import column_of, role_features, with_figures
from recsys.data.window import Columns, Ragged, convert_table
from recsys.ids import index_bytes, is_text, statistics_bytes
from recsys.memory import DataFacts, Decoding
from recsys.models.items import rows_at_once
from recsys.runtime.environment import HEAP_BLOCK_BYTES
from recsys.runtime.threads import decoding_threads

_SAMPLE_ROWS = 20_000
_NUMBER_BYTES = 8  # of an id, unless it is a text
_ORDER_BYTES = 12  # of a row of a window that is shuffled, while that is done
_BUILDING = 2  # times the widest column, while it is decoded: buffers that double, pages, levels of lists
_DICTIONARY_PAGE_BYTES = 1 << 20  # at which writers give a dictionary up
_ENTRY_BYTES = 80  # of a distinct text, while the dictionary is built that it is decoded to (measured: 60 to 150)


def streams_of_a_rank(config: Config, world_size: int) -> int:
    """Return the most streams of data.train that a rank reads."""
    slots = slice_bounds(config.train.global_batch_size, config.data.num_streams)
    return len(most_shares(slots, world_size))


def data_facts(config: Config, inputs: Inputs | None, world_size: int) -> DataFacts:
    """Return what the footers and the first rows tell of the data, or without `inputs` what the config does."""
    biggest = max(table.num_embeddings for table in config.tables.values())
    if inputs is None:
        mean_ids = {name: float(config.features[name].max_length or 1) for name in id_features(config)}
        windows = 2 * (config.data.window_mib << 20) * streams_of_a_rank(config, world_size)
        id_bytes = 4 if biggest < 1 << 31 else 8
        source, of_ids = "max_length or 1: the data are not here", _vocabularies(config, None, {})
        counts, evaluated = len(mean_ids) * statistics_bytes(math.inf), _eval_ids(config, mean_ids)
        decoding = (Decoding(later=windows // 2),) * world_size
        return DataFacts(
            mean_ids, id_bytes, windows, decoding, {}, source, *of_ids, statistics_bytes=counts, eval_ids=evaluated
        )
    sample = _Sample(inputs, inputs.datasets["train"])
    sizes = {role: -(-dataset.num_rows // world_size) for role, dataset in inputs.datasets.items()}
    train_rows = sizes.pop("train")
    roles = sizes if {"valid", "test"} & sizes.keys() else {}  # a corpus alone is not evaluated
    held, largest = _held_rows(inputs, "train")
    # Beside the windows of the training data there are some that evaluate, and keep their memory for the next time.
    others = {role: _held_rows(inputs, role) for role in roles}
    distinct = dict(zip(sample.names, sample.distinct_ids(train_rows), strict=True))
    vocabularies, counted = _vocabularies(config, inputs, distinct)
    vocabularies += _drawn_bytes(inputs)
    return DataFacts(
        mean_ids=_mean_ids(config, sample, world_size),
        id_bytes=inputs.spec("train").dtype.itemsize,
        window_bytes=int(sample.row_bytes * (held + max((rows for rows, _ in others.values()), default=0))),
        decoding=_decoding_by_rank(inputs, sample, {"train": largest, **{r: rows for r, (_, rows) in others.items()}}),
        eval_rows=roles,
        source=f"the first {sample.rows:,} rows",
        vocabulary_bytes=vocabularies,
        counted_ids=counted,
        counted_bytes=_counted_bytes(inputs, sample, counted),
        statistics_bytes=sum(map(statistics_bytes, distinct.values())),
        ranking_bytes=_ranking_bytes(inputs),
        eval_ids=_eval_ids(config, sample.mean_ids()),
    )


def _mean_ids(config: Config, sample: "_Sample", world_size: int) -> dict[str, float]:
    """Return the table rows of each feature, of one row of a batch of training, with those for items that are drawn."""
    needs, means = config.model.needs(), sample.mean_ids()
    drawn = sampled_rows(config, world_size) / rank_rows(config, world_size)
    of_items = with_experts(config, needs.item_features)
    items = {} if needs.items_in_rows else dict.fromkeys(of_items, drawn)
    kept = {} if not needs.items_in_rows else {name: means[name] for name in of_items if name in means}
    return {name: mean * (1 - drawn) for name, mean in means.items()} | kept | items


def _eval_ids(config: Config, means: Mapping[str, float]) -> tuple[Mapping[str, float], ...]:
    """Return `DataFacts.eval_ids`, by the table rows of each feature of a row of data.train; of what it lacks, 1."""
    roles = ["valid"] if config.model.needs().item_id is None else ["valid", "items"]
    read = [set(role_features(config, role)) for role in roles]
    return tuple({name: means.get(name, 1.0) * (name in each) for name in id_features(config)} for each in read)


def _vocabularies(config: Config, inputs: Inputs | None, distinct: Mapping[str, float]) -> tuple[int, dict[str, int]]:
    """Return the bytes of vocabularies, their indices and counts of rows, and `DataFacts.counted_ids`.

    Before the data are counted, a vocabulary is taken to have as many ids as the table has rows for, and no more to
    choose from.

    Args:
        distinct: about how many distinct ids a feature has, where that is known.
    """
    corpus = [] if inputs is None or inputs.corpus is None else [inputs.corpus]
    facts = None if inputs is None else inputs.facts
    if facts is not None:
        indices = sum(map(_index_bytes, [*corpus, *facts.vocabularies.values()]))
        return indices + sum(counts.nbytes for counts in facts.row_counts.values()), facts.num_counted
    tables = {name: table for name, table in config.tables.items() if table.mapping is IdMappingType.vocabulary}
    rows = {name: table.num_embeddings - 1 - table.num_buckets for name, table in tables.items()}
    counted = {name: rows[name] for name, table in tables.items() if table.vocabulary is None}
    size = sum(index_bytes(each, each * _NUMBER_BYTES) for each in rows.values()) + sum(map(_index_bytes, corpus))
    if (feature := config.model.needs().log_shares_of) is not None:
        num_rows = config.tables[config.features[feature].table or ""].num_embeddings
        size += _NUMBER_BYTES * num_rows
        counted[counts_of(feature)] = int(min(num_rows, distinct.get(feature, num_rows)))
    return size, counted


def _drawn_bytes(inputs: Inputs) -> int:
    """Return the bytes of the items that negatives are drawn from, and of their shares."""
    if not inputs.config.model.needs().sampled_items:
        return 0
    items = inputs.datasets["items"]
    head = read_head(items, _SAMPLE_ROWS)
    return int((head.nbytes / max(1, head.num_rows) + _NUMBER_BYTES) * items.num_rows)


def _index_bytes(ids: pa.Array) -> int:
    """Return the bytes of a list of ids and of its index, which shares numbers with it, and has texts of its own."""
    return index_bytes(len(ids), ids.nbytes * (2 if is_text(ids.type) else 1))


@dataclass(frozen=True)
class _Distinct:
    """How many distinct ids the first rows of a column hold: of how many ids, and those that come once and twice."""

    ids: int
    distinct: int
    once: int
    twice: int

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "_Distinct":
        while pa.types.is_list(column.type):
            column = pc.list_flatten(column)
        counts = column.value_counts().field("counts").to_numpy()
        return cls(len(column), len(counts), int(np.count_nonzero(counts == 1)), int(np.count_nonzero(counts == 2)))

    def among(self, times: float) -> float:
        """Return about how many distinct ids so many times the rows hold.

        What has been seen once and twice tells how many have not been seen (Chao 1984, jstor.org/stable/4615964).
        """
        unseen = self.once * (self.once - 1) / (2 * (self.twice + 1)) if times > 1 else 0
        return min(self.ids * times, self.distinct + unseen)


@dataclass(frozen=True)
class _Column:
    """A column of the first rows: the bytes of its dictionary and of the rest, and the dictionary's entries.

    A file's dictionary is that of its whole row group. Where it grew too large, texts follow in plain, and what Arrow
    makes of them grows with the rows: then `distinct` is there.
    """

    dictionary_bytes: int
    other_bytes: int
    entries: int
    distinct: _Distinct | None

    @classmethod
    def of(cls, column: pa.ChunkedArray, distinct_of: Callable[[], _Distinct]) -> "_Column":
        arrays = [chunk.values if pa.types.is_list(chunk.type) else chunk for chunk in column.chunks]
        dictionaries = [array.dictionary for array in arrays if pa.types.is_dictionary(array.type)]
        sizes = [dictionary.nbytes for dictionary in dictionaries]  # each chunk's may hold more than that before it
        largest, entries = max(sizes, default=0), list(map(len, dictionaries)) or [0]
        grows = largest >= _DICTIONARY_PAGE_BYTES or max(entries) > entries[0]
        return cls(largest, max(0, column.nbytes - sum(sizes)), max(entries), distinct_of() if grows else None)

    def entries_among(self, times: float) -> float:
        """Return the entries of the dictionary of so many times the rows."""
        return self.entries if self.distinct is None else max(self.entries, self.distinct.among(times))

    def bytes_among(self, times: float) -> float:
        """Return what Arrow takes for so many times the rows."""
        return self.dictionary_bytes * self.entries_among(times) / max(1, self.entries) + self.other_bytes * times


class _Sample:
    """The first rows of a dataset, as a window of the loader holds them."""

    def __init__(self, inputs: Inputs, dataset: Dataset) -> None:
        spec = inputs.spec("train").uncounted()  # a sample is no training
        table = read_head(dataset, _SAMPLE_ROWS)
        self.columns: Columns = convert_table(table, spec)
        self.rows = max(1, table.num_rows)
        self.names = [part.name for part in spec.ids]
        self._table, self._sources = table, [part.column for part in spec.ids]
        self._distinct = cache(lambda name: _Distinct.of(table.column(name)))
        columns = zip(table.column_names, table.columns, strict=True)
        self._columns = {name: _Column.of(column, partial(self._distinct, name)) for name, column in columns}
        longer = _longer_lists(dataset, table)
        self._times = {name: longer if pa.types.is_list(table.field(name).type) else 1.0 for name in table.column_names}
        self._means = {
            part.name: self._mean_length(part, columns) if isinstance(columns, Ragged) else 1.0
            for part, columns in zip(spec.ids, self.columns.ids, strict=True)
        }
        id_bytes = spec.dtype.itemsize + 4 * spec.weighted
        more = sum(
            self._means[name] - len(part.values) / self.rows
            for name, part in zip(self.names, self.columns.ids, strict=True)
            if isinstance(part, Ragged)
        )
        self.row_bytes = self.columns.num_bytes / self.rows + id_bytes * more

    def _mean_length(self, part: IdColumn, found: Ragged) -> float:
        """Return the table rows of a feature of lists, of one row of data, as long as lists are in the whole data."""
        raw = None if part.column is None else self._table.column(part.column)
        most = part.max_length or math.inf
        if raw is None or not pa.types.is_list(raw.type):
            return len(found.values) / self.rows
        lengths = pc.list_value_length(raw).fill_null(0).to_numpy()
        capped = np.minimum(lengths, most).sum()
        longer = np.minimum(lengths * self._times.get(part.column or "", 1.0), most).sum() / max(1, capped)
        return float(len(found.values) / self.rows * longer)

    def mean_ids(self) -> dict[str, float]:
        """Return the table rows of each feature, of one row of data."""
        return dict(self._means)

    def table_bytes(self, num_rows: int, columns: Iterable[str] | None = None) -> float:
        """Return what columns of so many rows take in Arrow, all by default."""
        names = self._columns if columns is None else columns
        return sum(self._columns[name].bytes_among(self._times[name] * num_rows / self.rows) for name in names)

    def decoding_bytes(self, num_rows: int, columns: Iterable[str] | None = None) -> float:
        """Return what Arrow takes at its peak to decode columns of so many rows one after another, all by default."""
        names = list(self._columns if columns is None else columns)
        building = (
            _BUILDING * self.table_bytes(num_rows, [name])
            + _ENTRY_BYTES * self._columns[name].entries_among(num_rows / self.rows)
            for name in names
        )
        return self.table_bytes(num_rows, names) + max(building, default=0)

    def small_share(self, num_rows: int) -> float:
        """Return which share of the columns of so many rows, in bytes, lies in blocks of the heap."""
        sizes = [self.table_bytes(num_rows, [name]) for name in self._columns]
        return sum(size for size in sizes if size < HEAP_BLOCK_BYTES) / max(1.0, sum(sizes))

    def distinct_ids(self, num_rows: int) -> Iterator[float]:
        """Yield for each feature about how many distinct ids so many rows hold."""
        for name in self._sources:
            yield 0.0 if name is None else self._distinct(name).among(num_rows / self.rows)


def _longer_lists(dataset: Dataset, head: pa.Table) -> float:
    """Return how many times as long lists are in a dataset as in its first rows, by the numbers that footers tell.

    Rows often come in the order of time, or of users by what they did: the first ones are not like the others.
    """
    lists = [column for column in head.columns if pa.types.is_list(column.type)]
    in_head = sum(pc.sum(pc.list_value_length(column)).as_py() or 0 for column in lists) / max(1, head.num_rows)
    rows = int(dataset.row_groups.num_rows.sum())
    if not in_head or not rows:
        return 1.0
    in_all = int(dataset.row_groups.num_bytes.sum()) / 4 / rows - head.num_columns
    return max(0.1, in_all / in_head)


def _num_threads(inputs: Inputs) -> int:
    return decoding_threads(inputs.config.data.num_threads, inputs.world.device, inputs.world.local_world_size)


def _held_rows(inputs: Inputs, role: str) -> tuple[int, int]:
    """Return the most rows of windows that a loader's streams hold at once, and those of the largest window."""
    held, largest = 0, 0
    again = role == "train" and inputs.config.train.epochs > 1
    for rows in inputs.loader(role).window_rows():
        following = [*rows[1:], rows[0] if rows and again else 0]
        pairs = [sum(pair) for pair in zip(rows, following, strict=False)] if _num_threads(inputs) else rows
        held += max(pairs, default=0)
        largest = max(largest, *rows, 0)
    return held, largest


def _decoding(inputs: Inputs, role: str, sample: _Sample, largest: int) -> list[tuple[int, int, int]]:
    """Return by rank what it takes to decode a dataset's row groups and make windows of `largest` rows at most: before
    there are windows and steps, beside these, and what of that stays afterwards."""
    threads, num_rows = max(1, _num_threads(inputs)), inputs.datasets[role].row_groups.num_rows
    # One that is made is there twice, in the order of the files and shuffled, with the order of its rows.
    making = threads * largest * (sample.row_bytes + _ORDER_BYTES)
    found = []
    for numbers in inputs.loader(role).row_groups_by_rank():
        read = np.sort(num_rows[numbers])[::-1]
        decoding = sum(map(sample.decoding_bytes, read[:threads].tolist()))
        in_heaps = sample.small_share(int(read.max(initial=0)))
        if len(num_rows) <= CACHED_ROW_GROUPS:  # decoded once, and kept
            kept = sum(map(sample.table_bytes, read.tolist()))
            found.append((int(decoding), int(making + kept), int(in_heaps * making + kept)))
        else:
            found.append((0, int(making + decoding), int(in_heaps * (making + decoding))))
    return found


def _decoding_by_rank(inputs: Inputs, sample: _Sample, largest: Mapping[str, int]) -> tuple[Decoding, ...]:
    """Return what datasets take by rank.

    Args:
        largest: by role, the rows of the largest window; "train" and what is evaluated.
    """
    by_role = {role: _decoding(inputs, role, sample, rows) for role, rows in largest.items()}
    evaluated = [sizes for role, sizes in by_role.items() if role != "train"]
    found = []
    for rank, (first, later, _) in enumerate(by_role["train"]):
        of_evaluation = (max((sizes[rank][i] for sizes in evaluated), default=0) for i in range(3))
        found.append(Decoding(first, later, *of_evaluation))
    return tuple(found)


def _ranking_bytes(inputs: Inputs) -> int:
    """Return what a rank's items' vectors take, as they come and in order, and scores and hits of some users."""
    items, train = 0 if inputs.corpus is None else len(inputs.corpus), inputs.config.train
    own, users = (-(-n // inputs.world.world_size) for n in (items, train.eval_batch_size or train.global_batch_size))
    scores, hits = (n * min(users, rows_at_once(n, inputs.world.device.type)) for n in (own, items))
    vector = 4 * inputs.config.model.needs().vector_dim + _NUMBER_BYTES
    return 2 * vector * own + 4 * scores + hits


def _counted_bytes(inputs: Inputs, sample: _Sample, tables: Collection[str]) -> int:
    """Return what it takes to decode the columns of a row group that vocabularies and figures are learned from."""
    config = inputs.config
    present = [name for name in role_features(config, "train") if name in id_features(config)]
    names = [n for n in present if (config.features[n].table or "") in tables or counts_of(n) in tables]
    columns = dict.fromkeys(column_of(config, name) for name in [*names, *with_figures(config)])
    rows = int(inputs.datasets["train"].row_groups.num_rows.max())
    return int(sample.decoding_bytes(rows, columns))
