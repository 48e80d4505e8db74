"""Trials of compressions on a finished run: its metrics with vectors quantised and rows pruned, in memory alone."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from recsys.config import Config, IdMappingType
from recsys.config.choices import UNPOOLED, RowCode, ShardingChoice
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
from recsys.serving.neurons import hidden_layers, without_neurons
from recsys.step.int8 import is_rounded
from recsys.tables.module_names import parameter_name
from recsys.tables.row_codes import row_bytes
from recsys.tables.spec import local_shards
from recsys.tables.updates import table_tensors
from recsys.training.evaluation import evaluate_dataset, evaluator_of

_MARGIN = 1.645 * 2**0.5  # standard errors, of data tried and of other data: 95 % of the differences lie below


@dataclass(frozen=True)
class Pruning:
    """Rows of a table that are kept, and what the others share.

    Attributes:
        kept: bool [rows]; the null row is, and rows that were shared before are not.
        weights: float32 [rows], of the rows not kept in the vector that they share; they add up to 1.
        num_shared: rows with this vector that the table has afterwards.
    """

    kept: torch.Tensor
    weights: torch.Tensor
    num_shared: int

    @property
    def num_rows(self) -> int:
        """Rows of the table afterwards."""
        return int(self.kept.sum()) + self.num_shared


@dataclass(frozen=True)
class Compression:
    """What is done to a run.

    Attributes:
        codes: of vectors, by table. pruned: rows, by table.
        neurons: those kept of `Trials.layers`, bool [width] by layer.
        dense_int8: linear layers of the dense part are in INT8.
    """

    codes: Mapping[str, RowCode] = field(default_factory=dict)
    pruned: Mapping[str, Pruning] = field(default_factory=dict)
    neurons: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dense_int8: bool = False


@dataclass(frozen=True)
class Loss:
    """What a compression loses of the metric; below 0 it gains.

    Attributes:
        value: on the rows that were tried. at_most: on 95 % of other data sets of as many rows of their kind.
    """

    value: float
    at_most: float


@dataclass(frozen=True)
class Trial:
    """What a compression comes to.

    Attributes:
        loss: of the metric of the data that trials go by.
        metrics: of the data that trials go by; test: of data.test, where there is such beside.
        seconds: that scoring the former took.
        seen_bytes: of tables, over the rows of ids that data.train holds; all_bytes: over all rows.
        dense_bytes: of the dense part.
    """

    loss: Loss
    metrics: dict[str, float]
    test: dict[str, float] | None
    seconds: float
    seen_bytes: int
    all_bytes: int
    dense_bytes: int


def looked_up_by_id(config: Config) -> Config:
    """Return a config whose vectors can be quantised before they are summed, whatever its plans are."""
    tables = {
        name: replace(
            table,
            quantize=table.quantize or RowCode.FP16,
            sharding_type=table.sharding_type if table.sharding_type in UNPOOLED else ShardingChoice.auto,
        )
        for name, table in config.tables.items()
    }
    return replace(config, tables=tables)


class Trials:
    """A finished run, opened to try compressions of its tables; collective.

    Args:
        metric: by which they are compared. base: what they are compared with; default: the run itself.

    Attributes:
        role: of the data that they are compared on: data.valid, or data.test without it.
        config: of the opened run. facts: of it. source: its checkpoint.
        counts: by table, how often data.train holds each of its rows, int64 [rows].
        layers: of the dense part, whose neurons can be pruned.
        base: what losses are counted from.
    """

    def __init__(self, run: Finished, world: World, metric: str, base: "Trials | None" = None) -> None:
        roles = [role for role in ("valid", "test") if getattr(run.config.data, role) is not None]
        if not roles:
            raise UserError("there is nothing to compare compressions on; set data.valid or data.test")
        self.role, self._has_test = roles[0], len(roles) > 1
        in_order = run.in_order(world.world_size)  # so that rows of two trials are the same ones
        opened = replace(in_order, config=looked_up_by_id(in_order.config))
        self._opened = OpenRun(opened, world, ["train", *roles, "items"])
        self.config, self.source = self._opened.inputs.config, self._opened.source
        self.facts = self._opened.inputs.facts or Facts()
        codes = {name: table.quantize for name, table in run.config.tables.items() if table.quantize is not None}
        self.given = Compression(codes, dense_int8=run.config.precision.dense_int8)
        self.metric, self.world = metric, world
        self._weights = table_tensors(self._opened.model)
        self._trained = {name: [p.clone() for p, _ in local_shards(w)] for name, w in self._weights.items()}
        model = self._opened.model.module.dense.model
        self.layers = hidden_layers(model, self.config.model)
        self._read = {name: layer.following.weight.detach().clone() for name, layer in self.layers.items()}
        self.counts = self._count()
        self._first: tuple[float, np.ndarray] | None = base._first if base else None
        self.base: Trial = base.base if base else self.run(self.given)

    def introduce(self) -> None:
        """Tell in the log what runs where."""
        self._opened.introduce()

    def run(self, compression: Compression) -> Trial:
        """Return what a compression comes to."""
        self._apply(compression)
        start = time.monotonic()
        metrics, loss = self._evaluate()
        seconds = time.monotonic() - start
        test = evaluate_dataset(self._opened.inputs, self._opened.model, "test") if self._has_test else None
        sizes = self.num_bytes(compression), self.num_bytes(compression, seen=False), self.dense_bytes(compression)
        return Trial(loss, metrics, test, seconds, *sizes)

    def loss(self, compression: Compression, remark: str) -> Loss:
        """Return how much of the metric a compression loses."""
        self._apply(compression)
        metrics, loss = self._evaluate()
        shown = {self.metric: metrics[self.metric], "lost": loss.value, "at_most": loss.at_most}
        logger.info("%s: %s", remark, show_metrics(shown))
        return loss

    def _evaluate(self) -> tuple[dict[str, float], Loss]:
        """Return the metrics, and how much worse than the first evaluation's, that of the run itself, the one is."""
        evaluator = evaluator_of(self._opened.inputs, self._opened.model, self.role, by_row=True)
        metrics = evaluator.compute(self.world)
        if np.isnan(metrics[self.metric]):
            raise UserError(f"--metric: {self.metric} is not a number on data.{self.role}; give other rows, or another")
        influences = {}  # without them a loss is taken as it is
        if isinstance(evaluator, (LabelEvaluator, RetrievalEvaluator)):
            influences = evaluator.influences(self.world)
        of_rows = influences.get(self.metric, np.zeros(0))
        self._first = self._first or (metrics[self.metric], of_rows)
        first, of_first = self._first
        lost = first - metrics[self.metric] if is_higher_better(self.metric) else metrics[self.metric] - first
        error = float(np.linalg.norm(of_rows - of_first))
        return metrics, Loss(lost, lost + _MARGIN * error)

    def num_bytes(self, compression: Compression, seen: bool = True) -> int:
        """Return the bytes of the tables' vectors, and of what tells the rows kept of those without a vocabulary."""
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
        """Return the bytes of the dense part's weights; a row in INT8 has a scale and a zero point beside."""
        model, total = self._opened.model.module.dense.model, 0
        rounded = {f"{name}.weight" for name, module in model.named_modules() if is_rounded(module)}
        for name, weights in model.named_parameters():
            left = without_neurons(parameter_name(name), weights.detach(), self.layers, compression.neurons)
            in_int8 = compression.dense_int8 and name in rounded
            total += left.numel() + 5 * len(left) if in_int8 else left.numel() * left.element_size()
        return total

    def num_shared(self, table: str) -> int:
        """Return how many rows at the end of a table several ids share, which a further pruning joins."""
        settings = self.config.tables[table]
        return (
            settings.num_buckets
            if settings.mapping is IdMappingType.vocabulary
            else int(settings.kept_rows is not None)
        )

    @cached_property
    def norms(self) -> dict[str, np.ndarray]:
        """By table the lengths of its vectors, float32 [rows]."""
        lengths = {}
        for name, weights in self._weights.items():
            squares = torch.zeros(weights.size()[0])
            for (_, (row, _)), shard in zip(local_shards(weights), self._trained[name], strict=True):
                squares[row : row + len(shard)] += shard.float().square().sum(1).cpu()
            lengths[name] = (self.world.sum(squares) if hasattr(weights, "local_shards") else squares).sqrt().numpy()
        return lengths

    def gradients(self, compression: Compression) -> dict[str, np.ndarray]:
        """Return by table the importance of its rows as `importances` has it, float32 [rows]."""
        self._apply(compression)
        self._opened.model.eval()
        totals = importances(self._opened.inputs, self._opened.model.module, self.config)
        return {name: self.world.sum(total).numpy() for name, total in totals.items()}

    def neuron_gradients(self, compression: Compression) -> dict[str, np.ndarray]:
        """Return by layer the importance of its neurons as `neuron_importances` has it, float32 [width]."""
        self._apply(compression)
        self._opened.model.eval()
        totals = neuron_importances(self._opened.inputs, self._opened.model.module, self.layers)
        return {name: self.world.sum(total).numpy() for name, total in totals.items()}

    def pruning(self, table: str, rows: Sequence[int] | np.ndarray) -> Pruning:
        """Return a table's pruning of some rows, which share their mean by how often data.train holds each."""
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
        """Return which neurons of a layer are kept without some more of them, bool [width]."""
        kept = before.neurons.get(layer, torch.ones(self._read[layer].shape[1], dtype=torch.bool)).clone()
        kept[torch.from_numpy(neurons)] = False
        return kept

    @torch.no_grad()
    def shared_vector(self, table: str, pruning: Pruning) -> torch.Tensor:
        """Return the vector, as it was trained, that a table's rows share which are not kept: [columns] FP32."""
        weights = self._weights[table]
        vector = torch.zeros(weights.size()[1])
        for (_, (row, column)), shard in zip(local_shards(weights), self._trained[table], strict=True):
            part = pruning.weights[row : row + len(shard)].to(shard.device) @ shard.float()
            vector[column : column + shard.shape[1]] += part.cpu()
        return self.world.sum(vector) if hasattr(weights, "local_shards") else vector

    def _count(self) -> dict[str, np.ndarray]:
        """Count the rows of each table in data.train, over all its features that data.train has columns for."""
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
        """Let the model read vectors, and neurons, as a compression leaves them."""
        for name, layer in self.layers.items():
            kept = compression.neurons.get(name)
            layer.following.weight.copy_(
                self._read[name] if kept is None else self._read[name] * kept.to(self._read[name])
            )
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
