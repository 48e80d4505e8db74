"""Changes of settings that make a run need less memory, from the cheapest to the dearest."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from recsys.config import ComputeKernel, Config, DataType, ShardingChoice, TableConfig
from recsys.config.checks import check_sharding
from recsys.config.choices import ELEMENTWISE, Autocast, DenseSharding, Saver
from recsys.config.device import check_table_on_gpu
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError
from recsys.runtime.machine import Topology
from recsys.runtime.threads import batches_ahead, decode_in_processes, decoding_threads
from recsys.tables.bytes import WEIGHT_BYTES
from recsys.tables.updates import in_fbgemm

_LEAST_ROWS = 32  # of a micro-batch
_SHARES = 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01  # of a table's rows, in a cache
_FINE_STEPS = 4  # the first so many tables are changed one by one, then doubling numbers of them


@dataclass(frozen=True)
class Change:
    """Settings by key, their cost in words, and the saver that memory.allow must list (None: learns the same)."""

    settings: Mapping[str, Any]
    cost: str
    saver: Saver | None = None

    @property
    def full_cost(self) -> str:
        """The cost, with a note if what is learned changes."""
        return self.cost if self.saver is None else f"{self.cost}; what is learned changes"

    def __str__(self) -> str:
        return " ".join(f"{key}={_shown(value)}" for key, value in self.settings.items())


def with_changes(config: Config, changes: Sequence[Change]) -> Config:
    """Return the config with the settings of the changes."""
    for change in changes:
        for key, value in change.settings.items():
            config = _set(config, key.split("."), value)
    return config


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
        yield Change({"train.micro_batch_size": rows}, "smaller matrix products, so slower steps")


def _evaluation(config: Config, topology: Topology) -> Iterator[Change]:
    rows = config.train.eval_batch_size or config.train.global_batch_size
    least = max(_LEAST_ROWS * topology.world_size, config.data.num_streams)  # a batch has rows of each stream
    while rows > least:
        rows = max(least, -(-rows // 4))
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


def _threads(config: Config, topology: Topology) -> Iterator[Change]:
    threads = decoding_threads(config.data.num_threads, topology.device, topology.local_world_size)
    if decode_in_processes(config.data.processes, threads, topology.device):
        yield Change({"data.processes": False}, "the thread that trains waits for those that decode")


def _row_wise(config: Config, topology: Topology) -> Iterator[Change]:
    if topology.world_size == 1 or config.run.plan is not None:
        return
    # If a plan may choose how to split a table, it often leaves it whole on a rank too, even if little room is left.
    able = {
        name: table
        for name, table in config.tables.items()
        if table.sharding_type in (ShardingChoice.auto, ShardingChoice.data_parallel, ShardingChoice.table_wise)
        and not table.l2_all_rows
        and _is_accepted(_set(config, ["tables", name, "sharding_type"], ShardingChoice.row_wise), name, topology)
    }
    for names in _largest(able):
        settings = {f"tables.{name}.sharding_type": ShardingChoice.row_wise for name in names}
        yield Change(settings, "every rank is asked for rows of these tables")


def _caching(config: Config, topology: Topology) -> Iterator[Change]:
    if not topology.on_gpu or config.run.plan is not None:
        return
    excess = sum(_weight_bytes(t) for t in config.tables.values()) - topology.world_size * topology.device_bytes
    movables = {
        name: table
        for name, table in config.tables.items()
        if in_fbgemm(config, name, on_gpu=True)
        and table.sharding_type is not ShardingChoice.data_parallel
        and table.compute_kernel is ComputeKernel.fused
    }
    least = 0  # tables that have to go in any case, as all weights exceed the GPUs' memory
    for table in sorted(movables.values(), key=_weight_bytes, reverse=True):
        if excess <= 0:
            break
        excess -= int(_weight_bytes(table) * (1 - table.cache_load_factor))
        least += 1
    for names in _largest(movables, least):
        yield _to_host_memory(names)
    # Smaller caches, for the tables that are large enough to matter.
    weights = {name: _weight_bytes(table) for name, table in movables.items()}
    large = [name for name, weight in weights.items() if weight >= max(weights.values()) / 100]
    for share in _SHARES:
        if smaller := [name for name in large if movables[name].cache_load_factor > share]:
            yield _with_caches(_to_host_memory(large), smaller, share)


def _to_host_memory(tables: Sequence[str]) -> Change:
    settings = {f"tables.{name}.compute_kernel": ComputeKernel.fused_uvm_caching for name in tables}
    return Change(settings, "rows that are not in the cache come over the bus")


def roomier_caches(config: Config, change: Change) -> Iterator[Change]:
    """Yield variants of a change with larger caches for the tables it moves to host memory, the largest first."""
    moved = [key.split(".")[1] for key, value in change.settings.items() if value is ComputeKernel.fused_uvm_caching]
    config = with_changes(config, [change])
    for share in _SHARES:
        names = [name for name in moved if config.tables[name].cache_load_factor < share]
        if names:
            yield _with_caches(change, names, share)


def _with_caches(change: Change, tables: Sequence[str], share: float) -> Change:
    factors = {f"tables.{name}.cache_load_factor": share for name in tables}
    return replace(change, settings={**change.settings, **factors})


def _weight_bytes(table: TableConfig) -> int:
    return table.num_embeddings * table.embedding_dim * WEIGHT_BYTES[table.data_type]


def _largest(tables: Mapping[str, TableConfig], least: int = 0) -> Iterator[list[str]]:
    """Yield the names of the `least` largest tables, then of more and more tables, and finally of all."""
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
        if row_wise is None or not (topology.on_gpu or TableOptimizer[row_wise].value.trains_on_cpu):
            continue
        changed = _set(config, [*key.split("."), "name"], TableOptimizer[row_wise])
        if all(
            _is_accepted(changed, name, topology) for name in config.tables if config.table_optimizer_key(name) == key
        ):
            settings[f"{key}.name"] = TableOptimizer[row_wise]
    if settings:
        yield Change(settings, "one step size for a whole row", Saver.row_wise_state)


def _is_accepted(config: Config, table: str, topology: Topology) -> bool:
    """Return whether a table's sharding, optimizer and data type can be combined."""
    try:
        check_sharding(config, table, config.tables[table])
        if topology.on_gpu:
            check_table_on_gpu(config, table)
    except UserError:
        return False
    return True


def _fp16(config: Config, topology: Topology) -> Iterator[Change]:
    able = {
        name: table
        for name, table in config.tables.items()
        if table.data_type is DataType.FP32
        and _is_accepted(_set(config, ["tables", name, "data_type"], DataType.FP16), name, topology)
    }
    for names in _largest(able):
        settings = {f"tables.{name}.data_type": DataType.FP16 for name in names}
        yield Change(settings, "updates are rounded to 11 bits", Saver.fp16_tables)


def _autocast(config: Config, topology: Topology) -> Iterator[Change]:
    if config.precision.autocast is Autocast.none:
        settings = {"precision.autocast": Autocast.bf16}
        yield Change(settings, "matrix products have 8 bits", Saver.bf16_autocast)


# From the cheapest to the dearest; each yields changes from the weakest to the strongest.
LEVERS: tuple[Callable[[Config, Topology], Iterator[Change]], ...] = (
    _evaluation,
    _micro_batches,
    _checkpointing,
    _dense_sharding,
    _prefetching,
    _threads,
    _row_wise,
    _caching,
    _windows,
    _autocast,
    _row_wise_state,
    _fp16,
)
