"""Vectors by raw id: of tables, and of items and users by the towers of a retrieval model."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.checkpoint import FOOTERS, Marker, check_facts, facts_of, pick_rows, verify_checkpoint
from recsys.checkpoint.parquet import to_arrow
from recsys.checkpoint.tensors import TABLES
from recsys.config import IdMappingType
from recsys.config.choices import Pooling
from recsys.data.facts import Facts, VocabularyRequest, kept_rows_file, measure, vocabulary_file
from recsys.data.inputs import Given, open_inputs
from recsys.data.parquet import column_names
from recsys.data.wanted import column_of, item_column, needed_columns, role_features, row_filter
from recsys.errors import UserError, nearest
from recsys.ids import IdMapping, build_mapping
from recsys.runtime.logs import quiet_libraries, start_logging
from recsys.runtime.run_lock import output_lock
from recsys.runtime.watchdog import open_run_world
from recsys.runtime.world import World
from recsys.serving.finished import Finished, OpenRun
from recsys.serving.index import build_index, faiss
from recsys.serving.parts import BLOCK_ROWS, Parts
from recsys.serving.predict import Results, naming_data, scored, write_results
from recsys.step.output import StepOutput
from recsys.training.alike import check_shared

_TOWERS = ("user", "item")  # in the order of a retrieval model's outputs
_IDS_AT_ONCE = 1 << 16


def embeddings(
    run: Finished,
    name: str,
    out: Path,
    data: str | list[str] | None = None,
    keep: Sequence[str] | None = None,
    index: str | None = None,
    queries: str | None = None,
) -> int:
    """Write a folder of Parquet files with vectors; return the exit status, 0.

    Args:
        name: `item`, for the items of `data`, by default data.items; `user`, for the users of `data`; or a table, also
            written as tables.NAME, for its ids: those that occur in `data`, by default all that the run knows.
        out: as of `recsys.serving.predict.predict`.
        keep: columns of the data to write next to the vectors of a tower; default: ids.
        index: kind of a FAISS index of the vectors of items. queries: users to measure its recall on.

    Raises:
        UserError: there is no such table, its ids are unknown, or the data do not fit.
    """
    table = table_of(run, name, keep)
    if queries is not None and index is None:
        raise UserError("--queries are users on whom the recall of an index is measured; add --faiss")
    if index is not None:
        if table is not None or name != "item":
            raise UserError(f"--faiss indexes vectors of items, not of '{name}'; leave it out")
        faiss()  # refuse before anything is computed
    if table is not None:
        return _write_table(run, table, out, data)
    given, results = rows_of_tower(run, name, data, keep), vectors_of_tower(name)

    def then(opened: OpenRun) -> None:
        if index is not None:
            vectors = None if queries is None else _vectors_of_users(opened, queries)
            source = "items" if queries is None else queries
            opened.world.from_rank_zero(lambda: build_index(out, index, vectors, source))

    return write_results(run, out, given, {"of": name}, lambda opened: results, then=then)


def _write_table(run: Finished, table: str, out: Path, data: str | list[str] | None) -> int:
    quiet_libraries()
    with open_run_world(run.config.run) as (world, _), naming_data(), output_lock() as lock:
        vectors = open_table(run, verify_checkpoint(run.checkpoint, world), world, table, data)
        starts = range(0, vectors.num_ids, BLOCK_ROWS)
        rows = [min(BLOCK_ROWS, vectors.num_ids - start) for start in starts]
        parts = world.from_rank_zero(lambda: Parts.begin(out, vectors.task, rows, lock))
        check_shared(out, lock, world, "OUT")
        start_logging(out / "_logs", world.rank)

        def tables_of(number: int) -> Iterator[pa.Table]:
            ends = [starts[number] + rows[number] * rank // world.world_size for rank in (world.rank, world.rank + 1)]
            return vectors.tables(*ends)

        parts.write(world, lock, tables_of)
    return 0


def table_of(run: Finished, name: str, keep: Sequence[str] | None) -> str | None:
    """Return the table with a name, or None if the name is that of a tower.

    Raises:
        UserError: it is neither, or columns are to be kept with the vectors of a table.
    """
    towers = _TOWERS if run.config.model.needs().item_id is not None else ()
    table = str(name).removeprefix("tables.")
    if name in towers:
        return None
    if table not in run.config.tables:
        names = [
            *towers,
            *(f"tables.{table_name}" if table_name in towers else table_name for table_name in run.config.tables),
        ]
        raise UserError(f"the run has no vectors of '{name}'{nearest(str(name), names)} (known: {', '.join(names)})")
    if keep is not None:
        raise UserError(f"--keep names columns of users or items, but vectors of table '{table}' have only their id")
    return table


def rows_of_tower(run: Finished, tower: str, data: str | list[str] | None, keep: Sequence[str] | None) -> Given:
    """Return the rows for which a tower is to compute vectors.

    Raises:
        UserError: neither arguments nor config name the rows.
    """
    config = run.config
    if tower == "item":
        keep = [item_column(config)] if keep is None else keep
        if data is None and config.data.items is not None:
            filter, max_rows = row_filter(config, "items"), config.data.max_rows
            return Given("items", config.data.items, keep, filter, key="data.items", max_rows=max_rows)
    if data is None:
        raise UserError(f"nothing says which {tower}s' vectors are wanted; give their rows as --data")
    return run.given("items" if tower == "item" else "queries", data, keep)


def vectors_of_tower(tower: str) -> Results:
    """Return a function from the model's outputs to the vectors of a tower, as column `vector`."""
    place = _TOWERS.index(tower)

    def results(output: StepOutput) -> pa.Table:
        return pa.table({"vector": to_arrow(output.outputs[place])})

    return results


def _vectors_of_users(opened: OpenRun, users: str) -> np.ndarray:
    """Return the vectors of users, float32 [users, dim]; collective."""
    inputs = opened.beside([], opened.run.given("queries", users, None))
    tables = scored(opened, inputs.loader("queries"), [], vectors_of_tower("user"))
    vectors = pa.concat_tables(tables)["vector"].combine_chunks()
    dim = inputs.config.model.needs().vector_dim  # a rank without users has no vectors to take it from
    return np.concatenate(opened.world.gather(vectors.flatten().to_numpy().reshape(len(vectors), dim)))


@dataclass(frozen=True)
class TableVectors:
    """Vectors of the ids of a table, read from a checkpoint in chunks.

    Attributes:
        ids: raw ids, [num_ids]; None: 0, 1, …
        task: as of `Parts`.
    """

    run: Finished
    marker: Marker
    table: str
    mapping: IdMapping
    ids: pa.Array | None
    num_ids: int
    task: dict[str, Any]

    def tables(self, start: int, stop: int) -> Iterator[pa.Table]:
        """Yield columns `id` and `vector` of some ids; the rows of an id with several are pooled as by the model."""
        weights, pooling = self.marker.tensors[TABLES + self.table], self.run.config.tables[self.table].pooling
        for first in range(start, max(stop, start + 1), _IDS_AT_ONCE):  # without ids, yield a table without rows
            last = min(stop, first + _IDS_AT_ONCE)
            ids = pa.array(np.arange(first, last)) if self.ids is None else self.ids.slice(first, last - first)
            vectors = pick_rows(self.run.checkpoint, weights, self.mapping.rows(ids)).float()
            vectors = vectors.view(len(ids), self.mapping.rows_per_id, vectors.shape[1])
            pooled = vectors.mean(1) if pooling is Pooling.mean else vectors.sum(1)
            yield pa.table({"id": ids, "vector": to_arrow(pooled)})


def open_table(run: Finished, marker: Marker, world: World, table: str, data: str | list[str] | None) -> TableVectors:
    """Return the vectors of a table; collective.

    Args:
        marker: of the checkpoint of the run. data: with the ids; None: those that the run knows.

    Raises:
        UserError: neither the run nor the data have the ids, or the data do not fit.
    """
    settings, path = run.config.tables[table], run.checkpoint
    task: dict[str, Any] = {"checkpoint": {"path": str(path), "files": marker.files}, "of": f"tables.{table}"}
    with_vocabulary = [table] if settings.mapping is IdMappingType.vocabulary else []
    pruned = [table] if settings.kept_rows is not None else []
    check_facts(path, marker, [*map(vocabulary_file, with_vocabulary), *map(kept_rows_file, pruned)])
    vocabulary, kept = Facts.load(facts_of(path), with_vocabulary, [], [], pruned).of_table(table)
    mapping = build_mapping(settings, vocabulary, kept)
    features = [feature for feature in run.config.features.values() if feature.table == table]
    are_buckets = all(feature.boundaries for feature in features)  # an id is the number of boundaries up to a value
    if data is not None:
        if are_buckets:
            raise UserError(f"ids of table '{table}' are buckets of numbers, which the run knows; leave out --data")
        ids, task["data"] = _ids_in(run, world, table, data)
        return TableVectors(run, marker, table, mapping, ids, len(ids), task)
    number = 0
    if settings.mapping is IdMappingType.identity:
        number = settings.num_embeddings if kept is None else kept.num_before
    if are_buckets:
        number = max(1 + len(feature.boundaries or ()) for feature in features)
    if vocabulary is None and not number:
        raise UserError(
            f"table '{table}' has mapping: {settings.mapping.value}, which keeps no ids; give data that hold the "
            f"wanted ids as --data"
        )
    return TableVectors(
        run, marker, table, mapping, vocabulary, number if vocabulary is None else len(vocabulary), task
    )


def _ids_in(run: Finished, world: World, table: str, data: str | list[str]) -> tuple[pa.Array, str]:
    """Return the distinct ids of a table in data, the most frequent first, and the fingerprint of the data.

    They are those of all features of the table whose columns exist, except features that are read in training alone.
    """
    config = run.config
    features = {name: replace(config.features[name], hidden=None) for name in role_features(config, "rows")}
    mine = {name: feature for name, feature in features.items() if feature.table == table and not feature.boundaries}
    present = world.from_rank_zero(lambda: column_names(Given.key, data, config.data.retries))
    present.update(config.data.optional_columns)  # the first file may lack it, and others have it
    needed = {name: needed_columns(replace(config, features={name: feature}), "rows") for name, feature in mine.items()}
    chosen = {name: feature for name, feature in mine.items() if needed[name].keys() <= present} or mine
    config = replace(config, features=chosen)
    given = run.given("rows", data, None)
    inputs = open_inputs(config, world, known=run.run_dir / FOOTERS, roles=[], given=[given])
    columns = tuple(dict.fromkeys(column_of(config, name) for name in chosen))
    facts = measure(inputs.datasets["rows"], {table: VocabularyRequest(columns, 1, sys.maxsize)}, [], world)
    return facts.vocabularies[table], inputs.datasets["rows"].fingerprint
