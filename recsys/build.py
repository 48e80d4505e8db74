"""From a config to datasets, loaders, and the sharded model with its optimizers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from recsys.checkpoint import Tensors
from recsys.config import Config, DLRMConfig, FeatureType, TwoTowerConfig
from recsys.data.collate import BatchSpec, FloatColumn, IdColumn, convert
from recsys.data.counts import count_ids
from recsys.data.loader import Loader, LoaderOptions
from recsys.data.order import Segment
from recsys.data.parquet import Dataset, SegmentReader, open_dataset, read_column, read_head
from recsys.distributed import (
    for_each_local_shard,
    plan_tables,
    shard_model,
    table_optimizer_tensors,
    table_tensors,
)
from recsys.errors import UserError
from recsys.id_mapping import IndexMapping, build_mapping, is_text
from recsys.models import DLRM, RankingTask, RetrievalTask, Task, TrainStep, TwoTower
from recsys.optim import attach_table_optimizer, build_dense_optimizer
from recsys.process_group import World
from recsys.tables import build_embeddings, fill_initial, float_features, id_features, init_range

ROLES = ("train", "valid", "test", "items")


def open_datasets(config: Config, world: World) -> dict[str, Dataset]:
    """Read the footers and the first rows of all datasets of the config, on rank 0 for all ranks.

    Raises:
        UserError: on every rank, for files or columns that are missing or do not fit.
    """
    wanted = {role: getattr(config.data, role) for role in ROLES}

    def read() -> dict[str, Dataset]:
        datasets = {
            role: open_dataset(f"data.{role}", paths, _needed_columns(config, role), config.data.max_rows)
            for role, paths in wanted.items()
            if paths is not None
        }
        _check_types(config, datasets)
        _check_first_rows(config, datasets)
        return datasets

    return world.from_rank_zero(read)


def _check_types(config: Config, datasets: dict[str, Dataset]) -> None:
    """Refuse a table whose ids are integers in one column and strings in another: they hash to different rows."""
    for table in config.tables:
        kinds: dict[str, pa.DataType] = {}  # of the ids; of a list or dictionary, its values
        for name in id_features(config):
            if config.features[name].table != table:
                continue
            column = _column(config, name)
            for role, dataset in datasets.items():
                if column in dataset.columns:
                    kind = dataset.schema.field(column).type
                    if name == getattr(config.model, "item_id", None) and pa.types.is_nested(kind):
                        raise UserError(
                            f"config key 'model.item_id': column '{column}' of data.{role} is {kind}, not one id a row"
                        )
                    kinds[f"'{column}' of data.{role}"] = getattr(kind, "value_type", kind)
        known = {place: kind for place, kind in kinds.items() if not pa.types.is_null(kind)}
        texts = [place for place, kind in known.items() if is_text(kind)]
        numbers = [place for place in known if place not in texts]
        if texts and numbers:
            raise UserError(
                f"config key 'tables.{table}': its ids are {known[texts[0]]} in column {texts[0]} and "
                f"{known[numbers[0]]} in column {numbers[0]}; write both with one type (a list: "
                f"scripts/prepare_data.py csv --list 'NAME=SEPARATOR:int64')"
            )


def _check_first_rows(config: Config, datasets: dict[str, Dataset]) -> None:
    """Convert some rows of every dataset, so that what ends in an error there does so before training."""
    corpus = read_corpus(config, datasets["items"]) if "items" in datasets else None
    for role, dataset in datasets.items():
        spec = batch_spec(config, role, corpus)
        try:
            columns = convert(read_head(dataset, 1000), spec)
        except UserError as error:
            raise UserError(f"config key 'data.{role}': {error} (in {dataset.row_groups[0].path})") from error
        if spec.weight is not None:
            _check_weights(dataset, spec.weight.column or "")
        for part, found in zip(spec.lists, columns.lists, strict=True):
            if part.name == "targets" and not (found.values >= 0).any():
                raise UserError(
                    f"config key 'data.{role}': column '{part.column}' has in its first {columns.num_rows} rows no id "
                    f"that is in column '{_column(config, config.model.item_id)}' of data.items"
                )


def _check_weights(dataset: Dataset, column: str) -> None:
    reader = SegmentReader([column])
    for group in dataset.row_groups:  # the first one ends the search, as a rule
        weights = reader.read(Segment(group.path, group.index, 0, group.num_rows)).column(column)
        if pa.compute.any(pa.compute.greater(weights, 0)).as_py():
            return
    raise UserError(
        f"config key '{dataset.key}': column '{column}' (data.weight_column) is 0 in every row, so nothing counts"
    )


def _role_features(config: Config, role: str) -> list[str]:
    """Return the features that a dataset of this role has columns for; the others stay empty in its batches."""
    if isinstance(config.model, TwoTowerConfig):
        if role == "items":
            return list(config.model.item_features)
        if role in ("valid", "test"):
            return list(config.model.user_features)
    return list(config.features)


def _role_lists(config: Config, role: str) -> dict[str, tuple[str, str]]:
    """Return name → (column, config key) of the lists of corpus positions that evaluation needs."""
    if not isinstance(config.model, TwoTowerConfig):
        return {}
    if role == "items":
        return {"position": (_column(config, config.model.item_id), f"features.{config.model.item_id}.column")}
    if role in ("valid", "test"):
        lists = {"targets": (config.data.targets_column, "data.targets_column")}
        if config.data.seen_column is not None:
            lists["seen"] = (config.data.seen_column, "data.seen_column")
        return lists
    return {}


def _has_label(config: Config, role: str) -> bool:
    return role == "train" or isinstance(config.model, DLRMConfig)


def _column(config: Config, feature: str) -> str:
    return config.features[feature].column or feature


def _needed_columns(config: Config, role: str) -> dict[str, str]:
    needed = {_column(config, name): f"config key 'features.{name}'" for name in _role_features(config, role)}
    needed |= {column: f"config key '{key}'" for column, key in _role_lists(config, role).values()}
    if _has_label(config, role):
        for key in ("label_column", "weight_column"):
            column = getattr(config.data, key)
            if column is not None:
                needed[column] = f"config key 'data.{key}'"
    return needed


def batch_spec(config: Config, role: str, corpus: pa.Array | None = None) -> BatchSpec:
    """Return what the batches of a dataset are made of.

    Args:
        corpus: raw ids of all items, in the order of their positions; needed by retrieval's evaluation.
    """
    present = set(_role_features(config, role))
    ids = []
    for name in id_features(config):
        feature = config.features[name]
        assert feature.table is not None
        mapping = build_mapping(config.tables[feature.table])
        column = _column(config, name) if name in present else None
        ids.append(IdColumn(name, column, mapping, feature.nulls, feature.max_length))
    floats = [
        FloatColumn(name, _column(config, name) if name in present else None, config.features[name].fill)
        for name in float_features(config)
    ]
    lists = []
    for name, (column, _) in _role_lists(config, role).items():
        assert corpus is not None
        lists.append(IdColumn(name, column, IndexMapping(corpus)))
    label = weight = None
    if _has_label(config, role):
        data = config.data
        label = FloatColumn("data.label_column", data.label_column, None, binary=True) if data.label_column else None
        weight = FloatColumn("data.weight_column", data.weight_column, None) if data.weight_column else None
    return BatchSpec(ids, floats, label, weight, lists)


def build_loader(config: Config, dataset: Dataset, role: str, world: World, corpus: pa.Array | None = None) -> Loader:
    """Return this rank's loader of a dataset: shuffled for training, in file order otherwise."""
    train = role == "train"
    size = config.train.global_batch_size if train else config.train.eval_batch_size
    options = LoaderOptions(
        seed=config.seed,
        shuffle=train and config.data.shuffle,
        num_streams=config.data.num_streams,
        window_bytes=config.data.window_mib << 20,
        num_threads=config.data.num_threads,
        prefetch_batches=config.data.prefetch_batches,
        pin_device=world.device if world.device.type == "cuda" else None,
    )
    spec = batch_spec(config, role, corpus)
    return Loader(dataset, spec, options, size or config.train.global_batch_size, world.rank, world.world_size)


def read_corpus(config: Config, items: Dataset) -> pa.Array:
    """Return the raw ids of all items, in file order.

    Raises:
        UserError: an id is null, or there twice.
    """
    column = _column(config, config.model.item_id)
    ids = read_column(items, column)
    if ids.null_count:
        raise UserError(
            f"config key 'data.items': column '{column}' holds {ids.null_count} nulls, and may hold none; drop these"
        )
    counts = ids.value_counts()
    twice = counts.filter(pa.compute.greater(counts.field("counts"), 1))
    if len(twice):
        raise UserError(
            f"config key 'data.items': item {twice[0]['values']} is there {twice[0]['counts']} times; "
            f"every item must be there once"
        )
    return ids


@dataclass
class Built:
    """The sharded model and what trains it."""

    model: DistributedModelParallel
    plan: ShardingPlan
    dense_optimizer: torch.optim.Optimizer
    tensors: Tensors

    @property
    def step(self) -> Any:
        return self.model.module

    @property
    def dense_model(self) -> torch.nn.Module:
        return self.step.dense.task.model


def build_model(config: Config, datasets: dict[str, Dataset], world: World) -> Built:
    """Build, plan, shard and initialise the model of the config; the same weights under every plan."""
    torch.manual_seed(config.seed)
    task = _build_task(config, lambda: _log_q(config, datasets["train"], world))
    embeddings = build_embeddings(config)
    attach_table_optimizer(embeddings.parameters(), config.optimizer)
    step = TrainStep(embeddings, task, config.seed)
    plan = plan_tables(step, config, world)
    model = shard_model(step, plan, world)

    def fill(table: str, shard: torch.Tensor, offsets: tuple[int, ...]) -> None:
        fill_initial(shard, offsets[0], offsets[1], config.seed, table, init_range(config.tables[table]))

    for_each_local_shard(table_tensors(model), fill)
    optimizer = build_dense_optimizer(task.model, config.optimizer)
    tensors = Tensors(
        tables=lambda: table_tensors(model),
        table_optimizer=lambda: table_optimizer_tensors(model),
        dense=task.model,
        dense_optimizer=optimizer,
    )
    return Built(model, plan, optimizer, tensors)


def _build_task(config: Config, log_q: Callable[[], torch.Tensor]) -> Task:
    dims = {name: _dim(config, name) for name in id_features(config)}
    floats = float_features(config)
    if isinstance(config.model, TwoTowerConfig):
        correction = log_q() if config.model.logq_correction else None
        model = TwoTower(config.model, dims, floats)
        return RetrievalTask(model, config.model.item_id, config.model.temperature, correction)
    return RankingTask(DLRM(config.model, list(dims), len(floats), next(iter(dims.values()))))


def _dim(config: Config, feature: str) -> int:
    assert config.features[feature].type is FeatureType.id
    return config.tables[config.features[feature].table or ""].embedding_dim


def _log_q(config: Config, train: Dataset, world: World) -> torch.Tensor:
    """Return the log of each item row's share of the training rows, [num_embeddings] float32."""
    spec = batch_spec(config, "train")
    part = next(part for part in spec.ids if part.name == config.model.item_id)
    size = config.tables[config.features[part.name].table or ""].num_embeddings
    mine = world.agree(lambda: count_ids(train, part, size, world.rank, world.world_size))
    counts = world.sum(torch.from_numpy(mine)).numpy()
    share = np.maximum(counts, 1) / max(1, counts.sum())
    return torch.from_numpy(np.log(share).astype(np.float32))
