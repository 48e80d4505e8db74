"""Vocabularies and other facts of a run: measured on its training data, or inherited from its source."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from recsys.checkpoint import FACTS, Source, check_facts, facts_of, footers_of
from recsys.checkpoint.files import entry_of
from recsys.config import Config, IdMappingType, TableConfig
from recsys.config.experts import deciding_tables, experts_with
from recsys.config.features import id_features, table_of_feature
from recsys.config.initial import Take
from recsys.config.meaning import meaning
from recsys.data.checks import check_types
from recsys.data.facts import (
    FLOATS_FILE,
    Facts,
    RowCounter,
    VocabularyRequest,
    counts_of,
    kept_rows_file,
    measure,
    unseen_runs_of,
    vocabulary_file,
)
from recsys.data.footer_cache import kept_schema
from recsys.data.inputs import Inputs
from recsys.data.wanted import column_of, float_column, role_features, with_figures
from recsys.errors import UserError
from recsys.ids import KeptIds, KeptRows, is_new, joined, read_vocabulary
from recsys.runtime.environment import give_unused_back
from recsys.runtime.logs import logger


def learn_facts(inputs: Inputs, run_dir: Path, source: Source | None = None) -> Inputs:
    """Return the inputs with their facts, and with a config whose vocabulary tables have as many rows as they need.

    Args:
        run_dir: where the facts are saved, for a later resume.
        source: what the run starts from; facts go with the tensors that are loaded from it.

    Raises:
        UserError: on every rank, for vocabularies that differ from those of the source or are too long for their table,
            and for ids whose type is not that of the source.
    """
    config, world = inputs.config, inputs.world
    if source is not None and source.init is not None and source.init.tables is not Take.none:
        world.from_rank_zero(lambda: _check_ids(inputs, source))
    tables = {name: table for name, table in config.tables.items() if table.mapping is IdMappingType.vocabulary}
    pruned = {name: table for name, table in config.tables.items() if table.kept_rows is not None}
    goes_on = source is not None and source.goes_on
    inherited = Facts() if source is None else world.from_rank_zero(lambda: _inherited(config, source, tables))
    rows = _row_counter(inputs, inherited)
    facts = _learned(inputs, source, tables, inherited, rows)
    kept_rows = world.from_rank_zero(lambda: _kept_rows(pruned, inherited, goes_on))
    facts = replace(facts, kept_rows=kept_rows)
    if goes_on:
        world.from_rank_zero(lambda: _compare_files(tables, facts))
    sized = {name: replace(table, num_embeddings=_num_rows(name, table, facts)) for name, table in tables.items()}
    config = replace(config, tables={**config.tables, **sized})
    learned = inputs.learned(config, facts)
    if rows is not None:
        facts = learned.facts = _with_row_counts(learned, facts, rows)
    # A resumed run keeps its files as they are, since its checkpoints hold their checksums.
    new = Facts(row_counts=facts.row_counts if rows else {}) if goes_on else facts
    world.from_rank_zero(lambda: new.save(run_dir / FACTS))
    learned.facts = replace(facts, unseen_runs={})  # only the next run needs them, and reads them from the file
    give_unused_back()  # frees the memory of counting, which is done only once
    return learned


def _check_ids(inputs: Inputs, source: Source) -> None:
    """Refuse ids that are numbers here and were texts in the run whose tables are loaded, or the reverse."""
    there = kept_schema(footers_of(source.path) / "train.footers")
    here = {dataset.key: dataset.schema for dataset in inputs.datasets.values()}
    check_types(inputs.config, {**here, f"data.train of '{source.path}', which train.init_from takes": there})


def _row_counter(inputs: Inputs, inherited: Facts) -> RowCounter | None:
    """Return a counter of the table rows whose shares the model needs; None if it needs none, or they are inherited."""
    config, feature = inputs.config, inputs.config.model.needs().log_shares_of
    if feature is None or feature in inherited.row_counts or "train" not in inputs.datasets:
        return None
    table = table_of_feature(config, feature)
    is_mapped = table.mapping is not IdMappingType.vocabulary and table.kept_rows is None
    return RowCounter(inputs.id_column(feature), is_mapped)


def _with_row_counts(inputs: Inputs, facts: Facts, rows: RowCounter) -> Facts:
    """Return the facts with row counts of all ranks; the inputs must have the final mappings."""
    feature = inputs.config.model.needs().log_shares_of or ""
    size = table_of_feature(inputs.config, feature).num_embeddings
    own, num_ids = rows.counts(inputs.id_column(feature), size)
    counts = inputs.world.sum(torch.from_numpy(own)).numpy()
    num_counted = {**facts.num_counted, counts_of(feature): num_ids}
    return replace(facts, row_counts={feature: counts}, num_counted=num_counted)


def facts_entries(facts: Facts | None, run_dir: Path) -> dict[str, tuple[int, str]]:
    """Return size and checksum of the files of RUN/vocabulary by name, for checkpoints."""
    return {name: entry_of(run_dir / FACTS / name) for name in (facts.files() if facts else ())}


def _learned(
    inputs: Inputs, source: Source | None, tables: dict[str, TableConfig], inherited: Facts, rows: RowCounter | None
) -> Facts:
    """Return the inherited facts, and those measured on the training data or read from files."""
    config, world = inputs.config, inputs.world
    goes_on = source is not None and source.goes_on
    given = {} if goes_on else world.from_rank_zero(lambda: _given(tables, inherited, source))
    grows = source is not None and source.grows
    to_count = [name for name in tables if name not in given and (grows or name not in inherited.vocabularies)]
    known = {**inherited.vocabularies, **given}
    requests = {name: _request(config, name, inherited, to_count, known) for name in to_count}
    columns = [
        float_column(name, config.features[name], column_of(config, name), None)
        for name in with_figures(config)
        if name not in inherited.floats
    ]
    measured = Facts()
    if requests or columns or rows:
        measured = measure(inputs.datasets["train"], requests, columns, world, rows)
    vocabularies = {**inherited.vocabularies, **given, **measured.vocabularies}
    unseen_runs = {**inherited.unseen_runs, **measured.unseen_runs}
    kept = {} if goes_on else _kept_ids(config, inherited, vocabularies, measured)
    _warn_of_files(config, {name: kept[name] for name in given if grows and name in kept}, vocabularies)
    floats = {**inherited.floats, **measured.floats}
    return Facts(vocabularies, floats, inherited.row_counts, measured.num_counted, unseen_runs, kept)


def _kept_ids(
    config: Config, inherited: Facts, vocabularies: dict[str, pa.Array], measured: Facts
) -> dict[str, KeptIds]:
    """Return the vocabulary ids of each table whose weights are inherited, and log how many there are."""
    kept, overflowing = {}, deciding_tables(config)  # these hand ids that do not fit to the next expert
    for name, before in inherited.vocabularies.items():
        table = config.tables[name]
        kept[name] = measured.kept.get(name) or KeptIds(len(before))
        evicted = len(kept[name].evicted)
        stay, new = len(before) - evicted, len(vocabularies[name]) - len(before) + evicted
        room = table.num_embeddings - 1 - table.num_buckets - stay
        where = f", {evicted} of them in rows of evicted ids" if evicted else ""
        logger.info(
            "table %s: ids that keep their rows: %d, new ones: %d%s; num_embeddings allows %d new ones",
            name,
            stay,
            new,
            where,
            room,
        )
        if kept[name].num_left_out and name not in overflowing:
            text = "table %s is full: new ids that share the rows of num_buckets: %d; %s"
            logger.warning(text, name, kept[name].num_left_out, _more_room(name, config.train.init.evict_after_runs))
    return kept


def _more_room(table: str, evict_after: int | None) -> str:
    """Return advice on how to give more new ids rows of their own."""
    key = "train.init.evict_after_runs"
    other = "" if evict_after == 1 else f", or lower {key}={evict_after}"
    if evict_after is None:
        other = f", or set {key}, so that ids that no longer occur give their rows to new ones"
    return f"raise tables.{table}.num_embeddings{other}"


def _warn_of_files(config: Config, kept: dict[str, KeptIds], vocabularies: dict[str, pa.Array]) -> None:
    """Warn of files of ids that prevent growing tables from growing, or ids from being evicted."""
    for name, ids in kept.items():
        key = f"tables.{name}.vocabulary"
        if len(vocabularies[name]) == ids.num_ids:
            what = "names no new ids"
        elif config.train.init.evict_after_runs is not None:
            what = "says which ids there are, of which train.init.evict_after_runs evicts none"
        else:
            continue
        text = "'%s', the file of %s, %s; set %s=null to take those of data.train"
        logger.warning(text, config.tables[name].vocabulary, key, what, key)


def _inherited(config: Config, source: Source, tables: Iterable[str]) -> Facts:
    """Return the facts that go with the tensors loaded from a checkpoint."""
    floats, marker, init = with_figures(config), source.marker, source.init
    counted = [name for name in id_features(config) if _counts_file(name) in marker.facts]
    pruned = [name for name, table in config.tables.items() if table.kept_rows is not None]
    if init is not None:
        here, there = meaning(config), marker.meaning
        differing = [key for key in {**here, **there} if here.get(key) != there.get(key)]
        # Only of features: a table, a layer or an optimizer may have the name of a feature.
        changed = {key.split(".")[1] for key in differing if key.startswith("features.")}
        floats = [name for name in floats if name not in changed and init.dense is not Take.none]
        saved = marker.facts if init.tables is not Take.none else ()
        tables = [name for name in tables if vocabulary_file(name) in saved]
        pruned = [name for name in pruned if kept_rows_file(name) in saved]
        counted = []
    names = [*map(vocabulary_file, tables), *([FLOATS_FILE] if floats else []), *map(_counts_file, counted)]
    check_facts(source.path, marker, [*names, *map(kept_rows_file, pruned)])
    facts = Facts.load(facts_of(source.path), list(tables), floats, counted, pruned)
    return facts if source.goes_on else replace(facts, unseen_runs=unseen_runs_of(facts_of(source.path), tables))


def _kept_rows(pruned: dict[str, TableConfig], inherited: Facts, goes_on: bool) -> dict[str, KeptRows]:
    """Return the kept rows of pruned tables: those inherited with weights, else those of files."""
    kept_rows = {}
    for name, table in pruned.items():
        before, key = inherited.kept_rows.get(name), f"config key 'tables.{name}.kept_rows'"
        kept = kept_rows[name] = before or KeptRows.read(Path(table.kept_rows or ""))
        is_other = not goes_on and before is not None and Path(table.kept_rows or "").is_file()
        if is_other and not KeptRows.read(Path(table.kept_rows or "")).kept.equals(kept.kept):
            raise UserError(f"{key}: '{table.kept_rows}' lists other rows than those of the loaded weights; drop it")
        if table.num_embeddings != kept.num_rows:
            raise UserError(
                f"config key 'tables.{name}.num_embeddings' is {table.num_embeddings:,}, but tables.{name}.kept_rows "
                f"keeps {kept.num_rows - 1:,} rows, and all other ids share one more; set it to {kept.num_rows}"
            )
    return kept_rows


def _counts_file(feature: str) -> str:
    return vocabulary_file(counts_of(feature))


def _given(tables: dict[str, TableConfig], inherited: Facts, source: Source | None) -> dict[str, pa.Array]:
    """Return the vocabularies of files named by the config, appended to the ids inherited from the source."""
    vocabularies = {}
    for name, table in tables.items():
        if table.vocabulary is None:
            continue
        ids, before = read_vocabulary(Path(table.vocabulary)), inherited.vocabularies.get(name)
        if before is None or source is None:
            vocabularies[name] = ids
            continue
        try:
            new = ids.filter(pa.array(is_new(ids, before)))
            whole = joined(before, new)
        except UserError as error:
            raise error.within(
                f"config key 'tables.{name}.vocabulary': the ids of '{table.vocabulary}' and those of '{source.path}'"
            ) from error
        if not source.grows and not ids.equals(before):
            raise UserError(
                f"config key 'tables.{name}.vocabulary': '{table.vocabulary}' is not the vocabulary of the rows of "
                f"'{source.path}' ({len(ids):,} ids, {len(new):,} of them not among its {len(before):,}); drop the "
                f"key, or give its new ids new rows with train.init.grow_vocabularies=true"
            )
        vocabularies[name] = whole
    return vocabularies


def _compare_files(tables: dict[str, TableConfig], facts: Facts) -> None:
    """Warn of vocabulary files that differ from the vocabulary that a resumed run uses."""
    for name, table in tables.items():
        path = Path(table.vocabulary or "")
        if path.is_file() and not read_vocabulary(path).equals(facts.vocabularies[name]):
            logger.warning("table %s: '%s' now lists other ids; the run continues with its own copy", name, path)


def _num_rows(name: str, table: TableConfig, facts: Facts) -> int:
    num_ids = len(facts.vocabularies[name])
    rows = 1 + num_ids + table.num_buckets
    if rows > table.num_embeddings:
        raise UserError(
            f"config key 'tables.{name}.num_embeddings' is {table.num_embeddings:,}, but the vocabulary has "
            f"{num_ids:,} ids, which with null and num_buckets={table.num_buckets} need {rows:,} rows; set it to {rows}"
        )
    return rows


def _request(
    config: Config, table: str, inherited: Facts, to_count: Sequence[str], known: dict[str, pa.Array]
) -> VocabularyRequest:
    features = [name for name in role_features(config, "train") if config.features[name].table == table]
    settings = config.tables[table]
    columns = tuple(dict.fromkeys(column_of(config, name) for name in features))
    # With experts by frequency, each has the ids that no expert before it has.
    _, experts = experts_with(config, table) or (None, [table])
    after = tuple(name for name in experts[: experts.index(table)] if name in to_count)
    taken = tuple(known[name] for name in experts if name in known and name != table)
    room = settings.num_embeddings - 1 - settings.num_buckets
    return VocabularyRequest(
        columns,
        min_count=settings.min_count,
        max_size=room,
        known=inherited.vocabularies.get(table),
        unseen_runs=inherited.unseen_runs.get(table, np.zeros(0, np.int32)),
        evict_after=config.train.init.evict_after_runs,
        after=after,
        taken=taken,
    )
