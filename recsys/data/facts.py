"""Vocabularies, means and counts of table rows, measured on the training data before a model is built.

This takes one pass over the columns concerned, in which each rank reads its share of the row groups. The results are
kept with the run.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.config import NullPolicy
from recsys.data.arrays import drop_nulls, plain
from recsys.data.convert import convert_ids, flatten
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.figures import FloatFacts, joined, summarise
from recsys.data.order import Segment
from recsys.data.spec import FloatColumn, IdColumn
from recsys.errors import UserError
from recsys.ids import (
    NULL_ROW,
    Grown,
    IdCounter,
    KeptIds,
    KeptRows,
    add_up,
    grow,
    is_new,
    read_unseen_runs,
    read_vocabulary,
    write_vocabulary,
)
from recsys.runtime.files import replace_file
from recsys.runtime.live import Task
from recsys.runtime.parquet import write_table
from recsys.runtime.world import World

FLOATS_FILE = "floats.json"
_ROW = np.dtype(np.int64)


@dataclass(frozen=True)
class Facts:
    """What was measured on the training data.

    Attributes:
        vocabularies: by table, its distinct ids, the most frequent first. floats: by float feature, its figures.
        row_counts: by id feature, how often the data hold each row of its table, int64 [num_embeddings].
        num_counted: by table, how many distinct ids its vocabulary was chosen from, if this start of the run chose it;
            by `counts_of` a feature, how many this rank has counted.
        unseen_runs: by table, for the first ids of its vocabulary, how many runs in a row have not seen them in
            data.train, int32; the others have 0.
        kept: by table, the ids of its vocabulary that the run whose weights are used had too.
        kept_rows: by pruned table, the rows that were kept.
    """

    vocabularies: dict[str, pa.Array] = field(default_factory=dict)
    floats: dict[str, FloatFacts] = field(default_factory=dict)
    row_counts: dict[str, np.ndarray] = field(default_factory=dict)
    num_counted: dict[str, int] = field(default_factory=dict)
    unseen_runs: dict[str, np.ndarray] = field(default_factory=dict)
    kept: dict[str, KeptIds] = field(default_factory=dict)
    kept_rows: dict[str, KeptRows] = field(default_factory=dict)

    def of_table(self, table: str) -> tuple[pa.Array | None, KeptRows | None]:
        """Return what a table's mapping is built from: its vocabulary, and the rows that were kept by pruning."""
        return self.vocabularies.get(table), self.kept_rows.get(table)

    def save(self, folder: Path) -> None:
        """Write RUN/vocabulary: Parquet files, one per table or feature and field, and floats.json."""
        if self.files():
            folder.mkdir(exist_ok=True)
        for table, ids in self.vocabularies.items():
            write_vocabulary(folder / vocabulary_file(table), ids, self.unseen_runs.get(table))
        for feature, counts in self.row_counts.items():
            write_table(folder / vocabulary_file(counts_of(feature)), pa.table({"count": counts}))
        for table, kept in self.kept_rows.items():
            kept.write(folder / kept_rows_file(table))
        if FLOATS_FILE in self.files():
            figures = {name: asdict(moments) for name, moments in self.floats.items()}
            replace_file(folder / FLOATS_FILE, json.dumps(figures, indent=1))

    def files(self) -> list[str]:
        """Return the names of the files that `save` writes."""
        names = [*self.vocabularies, *map(counts_of, self.row_counts)]
        names_kept = map(kept_rows_file, self.kept_rows)
        return [*map(vocabulary_file, names), *names_kept, *([FLOATS_FILE] if self.vocabularies or self.floats else [])]

    @staticmethod
    def load(
        folder: Path, tables: Sequence[str], floats: Sequence[str], counted: Sequence[str], pruned: Sequence[str]
    ) -> "Facts":
        """Read what an earlier run has saved: vocabularies of `tables`, figures of `floats`, row counts of the features
        `counted`, and the kept rows of the tables `pruned`.

        Raises:
            UserError: a file is missing, or cannot be read.
        """
        vocabularies = {table: read_vocabulary(folder / vocabulary_file(table)) for table in tables}
        try:
            content = json.loads((folder / FLOATS_FILE).read_text()) if floats else {}
            figures = {name: FloatFacts.of(content[name]) for name in floats}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"'{folder / FLOATS_FILE}' lacks the figures of {', '.join(floats)} ({error!r})") from error
        counts = {name: pq.read_table(folder / vocabulary_file(counts_of(name)))["count"] for name in counted}
        row_counts = {name: column.to_numpy() for name, column in counts.items()}
        kept_rows = {table: KeptRows.read(folder / kept_rows_file(table)) for table in pruned}
        return Facts(vocabularies, figures, row_counts, kept_rows=kept_rows)


def unseen_runs_of(folder: Path, tables: Iterable[str]) -> dict[str, np.ndarray]:
    """Return by table the `Facts.unseen_runs` that an earlier run has saved; empty arrays for files without them."""
    return {table: read_unseen_runs(folder / vocabulary_file(table)) for table in tables}


def counts_of(feature: str) -> str:
    """Return the name of a feature's row counts among the names of tables, which vocabularies have."""
    return f"{feature}.counts"


def kept_rows_file(table: str) -> str:
    """Return the name of the file in RUN/vocabulary that says which rows of a table are kept."""
    return vocabulary_file(f"{table}.kept")


def vocabulary_file(table: str) -> str:
    """Return the name of a table's file in RUN/vocabulary."""
    return f"{table}.parquet"


@dataclass(frozen=True)
class VocabularyRequest:
    """A request for a vocabulary of the ids in some columns that occur `min_count` times, `max_size` at most.

    Attributes:
        known: the vocabulary that it begins with, however often its ids occur; they count towards `max_size`.
        unseen_runs, evict_after: for `known`, as in `recsys.ids.grow`.
        after: tables whose requests for the same columns are chosen first; ids in their vocabularies are left out here.
        taken: vocabularies whose ids are left out too.
    """

    columns: tuple[str, ...]
    min_count: int
    max_size: int
    known: pa.Array | None = None
    unseen_runs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    evict_after: int | None = None
    after: tuple[str, ...] = ()
    taken: tuple[pa.Array, ...] = ()


class RowCounter:
    """Counts how often a column holds each row of its table, in memory that grows with the number of distinct ones.

    Args:
        part: the column.
        is_mapped: whether its mapping is final. Otherwise, while there is no vocabulary yet, raw ids are counted.
    """

    def __init__(self, part: IdColumn, is_mapped: bool) -> None:
        assert part.column is not None
        self.column, self._part, self._is_mapped = part.column, part, is_mapped
        self._ids, self._num_nulls = IdCounter(), 0

    def add(self, chunk: pa.Array) -> None:
        """Count a piece of the column."""
        if self._is_mapped:
            self._ids.add(pa.array(convert_ids(chunk, self._part, _ROW).values))
            return
        ids = plain(chunk)
        if pa.types.is_list(ids.type):
            ids = flatten(ids, None, self._part)[0]  # cut, since the rest of a list is not trained either
        self._num_nulls += ids.null_count
        self._ids.add(_present(ids))

    def counts(self, part: IdColumn, num_embeddings: int) -> tuple[np.ndarray, int]:
        """Return the counts, int64 [num_embeddings], and how many distinct ids there were.

        `part` has the final mapping.
        """
        counted = self._ids.to_table()
        ids, counts = counted.column("id").combine_chunks(), counted.column("count").to_numpy()
        rows = ids.to_numpy() if self._is_mapped else convert_ids(ids, part, _ROW).values
        totals = np.bincount(rows, counts, num_embeddings).astype(np.int64)
        if not self._is_mapped and part.null is NullPolicy.reserved:
            totals[NULL_ROW] += self._num_nulls
        return totals, len(ids)


def measure(
    dataset: Dataset,
    vocabularies: dict[str, VocabularyRequest],
    floats: Sequence[FloatColumn],
    world: World,
    rows: RowCounter | None = None,
) -> Facts:
    """Measure facts in one pass over a dataset; the result is the same on every rank, and for every number of ranks.

    Args:
        vocabularies: requests by table.
        floats: features whose figures are measured, after clip and log1p.
        rows: counter that this rank's share of its column is added to.

    Raises:
        UserError: on every rank, if data cannot be read on any.
    """
    if not (vocabularies or floats or rows):
        return Facts()
    tables, summaries = world.agree(lambda: _pass(dataset, vocabularies, floats, world, rows))
    chosen, num_counted = dict[str, Grown](), dict[str, int]()
    for columns in list(tables):
        # One table at a time, dropped after use, because they hold every id that there is.
        with _naming(dataset, columns):
            counts = add_up(world.gather(tables.pop(columns)))
            requests = {table: request for table, request in vocabularies.items() if request.columns == columns}
            num_counted[next(iter(requests))] = counts.num_rows
            for table, request in sorted(requests.items(), key=lambda pair: len(pair[1].after)):
                chosen[table] = _chosen(counts, request, [chosen[other].ids for other in request.after])
    # Joined in the order of the row groups, so that rounding does not depend on the number of ranks.
    by_group = dict(sorted(pair for part in world.gather(summaries) for pair in part.items()))
    figures = {part.name: joined([group[i] for group in by_group.values()], part) for i, part in enumerate(floats)}
    return Facts(
        {table: grown.ids for table, grown in chosen.items()},
        figures,
        num_counted=num_counted,
        unseen_runs={table: grown.unseen_runs for table, grown in chosen.items()},
        kept={table: grown.kept for table, grown in chosen.items() if vocabularies[table].known is not None},
    )


def _chosen(counts: pa.Table, request: VocabularyRequest, before: Sequence[pa.Array]) -> Grown:
    for taken in (*before, *request.taken):
        counts = counts.filter(pa.array(is_new(counts.column("id").combine_chunks(), taken)))
    limits = request.min_count, request.max_size, request.evict_after
    return grow(request.known, request.unseen_runs, counts, *limits)


def _pass(
    dataset: Dataset,
    vocabularies: dict[str, VocabularyRequest],
    floats: Sequence[FloatColumn],
    world: World,
    row_counter: RowCounter | None,
) -> tuple[dict[tuple[str, ...], pa.Table], dict[int, list[np.ndarray]]]:
    columns = [column for request in vocabularies.values() for column in request.columns]
    columns += [part.column for part in floats if part.column is not None]
    columns += [row_counter.column] if row_counter else []
    reader = SegmentReader(dataset, list(dict.fromkeys(columns)))
    counters = {request.columns: IdCounter() for request in vocabularies.values()}
    summaries: dict[int, list[np.ndarray]] = {}
    mine = range(world.rank, len(dataset.row_groups), world.world_size)

    def summaries_of(rows: pa.Table, segment: Segment) -> list[np.ndarray]:
        with segment.named():
            for counted, counter in counters.items():
                with _naming(dataset, counted):
                    for chunk in chain.from_iterable(rows.column(column).chunks for column in counted):
                        counter.add(_present(_flat(chunk)))
            if row_counter is not None:
                for chunk in rows.column(row_counter.column).chunks:
                    row_counter.add(chunk)
            return [summarise(rows.column(part.column or ""), part) for part in floats]

    with Task("counting ids", len(mine), "row groups", world.rank == 0) as task:
        for i in mine:
            segment = dataset.row_groups.segment(i)
            # The rows get no name here, because a name would keep them while the next row group is decoded.
            with suppress(*dataset.skipped):
                summaries[i] = summaries_of(reader.read(segment), segment)
            task.done += 1
    tables = {}
    for counted in list(counters):
        with _naming(dataset, counted):  # inside `agree`, so that all ranks get an error if types of ids do not fit
            tables[counted] = counters.pop(counted).to_table()
    return tables, summaries


@contextmanager
def _naming(dataset: Dataset, columns: Sequence[str]) -> Iterator[None]:
    """Let errors about ids of a vocabulary name the columns that hold them."""
    try:
        yield
    except (UserError, TypeError) as error:
        named = ", ".join(f"'{column}'" for column in columns)
        raise UserError(f"config key '{dataset.key}': ids of a vocabulary, in {named}: {error}") from error


def _flat(ids: pa.Array) -> pa.Array:
    ids = plain(ids)
    while pa.types.is_list(ids.type):
        ids = plain(ids.flatten())
    return ids


def _present(ids: pa.Array) -> pa.Array:
    return drop_nulls(ids) if ids.null_count else ids
