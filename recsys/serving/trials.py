"""Trials of compressions of a finished run, in memory: its metrics with quantised vectors, pruned rows and neurons."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from recsys.config import Config, IdMappingType, TableConfig
from recsys.config.choices import UNPOOLED, ComputeKernel, RowCode, ShardingChoice
from recsys.config.features import id_features
from recsys.data.facts import Facts, RowCounter, measure
from recsys.data.wanted import role_features
from recsys.errors import UserError
from recsys.ids import NULL_ROW
from recsys.models.label_metrics import LabelEvaluator
from recsys.models.metrics import RetrievalEvaluator, is_higher_better
from recsys.runtime.logs import logger, show_metrics
from recsys.runtime.world import World
from recsys.serving.finished import Finished, OpenRun
from recsys.serving.importance import importances, neuron_importances
from recsys.serving.neurons import hidden_layers, hide_neurons, without_neurons
from recsys.step.int8 import is_rounded
from recsys.tables.module_names import parameter_name
from recsys.tables.row_codes import row_bytes
from recsys.tables.spec import local_shards
from recsys.tables.updates import table_tensors
from recsys.training.evaluation import evaluate_dataset, evaluator_of, metrics_of

_MARGIN = 1.645 * 2**0.5  # standard errors: 95 % of the differences between two data sets are below this many
_ROWS_AT_ONCE = 1 << 16  # rows of a table that are converted to FP32 at a time


@dataclass(frozen=True)
class Pruning:
    """Rows of a table that are kept, and the vector that the others share.

    Attributes:
        kept: bool [rows]; True for the null row, False for rows that were shared before.
        weights: float32 [rows], of rows that are not kept, in their shared vector; they add up to 1.
        num_shared: number of rows with this vector after pruning.
    """

    kept: torch.Tensor
    weights: torch.Tensor
    num_shared: int

    @property
    def num_rows(self) -> int:
        """Rows of the table after pruning."""
        return int(self.kept.sum()) + self.num_shared


@dataclass(frozen=True)
class Compression:
    """Compression of a run.

    Attributes:
        codes: of vectors, by table. pruned: prunings of rows, by table.
        neurons: kept neurons of `Trials.layers`, bool [width] by layer.
        dense_int8: whether linear layers of the dense part are in INT8.
    """

    codes: Mapping[str, RowCode] = field(default_factory=dict)
    pruned: Mapping[str, Pruning] = field(default_factory=dict)
    neurons: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dense_int8: bool = False


@dataclass(frozen=True)
class Loss:
    """Loss of the metric through a compression; a negative one is a gain.

    Attributes:
        value: on the data of the trials. at_most: upper bound for 95 % of other data sets of the same size and kind.
    """

    value: float
    at_most: float


@dataclass(frozen=True)
class Trial:
    """Result of a compression.

    Attributes:
        loss: of the metric, on the data of the trials.
        metrics: on the data of the trials. test: on data.test, if that is another dataset.
        seconds: taken to score the data of the trials.
        seen_bytes: of the rows of tables whose ids are in data.train. all_bytes: of all rows of tables.
        dense_bytes: of the dense part.
    """

    loss: Loss
    metrics: dict[str, float]
    test: dict[str, float] | None
    seconds: float
    seen_bytes: int
    all_bytes: int
    dense_bytes: int


def sharding_by_id(table: TableConfig) -> ShardingChoice:
    """Return how to split a table that is looked up id by id: as it is, if possible."""
    return table.sharding_type if table.sharding_type in UNPOOLED else ShardingChoice.auto


def looked_up_by_id(config: Config) -> Config:
    """Return a config in which all tables are looked up id by id, so that vectors can be quantised before pooling."""
    tables = {
        name: replace(table, quantize=table.quantize or RowCode.FP16, sharding_type=sharding_by_id(table))
        for name, table in config.tables.items()
    }
    return replace(config, tables=tables)


class Trials:
    """A finished run, opened to try compressions of its tables; collective.

    Args:
        metric: used to compare compressions. base: trials whose first result losses are relative to; default: the run
            itself.

    Attributes:
        role: of the data for the comparison: data.valid, or data.test without it.
        trained: the config that the run was trained with. config, facts: of the opened run. source: its checkpoint.
        counts: number of times that data.train holds each row, int64 [rows] by table.
        layers: of the dense part, whose neurons can be pruned.
        base: trial that losses are relative to.
    """

    def __init__(self, run: Finished, world: World, metric: str, base: "Trials | None" = None) -> None:
        roles = [role for role in ("valid", "test") if getattr(run.config.data, role) is not None]
        if not roles:
            raise UserError("there is nothing to compare compressions on; set data.valid or data.test")
        self.role, self._has_test = roles[0], len(roles) > 1
        in_order = run.in_order(world.world_size)  # so that two trials have the same rows in the same order
        opened = replace(in_order, config=looked_up_by_id(in_order.config))
        self._opened = OpenRun(opened, world, ["train", *roles, "items"])
        self.trained, self.config, self.source = run.trained, self._opened.inputs.config, self._opened.source
        self.facts = self._opened.inputs.facts or Facts()
        codes = {name: table.quantize for name, table in run.config.tables.items() if table.quantize is not None}
        self.given = Compression(codes, dense_int8=run.config.precision.dense_int8)
        self.metric, self.world = metric, world
        self._weights = table_tensors(self._opened.model)
        self._trained = {name: [self._copied(name, p) for p, _ in local_shards(w)] for name, w in self._weights.items()}
        model = self._opened.model.module.dense.model
        self.layers = hidden_layers(model, self.config.model)
        parts = {part for layer in self.layers.values() for part in (layer.own, layer.following)}
        self._dense = [(weights, weights.detach().clone()) for part in parts for weights in part.parameters()]
        self.counts = self._count()
        self._first: tuple[float, np.ndarray] | None = base._first if base else None
        self.base: Trial = base.base if base else self.run(self.given)

    def introduce(self) -> None:
        """Log run, step and device."""
        self._opened.introduce()

    def run(self, compression: Compression) -> Trial:
        """Evaluate a compression on all its data, and measure its bytes."""
        self._apply(compression)
        start = time.monotonic()
        metrics, loss = self._evaluate()
        seconds = time.monotonic() - start
        test = evaluate_dataset(self._opened.inputs, self._opened.model, "test") if self._has_test else None
        sizes = self.num_bytes(compression), self.num_bytes(compression, seen=False), self.dense_bytes(compression)
        return Trial(loss, metrics, test, seconds, *sizes)

    def loss(self, compression: Compression, remark: str) -> Loss:
        """Return the loss of the metric through a compression; log it with a remark."""
        self._apply(compression)
        metrics, loss = self._evaluate()
        shown = {self.metric: metrics[self.metric], "lost": loss.value, "at_most": loss.at_most}
        logger.info("%s: %s", remark, show_metrics(shown))
        return loss

    def _evaluate(self) -> tuple[dict[str, float], Loss]:
        """Return the metrics, and the loss of the chosen one relative to the first evaluation: that of the run."""
        evaluator = evaluator_of(self._opened.inputs, self._opened.model, self.role, by_row=True)
        metrics = metrics_of(evaluator, self.world, self.metric)
        if np.isnan(metrics[self.metric]):
            raise UserError(
                f"--metric: {self.metric} is not a number on data.{self.role}; give other rows, or another metric"
            )
        influences = {}  # without them the upper bound of a loss is the loss itself
        if isinstance(evaluator, (LabelEvaluator, RetrievalEvaluator)):
            influences = evaluator.influences(self.world)
        of_rows = influences.get(self.metric, np.zeros(0))
        self._first = self._first or (metrics[self.metric], of_rows)
        first, of_first = self._first
        loss = first - metrics[self.metric] if is_higher_better(self.metric) else metrics[self.metric] - first
        error = float(np.linalg.norm(of_rows - of_first))
        return metrics, Loss(loss, loss + _MARGIN * error)

    def num_bytes(self, compression: Compression, seen: bool = True) -> int:
        """Return the bytes of the vectors of tables, and of the bitmaps of kept rows of tables without a vocabulary."""
        total = 0
        for name, table in self.config.tables.items():
            pruning, rows = compression.pruned.get(name), table.num_embeddings
            if pruning is not None:
                rows = pruning.num_rows
                total += 0 if table.mapping is IdMappingType.vocabulary else -(-len(pruning.kept) // 8)
            elif seen:
                rows = int(np.count_nonzero(self.counts[name]))
            total += rows * row_bytes(table, compression.codes.get(name))
        return total

    def dense_bytes(self, compression: Compression) -> int:
        """Return the bytes of the weights of the dense part; a row in INT8 also has a scale and a zero point."""
        model, total = self._opened.model.module.dense.model, 0
        rounded = {f"{name}.weight" for name, module in model.named_modules() if is_rounded(module)}
        for name, weights in model.named_parameters():
            remaining = without_neurons(parameter_name(name), weights.detach(), self.layers, compression.neurons)
            in_int8 = compression.dense_int8 and name in rounded
            total += remaining.numel() + 5 * len(remaining) if in_int8 else remaining.numel() * remaining.element_size()
        return total

    def num_shared(self, table: str) -> int:
        """Return the number of rows at the end of a table that several ids share; further pruning merges them."""
        settings = self.config.tables[table]
        if settings.mapping is IdMappingType.vocabulary:
            return settings.num_buckets
        return int(settings.kept_rows is not None)

    @cached_property
    def norms(self) -> dict[str, np.ndarray]:
        """Lengths of the vectors, float32 [rows] by table."""
        lengths = {}
        for name, weights in self._weights.items():
            squares = torch.zeros(weights.size()[0])
            for row, _, block in self._blocks(name):
                squares[row : row + len(block)] += block.square().sum(1).cpu()
            lengths[name] = (self.world.sum(squares) if hasattr(weights, "local_shards") else squares).sqrt().numpy()
        return lengths

    def gradients(self, compression: Compression) -> dict[str, np.ndarray]:
        """Return the `importances` of rows, float32 [rows] by table."""
        self._apply(compression)
        return importances(self._opened.inputs, self._opened.model.module)

    def neuron_gradients(self, compression: Compression) -> dict[str, np.ndarray]:
        """Return the `neuron_importances`, float32 [width] by layer."""
        self._apply(compression)
        return neuron_importances(self._opened.inputs, self._opened.model.module, self.layers)

    def pruning(self, table: str, rows: Sequence[int] | np.ndarray) -> Pruning:
        """Return the pruning of some rows of a table, which share their mean weighted by counts in data.train."""
        counts = torch.from_numpy(self.counts[table])
        kept, shared = torch.ones(len(counts), dtype=torch.bool), self.num_shared(table)
        kept[torch.as_tensor(rows, dtype=torch.int64)] = False
        kept[len(kept) - shared :] = False
        kept[NULL_ROW] = True
        weights = torch.where(kept, 0, counts).double()
        if not weights.any():
            weights = (~kept).double()
        return Pruning(kept, (weights / weights.sum()).float(), max(1, shared))

    def kept_neurons(self, before: Compression, layer: str, neurons: np.ndarray) -> torch.Tensor:
        """Return the kept neurons of a layer without some more of them, bool [width]."""
        kept = before.neurons.get(layer, torch.ones(self.layers[layer].own.out_features, dtype=torch.bool)).clone()
        kept[torch.from_numpy(neurons)] = False
        return kept

    @torch.no_grad()
    def shared_vector(self, table: str, pruning: Pruning) -> torch.Tensor:
        """Return the shared vector, as trained, of the rows of a table that are not kept: [columns] FP32."""
        weights = self._weights[table]
        vector = torch.zeros(weights.size()[1])
        for row, column, block in self._blocks(table):
            part = pruning.weights[row : row + len(block)].to(block.device) @ block
            vector[column : column + block.shape[1]] += part.cpu()
        return self.world.sum(vector) if hasattr(weights, "local_shards") else vector

    def _blocks(self, table: str) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield parts of the rows of a table on this rank, as trained, in FP32, each after its first row and column."""
        for (_, (row, column)), shard in zip(local_shards(self._weights[table]), self._trained[table], strict=True):
            for number, block in enumerate(shard.split(_ROWS_AT_ONCE)):
                yield row + number * _ROWS_AT_ONCE, column, block.float()

    def _copied(self, table: str, shard: torch.Tensor) -> torch.Tensor:
        # Tables are in host memory next to a GPU because the GPU lacks room for them.
        in_host = self.config.tables[table].compute_kernel is not ComputeKernel.fused
        return shard.detach().to("cpu" if in_host else shard.device, copy=True)

    def _count(self) -> dict[str, np.ndarray]:
        """Count the rows of each table in data.train, over all its features with columns in data.train."""
        inputs, present = self._opened.inputs, set(role_features(self.config, "train"))
        counts: dict[str, Any] = {n: np.zeros(t.num_embeddings, np.int64) for n, t in self.config.tables.items()}
        for feature in (name for name in id_features(self.config) if name in present):
            table, part = self.config.features[feature].table or "", inputs.id_column(feature)
            counter = RowCounter(part, is_mapped=True)
            measure(inputs.datasets["train"], {}, [], self.world, counter)
            mine = torch.from_numpy(counter.counts(part, self.config.tables[table].num_embeddings)[0])
            counts[table] = counts[table] + self.world.sum(mine).numpy()
        return counts

    @torch.no_grad()
    def _apply(self, compression: Compression) -> None:
        """Let the model, in eval mode, read vectors and neurons as a compression leaves them."""
        self._opened.model.eval()  # evaluations leave it in training mode
        for weights, as_trained in self._dense:
            weights.copy_(as_trained)
        hide_neurons(self.layers, compression.neurons)
        features = {f: compression.codes.get(self.config.features[f].table or "") for f in id_features(self.config)}
        dense = self._opened.model.module.dense
        dense.codes = {f: code for f, code in features.items() if code is not None}
        dense.in_int8 = compression.dense_int8
        for name, weights in self._weights.items():
            shards = list(local_shards(weights))
            for (shard, _), trained in zip(shards, self._trained[name], strict=True):
                shard.copy_(trained)
            if name in compression.pruned:
                vector, kept = self.shared_vector(name, compression.pruned[name]), compression.pruned[name].kept
                for shard, (row, column) in shards:
                    pruned = ~kept[row : row + len(shard)].to(shard.device)
                    shard[pruned] = vector[column : column + shard.shape[1]].to(shard)
        self._opened.forget_caches()  # otherwise `fused_uvm_caching` continues with rows of the trial before
