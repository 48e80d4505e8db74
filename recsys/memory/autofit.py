"""Settings that make a run fit into its memory: the cheapest first, and none that changes what is learned unasked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from recsys.config import ComputeKernel, Config, DataType, ShardingChoice, TableConfig
from recsys.config.choices import ELEMENTWISE, Autocast, DenseSharding, Saver
from recsys.config.features import rank_rows
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError
from recsys.memory import DataFacts, DenseFacts, RankMemory, predict
from recsys.memory.data_facts import streams_of_a_rank
from recsys.memory.trace import demands, rehearse
from recsys.runtime.machine import Topology
from recsys.runtime.threads import batches_ahead, decoding_threads
from recsys.step.build import build_tables
from recsys.tables.bytes import WEIGHT_BYTES
from recsys.tables.shard import plan_tables, shards
from recsys.tables.spec import Shard

MARGIN = 0.05  # of the memory there is, that a fitted run leaves: predictions are not exact
_LEAST_ROWS = 32  # of a micro-batch
_PASSES = 2
_FINE_STEPS = 4  # up to which tables are moved one by one
_LEAST_BYTES, _LEAST_SHARE = 1 << 20, 0.02  # that are worth an advice, and of what is still missing with it


@dataclass(frozen=True)
class Change:
    """Settings by key, what they cost in words, and what must be allowed for them; None: the same is learned."""

    settings: Mapping[str, Any]
    cost: str
    saver: Saver | None = None

    def __str__(self) -> str:
        return " ".join(f"{key}={_shown(value)}" for key, value in self.settings.items())


@dataclass(frozen=True)
class Fit:
    """A config that fits.

    Attributes:
        changes: from the config that was asked for; before, after: what the fullest rank takes, in bytes.
        missing: bytes that are still missing, over all ranks.
    """

    config: Config
    changes: list[Change]
    before: int
    after: int
    missing: int


@dataclass(frozen=True)
class Offer:
    """What a change of settings would bring: bytes saved on the fullest rank, and still missing over all ranks."""

    change: Change
    saved: int
    missing: int


def pieces_of(config: Config, topology: Topology) -> list[Shard]:
    """Return the pieces of the plan that a run would use; where none fits, of the one that takes least."""
    step = build_tables(config)
    try:
        plan = plan_tables(step, config, topology)
    except UserError:
        if config.run.plan is not None:
            raise
        plan = plan_tables(step, config, topology, must_fit=False)
    return list(shards(plan, config, topology.world_size))


class Fitter:
    """Tries changes of a config on the predicted memory of all ranks.

    Args:
        data: what is known of the data, as the config reads them.
        topology: with a budget, if there is one, for its memory.
        seen_bytes: what a CPU rank has been seen to take; each is taken to need as much more than its prediction.
    """

    def __init__(self, config: Config, data: DataFacts, topology: Topology, seen_bytes: int = 0) -> None:
        self._config, self._data, self._topology = config, data, topology
        self._beyond = 0
        # What takes time is planning and tracing, and most changes ask for only one of them anew.
        self._pieces: dict[str, list[Shard]] = {}
        self._dense: dict[str, DenseFacts] = {}
        if seen_bytes:
            self._beyond = max(0, seen_bytes - self.fullest(config)) * topology.local_world_size

    def fit(self, allowed: Sequence[Saver]) -> Fit:
        """Return the config with the cheapest changes that make it fit, or with those that bring it nearest."""
        chosen: list[Change] = []
        missing = self.missing(self._config)
        # The peak is that of the highest phase, so that one lever may help only after another has.
        for lever in LEVERS * _PASSES:
            if not missing:
                break
            best, least = None, missing
            for change in lever(with_changes(self._config, chosen), self._topology):
                if change.saver is not None and change.saver not in allowed:
                    continue
                left = self.missing(with_changes(self._config, [*chosen, change]))
                if left < least:
                    best, least = change, left
                if not left:
                    break
            if best is not None:
                chosen = [earlier for earlier in chosen if not best.settings.keys() >= earlier.settings.keys()] + [best]
                missing = least
        for change in reversed(chosen if not missing else []):  # the dearest first that the others do without
            others = [earlier for earlier in chosen if earlier is not change]
            if not self.missing(with_changes(self._config, others)):
                chosen = others
        config = with_changes(self._config, chosen)
        return Fit(config, chosen, self.fullest(self._config), self.fullest(config), missing)

    def advice(self, num: int = 3) -> list[Offer]:
        """Return the changes that help most: those that are enough, of one setting or of several at once.

        Where none is enough, what all changes together save comes first, then what saves most by itself.
        """
        fitted = self.fit(())
        if fitted.missing:
            fitted = self.fit(tuple(Saver))
        offers = [self._offer(_joined(fitted.changes))] if fitted.changes else []
        enough = bool(offers) and not fitted.missing
        single = []
        for lever in LEVERS:
            candidates = [self._offer(change) for change in lever(self._config, self._topology)]
            most = max((offer.saved for offer in candidates), default=0)
            # The weakest that saves nearly as much as any.
            single += [offer for offer in candidates if offer.saved > _LEAST_BYTES and offer.saved >= 0.95 * most][:1]
        single.sort(key=lambda offer: -offer.saved)
        offers += [offer for offer in single if not (enough and offer.missing)]
        worth = [offer for offer in offers if not offer.missing or offer.saved > _LEAST_SHARE * offer.missing]
        return list({str(offer.change): offer for offer in worth}.values())[:num]

    def _offer(self, change: Change) -> Offer:
        config = with_changes(self._config, [change])
        return Offer(change, self.fullest(self._config) - self.fullest(config), self.missing(config))

    def fullest(self, config: Config) -> int:
        """Return the most bytes that a rank takes where memory is short: on its GPU, or of its host's."""
        ranks = self._ranks(config)
        return max(rank.peak(self._where(ranks))[0] for rank in ranks)

    def holders(self, num: int = 5) -> list[tuple[str, int]]:
        """Return what takes most at the peak of the fullest rank: tables by name, all else by kind."""
        ranks = self._ranks(self._config)
        where = self._where(ranks)
        rank = max(ranks, key=lambda memory: memory.peak(where)[0])
        kinds = rank.phases[rank.peak(where)[1]][where]
        tables = {
            f"table {name}": table_bytes.device if where == "device" else table_bytes.device + table_bytes.host
            for name, table_bytes in rank.tables.items()
        }
        others = {kind: size for kind, size in kinds.items() if kind not in ("table_weight", "table_optimizer")}
        sizes = tables | {kind.replace("_", " "): size for kind, size in others.items()}
        return sorted(sizes.items(), key=lambda pair: -pair[1])[:num]

    def _where(self, ranks: Sequence[RankMemory]) -> str:
        topology = self._topology
        if not topology.on_gpu:
            return "host"
        device = max(rank.peak("device")[0] for rank in ranks) / topology.device_bytes
        host = max(rank.peak("host")[0] for rank in ranks) / topology.host_share_bytes
        return "device" if device >= host else "host"

    def _ranks(self, config: Config) -> list[RankMemory]:
        data, rows = self._data_of(config), rank_rows(config, self._topology.world_size)
        kernels = repr((config.tables, config.optimizer.tables, config.precision.output_dtype))
        if kernels not in self._pieces:
            self._pieces[kernels] = pieces_of(config, self._topology)
        dims = [table.embedding_dim for table in config.tables.values()]
        layers = repr((config.model, config.train, config.precision, dims))
        if layers not in self._dense:
            self._dense[layers] = rehearse(config, data, rows, self._topology.device)
        return predict(config, data, self._dense[layers], self._topology, self._pieces[kernels])

    def _data_of(self, config: Config) -> DataFacts:
        """Return what is known of the data; with smaller windows, the most that they may take."""
        streams = streams_of_a_rank(config, self._topology.world_size)
        size = config.data.window_mib << 20
        topology = self._topology
        threads = decoding_threads(config.data.num_threads, topology.device, topology.local_world_size)
        most = 2 * size * streams, 3 * size * max(1, threads)
        if config.data.window_mib == self._config.data.window_mib:
            return self._data
        decoding = tuple(replace(of_rank, later=min(of_rank.later, most[1])) for of_rank in self._data.decoding)
        return replace(self._data, window_bytes=min(self._data.window_bytes, most[0]), decoding=decoding)

    def missing(self, config: Config) -> int:
        """Return the bytes by which ranks and machines exceed what they have, less the margin."""
        needs = demands(self._ranks(config), self._topology)
        return sum(max(0, size + self._beyond - int(there * (1 - MARGIN))) for _, size, there in needs)


def with_changes(config: Config, changes: Sequence[Change]) -> Config:
    """Return a config with other values of some keys."""
    for change in changes:
        for key, value in change.settings.items():
            config = _set(config, key.split("."), value)
    return config


def _joined(changes: Sequence[Change]) -> Change:
    """Return several changes as one."""
    settings = {key: value for change in changes for key, value in change.settings.items()}
    saver = next((change.saver for change in changes if change.saver), None)
    return Change(settings, "; ".join(change.cost for change in changes), saver)


def _set(node: Any, path: Sequence[str], value: Any) -> Any:
    head, *rest = path
    if isinstance(node, dict):
        return {**node, head: _set(node[head], rest, value) if rest else value}
    assert is_dataclass(node) and not isinstance(node, type)
    return replace(node, **{head: _set(getattr(node, head), rest, value) if rest else value})


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else getattr(value, "name", str(value))


def _micro_batches(config: Config, topology: Topology) -> Iterator[Change]:
    rows = -(-config.train.global_batch_size // topology.world_size)
    rows = min(rows, config.train.micro_batch_size or rows)
    while rows > _LEAST_ROWS:
        rows = max(_LEAST_ROWS, -(-rows // 2))
        yield Change({"train.micro_batch_size": rows}, "smaller products of matrices, so slower steps")


def _evaluation(config: Config, topology: Topology) -> Iterator[Change]:
    rows = config.train.eval_batch_size or config.train.global_batch_size
    while rows > _LEAST_ROWS * topology.world_size:
        rows = max(_LEAST_ROWS * topology.world_size, -(-rows // 4))
        yield Change({"train.eval_batch_size": rows}, "evaluations take longer")


def _checkpointing(config: Config, topology: Topology) -> Iterator[Change]:
    if not config.train.activation_checkpointing:
        yield Change({"train.activation_checkpointing": True}, "MLPs are computed twice")


def _dense_sharding(config: Config, topology: Topology) -> Iterator[Change]:
    if topology.world_size > 1 and config.optimizer.dense.name in ELEMENTWISE:
        yield Change({"train.dense_sharding": DenseSharding.optimizer}, "ranks send each other weights in each step")


def _prefetching(config: Config, topology: Topology) -> Iterator[Change]:
    if batches_ahead(config.data.prefetch_batches, topology.device) > 1:
        yield Change({"data.prefetch_batches": 1}, "training may wait for data")


def _row_wise(config: Config, topology: Topology) -> Iterator[Change]:
    whole = (ShardingChoice.data_parallel, ShardingChoice.table_wise)
    names = [name for name, table in config.tables.items() if table.sharding_type in whole]
    if topology.world_size > 1 and names and config.run.plan is None:
        settings = {f"tables.{name}.sharding_type": ShardingChoice.row_wise for name in names}
        yield Change(settings, "every rank is asked for rows of these tables")


def _caching(config: Config, topology: Topology) -> Iterator[Change]:
    if not topology.on_gpu or config.run.plan is not None:
        return
    excess = sum(_weight_bytes(t) for t in config.tables.values()) - topology.world_size * topology.device_bytes
    movables = {
        name: table
        for name, table in config.tables.items()
        if not config.updated_in_torch(name)
        and table.sharding_type is not ShardingChoice.data_parallel
        and table.compute_kernel is ComputeKernel.fused
    }
    least = 0  # as many as must go, before anything else is counted
    for table in sorted(movables.values(), key=_weight_bytes, reverse=True):
        if excess <= 0:
            break
        excess -= int(_weight_bytes(table) * (1 - table.cache_load_factor))
        least += 1
    for names in _largest(movables, least):
        settings = {f"tables.{name}.compute_kernel": ComputeKernel.fused_uvm_caching for name in names}
        yield Change(settings, "rows that the cache lacks come over the bus")


def _weight_bytes(table: TableConfig) -> int:
    return table.num_embeddings * table.embedding_dim * WEIGHT_BYTES[table.data_type]


def _largest(tables: Mapping[str, TableConfig], least: int = 0) -> Iterator[list[str]]:
    """Yield the names of the `least` largest tables, then of some more each time, and at last of all."""
    names = sorted(tables, key=lambda name: _weight_bytes(tables[name]), reverse=True)
    more = 0
    while least + more < len(names):
        if least + more:
            yield names[: least + more]
        more = more + 1 if more < _FINE_STEPS else 2 * more
    if names:
        yield names


def _windows(config: Config, topology: Topology) -> Iterator[Change]:
    size = config.data.window_mib
    while size > 1:
        size = max(1, size // 4)
        yield Change({"data.window_mib": size}, "rows come in another order, shuffled less far", Saver.row_order)


def _row_wise_state(config: Config, topology: Topology) -> Iterator[Change]:
    settings: dict[str, Any] = {}
    optimizers = {config.table_optimizer_key(table): config.table_optimizer(table) for table in config.tables}
    for key, optimizer in {"optimizer.tables": config.optimizer.tables, **optimizers}.items():
        row_wise = optimizer.name.value.row_wise
        if row_wise is not None and (topology.on_gpu or TableOptimizer[row_wise].value.trains_on_cpu):
            settings[f"{key}.name"] = TableOptimizer[row_wise]
    if settings:
        yield Change(settings, "one step size for a whole row", Saver.row_wise_state)


def _fp16(config: Config, topology: Topology) -> Iterator[Change]:
    for names in _largest({name: t for name, t in config.tables.items() if t.data_type is DataType.FP32}):
        settings = {f"tables.{name}.data_type": DataType.FP16 for name in names}
        yield Change(settings, "updates are rounded to 11 bits", Saver.fp16_tables)


def _autocast(config: Config, topology: Topology) -> Iterator[Change]:
    if config.precision.autocast is Autocast.none:
        settings = {"precision.autocast": Autocast.bf16}
        yield Change(settings, "products of matrices have 8 bits", Saver.bf16_autocast)


# From the cheapest to the dearest; each gives changes from the weakest to the strongest.
LEVERS: tuple[Callable[[Config, Topology], Iterator[Change]], ...] = (
    _evaluation,
    _micro_batches,
    _checkpointing,
    _dense_sharding,
    _prefetching,
    _row_wise,
    _caching,
    _windows,
    _autocast,
    _row_wise_state,
    _fp16,
)
