"""Prediction of the time of a step, from the work of the busiest rank and measured speeds of devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recsys.config import Config
from recsys.config.choices import FloatType
from recsys.config.features import dims_of, features_by_table, float_columns, sampled_rows
from recsys.errors import UserError
from recsys.memory.facts import DataFacts, DenseFacts
from recsys.memory.fakes import fake_inputs, fake_step, fake_tensors
from recsys.memory.operators import OperatorTrace, Work
from recsys.memory.speeds import DATA_AMOUNTS, STEP_AMOUNTS, Speeds
from recsys.models.halves import is_in_halves, sum_in_halves
from recsys.runtime.live import clock
from recsys.runtime.machine import Topology
from recsys.step.dense_shards import shards_dense
from recsys.tables.lookup import is_local
from recsys.tables.spec import Shard, vector_type

PARTS = ("data", "dense", "tables", "exchange", "rest")
_OF_TABLES, _OF_DENSE = ("feature", "id", "element", "sharding", "routed"), ("operator", "parameter")
_TRACED_ROWS = 8192  # the most that are traced, unless the loss compares all rows; time is proportional beyond


@dataclass(frozen=True)
class Load:
    """The work of the busiest rank in a step.

    Attributes:
        amounts: by the names in `DATA_AMOUNTS` and `STEP_AMOUNTS`.
        work: that of the dense part's operators, for a part of the rows.
        repeats: how many such parts make up all rows.
        sent: pairs of a collective and the bytes that this rank sends in it.
    """

    amounts: Mapping[str, float]
    work: Work
    repeats: float
    sent: tuple[tuple[str, float], ...]

    def exchange_seconds(self, speeds: Speeds) -> float:
        """Return the time of all collectives, if they run one after another."""
        return sum(speeds.exchange_seconds(*message) for message in self.sent)

    def parts(self, speeds: Speeds) -> dict[str, float]:
        """Return the seconds of a step for each of `PARTS`."""
        data = sum(self.amounts[name] * speeds.data[name] for name in DATA_AMOUNTS)
        by_name = {name: self.amounts[name] * speeds.step[name] for name in STEP_AMOUNTS}
        tables, dense = (sum(by_name.pop(name) for name in names) for names in (_OF_TABLES, _OF_DENSE))
        dense += self.repeats * self.work.seconds(speeds)
        return {
            "data": data,
            "dense": dense,
            "tables": tables,
            "exchange": self.exchange_seconds(speeds),
            "rest": sum(by_name.values()),
        }


@dataclass(frozen=True)
class StepTime:
    """How long steps and epochs take.

    Attributes:
        rows: those of a step, over all ranks; epoch_rows: those of data.train, None if the data are not here.
        price_per_hour: price of one of `num_machines`; None if not given.
    """

    load: Load
    speeds: Speeds
    rows: int
    epoch_rows: int | None
    num_machines: int
    price_per_hour: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the figures, times in seconds."""
        parts = self.load.parts(self.speeds)
        step = sum(parts.values())
        epoch = None if self.epoch_rows is None else self.epoch_rows / self.rows * step
        price = None if epoch is None or self.price_per_hour is None else self._price(epoch)
        figures = {"step_s": step, "samples_per_s": self.rows / step, "parts_s": parts}
        return {**figures, "epoch_rows": self.epoch_rows, "epoch_s": epoch, "epoch_price": price}

    def _price(self, seconds: float) -> float:
        return (self.price_per_hour or 0) * self.num_machines * seconds / 3600

    def sentences(self) -> list[str]:
        """Return the figures in sentences; parts below half a per cent are left out."""
        figures, speeds = self.as_json(), self.speeds
        parts = sorted(figures["parts_s"].items(), key=lambda part: -part[1])
        shares = ", ".join(
            f"{name} {seconds / figures['step_s']:.0%}"
            for name, seconds in parts
            if seconds > 0.005 * figures["step_s"]
        )
        lines = [
            f"About {figures['samples_per_s']:,.0f} samples/s: a step of {self.rows:,} rows takes "
            f"{figures['step_s'] * 1e3:,.1f} ms ({shares}), by the speeds of {speeds.ranks} × {speeds.device}"
        ]
        if figures["epoch_s"] is not None:
            cost = "" if figures["epoch_price"] is None else f" and costs {_money(figures['epoch_price'])}"
            lines.append(
                f"An epoch of {self.epoch_rows:,} rows takes {clock(figures['epoch_s'])}{cost}, without evaluations"
            )
        elif self.price_per_hour is not None:
            price = self._price(1e6 / self.rows * figures["step_s"])
            lines.append(f"A million rows cost {_money(price)}")
        return lines


def _money(price: float) -> str:
    """Return a price with two decimals, or a small one with two significant digits."""
    return f"{price:,.2f}" if price >= 0.1 or not price else f"{price:.2g}"


def speeds_of(config: Config, topology: Topology, price_per_hour: float | None) -> Speeds | None:
    """Return the speeds in the file that `topology.speeds` names; None if it names none.

    Raises:
        UserError: they were measured on other devices or on one rank, or there is a price without speeds.
    """
    path = config.topology.speeds
    if path is None:
        if price_per_hour is not None:
            raise UserError(
                "--price-per-hour needs topology.speeds=FILE; `recsys calibrate FILE` writes it in a minute"
            )
        return None
    speeds, kind = Speeds.load(Path(path)), topology.device.type
    if speeds.device_type != kind:
        raise UserError(
            f"config key 'topology.speeds': '{path}' was measured on {speeds.device_type}, but the ranks are to run on "
            f"{kind}; write it on such a machine, or set topology.device={speeds.device_type}"
        )
    if topology.world_size > 1 and not speeds.exchanged:
        raise UserError(
            f"config key 'topology.speeds': '{path}' was measured on one rank, which exchanges nothing, but there are "
            f"to be {topology.world_size}; write it with: torchrun --standalone --nproc_per_node "
            f"{topology.local_world_size} -m recsys calibrate {path}"
        )
    return speeds


def step_load(config: Config, data: DataFacts, dense: DenseFacts, topology: Topology, shards: Sequence[Shard]) -> Load:
    """Return the work of the busiest rank in a step under a plan.

    It needs a process group of as many ranks, such as that of `rehearse_world`.
    """
    rows, ranks = dense.rows, topology.world_size
    dims, features, by_id = dims_of(config), features_by_table(config), config.unpooled_features()
    work, repeats = _dense_work(config, data, rows, topology)
    ids = rows * sum(data.mean_ids[name] for name in dims)
    elements, vectors = [0.0] * ranks, [0.0] * ranks
    for shard in shards:
        everywhere = 1 if shard.is_replicated else ranks
        share = shard.size[0] / config.tables[shard.table].num_embeddings
        for name in features[shard.table]:
            count = rows * everywhere * data.mean_ids[name]
            elements[shard.rank] += count * share * shard.size[1]
            if everywhere > 1:
                num_vectors = count * share if name in by_id else rows * everywhere
                vectors[shard.rank] += num_vectors * shard.size[1]
    shardings, routed = _routed(config, data, topology, shards)
    amounts = {
        "step": 1.0,
        "feature": float(len(dims)),
        "id": ids,
        "element": max(elements),
        "sharding": float(shardings),
        "routed": rows * routed,
        "row": float(rows),
        "float": float(rows * len(float_columns(config))),
        "operator": repeats * work.num_operators,
        "parameter": dense.parameter_bytes / 4,
    }
    precision, number = config.precision, vector_type(config, topology.on_gpu).itemsize
    wires = [number if wire is FloatType.FP32 else 2 for wire in (precision.forward_wire, precision.backward_wire)]
    exchanged = [wire * max(vectors) for wire in wires]
    sent = [] if ranks == 1 else _sent(data, dense, ids, exchanged, ranks, work)
    if shards_dense(config, ranks):  # ranks send each other slices of the weights: the second half of an all-reduce
        sent.append(("all_reduce", dense.parameter_bytes / 2))
    return Load(amounts, work, repeats, tuple(sent))


def _routed(config: Config, data: DataFacts, topology: Topology, shards: Sequence[Shard]) -> tuple[int, float]:
    """Return the number of torchrec's sharded lookups, and how many ids of a row they route to ranks.

    Lookups by `recsys.tables.lookup` do not count.
    """
    by_id, features = config.unpooled_tables(), features_by_table(config)
    names: dict[tuple[bool, str], set[str]] = {}
    for shard in shards:
        names.setdefault((shard.table in by_id, shard.sharding_type), set()).update(features[shard.table])
    pooled = [kind for kind in names if not kind[0]]
    has_lists = any(data.mean_ids[name] > 1 for kind in pooled for name in names[kind])
    sharding_types = {shard.table: shard.sharding_type for shard in shards}
    if is_local(config, sharding_types, topology.world_size, topology.on_gpu):
        if topology.world_size == 1:
            return 0, 0.0
        if not has_lists:  # pooled lists are left to torchrec there too
            names = {kind: of_kind for kind, of_kind in names.items() if kind not in pooled}
    return len(names), sum(data.mean_ids[name] for kind in names for name in names[kind])


def _sent(
    data: DataFacts, dense: DenseFacts, ids: float, vectors: Sequence[float], ranks: int, work: Work
) -> list[tuple[str, float]]:
    """Return (collective, bytes) for ids, looked-up vectors and their gradients, gradients of the dense part.

    Args:
        vectors: bytes of the looked-up vectors, and bytes of their gradients.
    """
    away = (ranks - 1) / ranks
    sizes = (ids * data.id_bytes, *vectors) if any(vectors) else ()
    exchanged = [("all_to_all", size * away) for size in sizes]
    return [*exchanged, ("all_reduce", float(dense.gradient_bytes)), *(("all_reduce", float(n)) for n in work.sent)]


def _dense_work(config: Config, data: DataFacts, rows: int, topology: Topology) -> tuple[Work, float]:
    """Return the dense part's work for a part of the rows, and how many such parts there are."""
    with fake_tensors():
        step = fake_step(config).train()
        model = step.dense.model
        if topology.on_gpu:  # a rehearsal for CPUs leaves out repeated work
            model.rehearse(topology.device)
        elif is_in_halves(model, config):
            sum_in_halves(model, topology.world_size)
        micro = min(rows, config.train.micro_batch_size or rows)
        traced = min(micro, _TRACED_ROWS) if model.loss_by_rows else micro
        drawn = sampled_rows(config, topology.world_size)
        pooled, by_id, batch = fake_inputs(config, data, traced, (0, traced), drawn)
        with OperatorTrace() as trace:
            step.dense(pooled, [by_id], batch)
    return trace.work, rows / traced


def fit_amounts(
    amounts: list[Mapping[str, float]], names: tuple[str, ...], seconds: list[float], weights: list[float]
) -> dict[str, float]:
    """Return the seconds per unit of each amount, all from 0 on, by least squares of errors relative to `weights`.

    Coordinate descent on the normal equations (Franc et al. 2005, "Sequential coordinate-wise algorithm for the
    non-negative least squares problem").
    """
    matrix = torch.tensor([[amount[name] / w for name in names] for amount, w in zip(amounts, weights, strict=True)])
    matrix, target = matrix.double(), torch.tensor([s / w for s, w in zip(seconds, weights, strict=True)]).double()
    scale = matrix.norm(dim=0).clamp(min=1e-30)
    gram, linear = (matrix / scale).T @ (matrix / scale), (matrix / scale).T @ target
    costs = torch.zeros(len(names), dtype=torch.double)
    for _ in range(2000):
        for i in range(len(names)):
            costs[i] = (costs[i] + (linear[i] - gram[i] @ costs) / gram[i, i].clamp(min=1e-30)).clamp(min=0.0)
    return dict(zip(names, (costs / scale).tolist(), strict=True))
