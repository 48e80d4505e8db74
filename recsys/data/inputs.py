"""The datasets of a run, opened by its config, with their loaders and the facts that a model needs."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from recsys.config import Config, IdMappingType, NullPolicy
from recsys.config.features import float_features, id_features
from recsys.data.batch import MicroBatches
from recsys.data.checks import check_types, check_weights
from recsys.data.convert import convert_ids
from recsys.data.corpus import index_of_items, read_corpus
from recsys.data.dataset import Dataset
from recsys.data.facts import Facts
from recsys.data.footer_cache import kept_schema
from recsys.data.label_checks import check_known
from recsys.data.loader import Loader, LoaderOptions
from recsys.data.negatives import ItemSampler
from recsys.data.parquet import open_dataset, read_head, with_made
from recsys.data.permutation import Permutation
from recsys.data.spec import BatchSpec, FloatColumn, IdColumn
from recsys.data.wanted import (
    column_of,
    float_column,
    has_labels,
    hidden_rows,
    item_column,
    label_column,
    made_columns,
    needed_columns,
    of_row_filter,
    read_features,
    role_lists,
    row_filter,
    taught_columns,
)
from recsys.data.window import Ragged, convert_table
from recsys.errors import UserError
from recsys.ids import HashMapping, IdMapping, IdStatistics, build_mapping, build_routes
from recsys.runtime.files import copy_files
from recsys.runtime.threads import batches_ahead, decode_in_processes, decoding_threads
from recsys.runtime.world import World

ROLES = ("train", "valid", "test", "items")


@dataclass(frozen=True)
class Given:
    """Rows to be scored, named by a command instead of the config.

    Attributes:
        role: `rows` with all features; of a retrieval model `users`, `queries` (users without lists of items), `items`.
        paths, filter, max_rows: like data.test, data.filter and data.max_rows.
        kept: columns that are wanted as they are in the files, read by the model or not; None: ids that it reads.
        asks, key: what messages name as the source of `kept` and of `paths`.
    """

    role: str
    paths: str | list[str]
    kept: Sequence[str] | None = None
    filter: str | None = None
    asks: str = "--keep"
    key: str = "DATA"
    max_rows: int | None = None


class Inputs:
    """The datasets of a config, with loaders for them.

    Args:
        corpus: raw ids of all items in the order of their positions, for a retrieval model with `data.items`.

    Attributes:
        facts: what was measured on data.train; None before that, when only types and values are checked.
        statistics: by feature, what this rank has counted about the ids of data.train.
    """

    def __init__(self, config: Config, datasets: dict[str, Dataset], corpus: pa.Array | None, world: World) -> None:
        self.datasets, self.corpus, self.world = datasets, corpus, world
        # Made once for all roles, because an index of many ids takes time and memory.
        self._positions = None if corpus is None else index_of_items(config, datasets["items"], corpus)
        self._set(config, None)

    def _set(self, config: Config, facts: Facts | None) -> None:
        self.config, self.facts = config, facts
        self._mappings = {table: _mapping(config, table, facts) for table in config.tables}
        self._routes = build_routes(config.tables, self._mappings)
        self.statistics = {name: IdStatistics() for name in id_features(config)}

    def learned(self, config: Config, facts: Facts) -> "Inputs":
        """Return inputs with facts of the data and a config that follows them; both share the index of items."""
        other = copy(self)
        other._set(config, facts)
        return other

    def beside(self, known: Path, roles: Sequence[str] = (), given: Sequence[Given] = ()) -> "Inputs":
        """Return inputs that have further datasets, and share mappings and facts with these; collective.

        Arguments and errors are those of `open_inputs`.
        """
        return self._with(
            *self.world.from_rank_zero(lambda: _read(self.config, self.world, None, known, roles, given, self))
        )

    def _with(self, datasets: dict[str, Dataset], corpus: pa.Array | None) -> "Inputs":
        other = copy(self)
        other.datasets = self.datasets | datasets
        if corpus is not None:
            other.corpus, other._positions = corpus, index_of_items(self.config, datasets["items"], corpus)
        return other

    def loader(self, role: str, dataset: Dataset | None = None, permutation: Permutation | None = None) -> Loader:
        """Return this rank's loader of a role, or of a part of its dataset: shuffled for train, else in file order."""
        config, world, train = self.config, self.world, role == "train"
        threads = decoding_threads(config.data.num_threads, world.device, world.local_world_size)
        options = LoaderOptions(
            seed=config.seed,
            shuffle=train and config.data.shuffle,
            num_streams=config.data.num_streams,
            window_bytes=config.data.window_mib << 20,
            num_threads=threads,
            processes=train and decode_in_processes(config.data.processes, threads, world.device),
            prefetch_batches=batches_ahead(config.data.prefetch_batches, world.device),
            pin_device=world.device if world.device.type == "cuda" else None,
            drop_last=train and config.data.drop_last,
            skip_bad=train and config.data.max_bad_rows > 0,
            micro_batches=MicroBatches(config.train.micro_batch_size, config.train.micro_batch_ids),
        )
        size = (None if train else config.train.eval_batch_size) or config.train.global_batch_size
        dataset, sampler, number = dataset or self.datasets[role], None, config.model.needs().sampled_items
        if train and number:
            items, shares = self.datasets["items"], self.item_shares()[1]
            sampler = ItemSampler(items, self.spec("items"), shares, number, config.seed, world)
        return Loader(dataset, self.spec(role), options, size, world.rank, world.world_size, sampler, permutation)

    def item_shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the table rows of all items, int64 [items], and their shares in what is drawn, float64 [items]."""
        needs = self.config.model.needs()
        rows = convert_ids(self.corpus, self.id_column(needs.item_id or ""), np.dtype(np.int64)).values
        items_of_row = np.bincount(rows)  # items with the same row share its count
        counts = items_of_row if self.facts is None else self.facts.row_counts.get(needs.item_id or "", items_of_row)
        weights = np.maximum(counts[rows] / items_of_row[rows], 1.0) ** needs.sampling_power
        return rows, weights / weights.sum()

    def spec(self, role: str) -> BatchSpec:
        """Return the spec of a role's batches: their columns, and how these are converted."""
        config, present = self.config, set(read_features(self.config, role))
        ids = [self._id_column(name, role, name in present) for name in id_features(config)]
        # If bad steps are allowed, numbers that are not finite pass, and the step that gets them is the bad one.
        finite = role != "train" or config.train.max_bad_steps == 0
        columns = {name: column_of(config, name) for name in present}
        floats = [
            float_column(name, config.features[name], columns.get(name), self.facts, finite)
            for name in float_features(config)
        ]
        lists = []
        for name, (column, _) in role_lists(config, role).items():
            assert self._positions is not None
            lists.append(IdColumn(name, column, self._positions, NullPolicy.empty))  # since a null is not an item
        labels, weight, weight_column = [], None, config.data.weight_column
        if has_labels(config, role):
            schema = self.datasets[role].schema if role in self.datasets else None
            labels = [label_column(config, name, finite, schema) for name in config.labels()]
            labels += taught_columns(config, finite, role)
            if weight_column is not None:
                weight = FloatColumn("data.weight_column", weight_column, fill=None, finite=finite)
        negative_weight = 1 / (config.data.keep_negatives or 1.0) if role == "train" else 1.0
        return BatchSpec(ids, floats, labels, weight, lists, negative_weight)

    def id_column(self, feature: str) -> IdColumn:
        """Return how an id feature of data.train becomes table rows, without counting ids in `statistics`."""
        return replace(self._id_column(feature, "train", True), statistics=None)

    def _id_column(self, name: str, role: str, is_present: bool) -> IdColumn:
        feature, column = self.config.features[name], column_of(self.config, name)
        mapping, hidden = self._mappings[feature.table or ""], hidden_rows(self.config, name)
        if not is_present:
            return IdColumn(name, None, mapping, feature.nulls, hidden=hidden)
        return IdColumn(
            name,
            column,
            mapping,
            null=feature.nulls,
            max_length=feature.max_length,
            keep=feature.keep,
            weights=feature.weights,
            boundaries=None if feature.boundaries is None else tuple(feature.boundaries),
            statistics=self.statistics[name] if role == "train" else None,
            route=self._routes.get(feature.table or ""),
            hidden=hidden,
            file_of_floats=self.datasets[role].file_of_floats(column) if role in self.datasets else None,
        )

    def mapping(self, table: str) -> IdMapping:
        """Return the mapping from the ids of a table to its rows."""
        return self._mappings[table]

    def id_report(self, num_rows: int) -> dict[str, dict[str, object]]:
        """Return for each id feature what the trained rows held, over all ranks: see `IdStatistics.summary`."""
        report = {}
        for name, statistics in self.statistics.items():
            total = IdStatistics()
            for state in self.world.gather(statistics.state()):  # one at a time, since all would take much memory
                total.add_state(state)
            report[name] = total.summary(self._mappings[self.config.features[name].table or ""], num_rows)
        return report


def open_inputs(
    config: Config,
    world: World,
    cache: Path | None = None,
    known: Path | None = None,
    roles: Sequence[str] = ROLES,
    given: Sequence[Given] = (),
) -> Inputs:
    """Read the footers and the first rows of the config's datasets, on rank 0 for all ranks.

    Args:
        cache: folder in which to keep what the footers say, so that they need not be read again.
        known: such a folder of an earlier start, which may not exist.
        roles: the datasets to open; without train, their ids must have the types that data.train had in `known`.
        given: further rows, each with a role of its own; their `kept` columns are not in batches.

    Raises:
        UserError: on every rank, for files or columns that are missing or do not fit.
    """
    return Inputs(config, *world.from_rank_zero(lambda: _read(config, world, cache, known, roles, given)), world)


def _read(
    config: Config,
    world: World,
    cache: Path | None,
    known: Path | None,
    roles: Sequence[str],
    given: Sequence[Given],
    beside: Inputs | None = None,
) -> tuple[dict[str, Dataset], pa.Array | None]:
    """Return the datasets by role, and the corpus, on one rank; their types must also fit the datasets of `beside`.

    Other arguments and errors are those of `open_inputs`.
    """
    data = config.data
    if cache is not None and known is not None:
        copy_files(known, cache)
    train = kept_schema(known / "train.footers") if known is not None and "train" not in roles else pa.schema([])
    datasets: dict[str, Dataset] = {}
    for role in (role for role in roles if getattr(data, role) is not None):
        with of_row_filter(config, role):
            datasets[role] = open_dataset(
                f"data.{role}",
                getattr(data, role),
                needed_columns(config, role),
                data.max_rows,
                row_filter(config, role),
                data,
                cache=cache and cache / f"{role}.footers",
                like=train,
            )
        train = datasets[role].schema if role == "train" else train
    datasets |= {rows.role: _opened(config, rows, train) for rows in given}
    datasets = {role: with_made(dataset, made_columns(config, role)) for role, dataset in datasets.items()}
    together = {**(beside.datasets if beside else {}), **datasets}
    schemas = {"data.train": train} | {dataset.key: dataset.schema for dataset in together.values()}
    check_types(config, schemas)
    datasets = {role: dataset.with_lists(schemas.values()) for role, dataset in datasets.items()}
    if "train" in datasets:
        _check_rows(config, datasets["train"])
    corpus = read_corpus(config, datasets["items"]) if "items" in datasets else None
    inputs = beside._with(datasets, corpus) if beside else Inputs(config, datasets, corpus, world)
    for role in datasets:
        _check_first_rows(inputs, role)
    return datasets, corpus


def _opened(config: Config, rows: Given, like: pa.Schema) -> Dataset:
    needed = needed_columns(config, rows.role)
    columns = {**dict.fromkeys(rows.kept or (), rows.asks), **needed}
    opened = open_dataset(rows.key, rows.paths, columns, rows.max_rows, rows.filter, config.data, like=like)
    return replace(opened, columns=tuple(needed))


def _check_rows(config: Config, train: Dataset) -> None:
    if config.data.drop_last and train.num_rows < config.train.global_batch_size:
        raise UserError(
            f"config key 'data.drop_last' leaves out all {train.num_rows:,} rows of data.train, too few for a batch of "
            f"train.global_batch_size={config.train.global_batch_size}; set it to false, or make batches smaller"
        )


def _check_first_rows(inputs: Inputs, role: str) -> None:
    """Convert some rows of a dataset, so that errors of conversion come before training."""
    config, dataset, spec = inputs.config, inputs.datasets[role], inputs.spec(role)
    try:
        columns = convert_table(read_head(dataset, 1000), spec)
    except UserError as error:
        raise UserError(f"config key '{dataset.key}': {error} (in {dataset.head.path})") from error
    if spec.weight is not None:
        check_weights(dataset, spec.weight)
    for label in spec.labels if role == "train" else ():
        check_known(dataset, label)
    for part, targets in zip(spec.lists, columns.lists, strict=True):
        if part.name != "targets":
            continue
        positions = targets.values if isinstance(targets, Ragged) else columns.scalars[targets]
        if len(positions) and (positions < 0).all():
            raise UserError(
                f"config key '{dataset.key}': column '{part.column}' shares no id of its first {columns.num_rows} rows "
                f"with column '{item_column(config)}' of data.items, so that no target can be found; name the column "
                f"that has such ids as data.targets_column, or add the items"
            )


def _mapping(config: Config, table: str, facts: Facts | None) -> IdMapping:
    settings = config.tables[table]
    if facts is None and (settings.mapping is IdMappingType.vocabulary or settings.kept_rows is not None):
        return HashMapping(settings.num_embeddings, settings.hash_seed)  # for checks: it accepts the same ids
    return build_mapping(settings, *((None, None) if facts is None else facts.of_table(table)))
