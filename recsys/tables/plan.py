"""Sharding plans by torchrec's planner, with exact bytes and a search bounded for hundreds of tables."""

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PerfModel,
    PlannerError,
    Proposer,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.planner.types import Shard as PlannerShard
from torchrec.distributed.planner.types import Topology as PlannerTopology
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType

from recsys.config import ComputeKernel, Config, ShardingChoice, TableConfig
from recsys.config.choices import COLUMN_SPLITS, UNPOOLED, FloatType
from recsys.errors import NoPlanError
from recsys.runtime.machine import Topology
from recsys.tables.bytes import cache_bytes, shard_bytes
from recsys.tables.module_names import config_name, module_name
from recsys.tables.spec import Shard

_RESERVED_SHARE = 0.15  # of memory, left for what the planner does not place, if a plan can leave as much
_LEAST_RESERVED = 0.05  # of host memory, otherwise: a system without free memory kills processes silently
_REPLICATED_ELEMENTS = 1 << 16  # the most of a table that the planner may replicate: a step works on all of them
# Proposals tried, which take 0.1 s each with 200 tables on 64 ranks; torchrec's own proposers may try thousands.
_GRID_PROPOSALS = 64
_GREEDY_PROPOSALS = 100
_MEMORY_BINS = 128
_ENOUGH = 1 << 60  # bytes, if a plan is made only to see how much it takes


def make_plan(step: nn.Module, sharders: list[Any], config: Config, topology: Topology, must_fit: bool) -> ShardingPlan:
    """Return the fastest plan, by torchrec's estimates, that leaves `_RESERVED_SHARE` of the memory free.

    If none does, return the plan whose fullest rank takes least, among those that fit at all. Whether the rest of the
    run fits too is for the memory prediction to say, which considers all memory.

    The same tables, config and topology give the same plan. The estimates are for GPUs and do not hold over gloo. So on
    CPUs, tables without a fixed sharding type each lie whole on one rank, if there are at least as many as ranks and
    they fit: on two ranks this exchanges half as much as splitting by rows.

    Args:
        step: holds the tables, which may be on the meta device.
        must_fit: if False and no plan fits, return the one whose fullest rank takes least, among those tried.

    Raises:
        NoPlanError: the tables fit under no plan that the config allows.
    """
    free = [name for name, table in config.tables.items() if _choice(table) is ShardingChoice.auto]
    device, host = topology.device_bytes, topology.host_share_bytes
    usual = int(device * (1 - _RESERVED_SHARE)), int(host * (1 - _RESERVED_SHARE))
    most = device, int(host * (1 - _LEAST_RESERVED))
    if not topology.on_gpu and len(free) >= topology.world_size > 1:
        whole = {name: replace(config.tables[name], sharding_type=ShardingChoice.table_wise) for name in free}
        with suppress(NoPlanError):
            of_whole = replace(config, tables={**config.tables, **whole})
            return _make_plan(step, sharders, of_whole, topology, *usual)
    with suppress(NoPlanError):
        return _make_plan(step, sharders, config, topology, *usual)
    with nullcontext() if must_fit else suppress(NoPlanError):
        return _make_plan(step, sharders, config, topology, *most, _FullestRank())
    return _make_plan(step, sharders, config, topology, _ENOUGH, _ENOUGH, _FullestRank())


def _make_plan(
    step: nn.Module,
    sharders: list[Any],
    config: Config,
    topology: Topology,
    device: int,
    host: int,
    preferred: PerfModel | None = None,
) -> ShardingPlan:
    """Return the best plan by `preferred` (default: speed) for ranks with so many bytes of GPU and host memory."""
    planned = PlannerTopology(
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        compute_device=topology.device.type,
        hbm_cap=device if topology.on_gpu else None,
        ddr_cap=host,
    )
    constraints = {module_name(name): table_constraints(config, name, topology) for name in config.tables}
    batch_size = max(1, config.train.global_batch_size // topology.world_size)
    estimators = [_Seconds(topology=planned, constraints=constraints), _Storage(config, topology)]
    planner = EmbeddingShardingPlanner(
        topology=planned,
        batch_size=batch_size,
        constraints=constraints,
        enumerator=_Enumerator(planned, batch_size, constraints, estimators),
        storage_reservation=FixedPercentageStorageReservation(0),
        proposer=_proposers(topology),
        performance_model=preferred,
        stats=[],
        debug=False,
    )
    try:
        return planner.plan(step, sharders)
    except PlannerError as error:
        raise NoPlanError(_fits_nowhere(config, topology)) from error


def _fits_nowhere(config: Config, topology: Topology) -> str:
    largest = max(
        config.tables, key=lambda name: config.tables[name].num_embeddings * config.tables[name].embedding_dim
    )
    table = config.tables[largest]
    host_bytes = topology.host_share_bytes * (1 - _LEAST_RESERVED)
    room = topology.device_bytes if topology.on_gpu else host_bytes
    host = f" and {host_bytes / 2**30:.1f} GiB of host memory"
    return (
        f"the tables fit under no plan for {topology.world_size} ranks with {room / 2**30:.1f} GiB"
        f"{host if topology.on_gpu else ''} each; the largest is tables.{largest} with "
        f"num_embeddings={table.num_embeddings} and embedding_dim={table.embedding_dim}: make it smaller, use more "
        f"ranks, leave tables.*.sharding_type=auto, or see what it takes with --dry-run"
    )


def _proposers(topology: Topology) -> list[Proposer]:
    proposers: list[Proposer] = [GridSearchProposer(_GRID_PROPOSALS), _BoundedGreedyProposer(), UniformProposer()]
    if topology.on_gpu:  # this one divides by the memory of GPUs
        proposers.insert(2, DynamicProgrammingProposer(max(1, _MEMORY_BINS // topology.world_size)))
    return proposers


class _Enumerator(EmbeddingEnumerator):
    """torchrec's enumerator in a fixed order: its own order comes from sets, so ties would be broken by chance."""

    def enumerate(self, module: nn.Module, sharders: list[Any]) -> list[ShardingOption]:
        options = super().enumerate(module, sharders)
        for option in options:
            option.shards = [_Shard(**vars(shard)) for shard in option.shards]
        return sorted(options, key=lambda option: (option.sharding_type, option.compute_kernel))


class _Shard(PlannerShard):
    """A shard whose copies share everything except the rank, since the planner changes nothing else in place.

    The planner copies each plan that is better than those before. For 200 tables on 128 ranks, full copies took most of
    the planning time.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shard":
        return _Shard(self.size, self.offset, self.storage, self.perf, self.rank)


class _BoundedGreedyProposer(GreedyProposer):
    """torchrec's greedy proposer, which would try every option of every table, stopped after `_GREEDY_PROPOSALS`."""

    def __init__(self) -> None:
        super().__init__()
        self._budget = _GREEDY_PROPOSALS

    def propose(self) -> list[ShardingOption] | None:
        self._budget -= 1
        return super().propose() if self._budget >= 0 else None


class _FullestRank(PerfModel):
    """Rates a plan by the bytes of its fullest rank."""

    def rate(self, plan: list[ShardingOption]) -> float:
        by_rank: dict[int, int] = {}
        for option in plan:
            for shard in option.shards:
                assert shard.storage is not None and shard.rank is not None
                by_rank[shard.rank] = by_rank.get(shard.rank, 0) + shard.storage.hbm + shard.storage.ddr
        return float(max(by_rank.values(), default=0))


class _Seconds(EmbeddingPerfEstimator):
    """torchrec's estimates, computed once for all shards of a table with the same size: they depend on nothing else.

    For 25 tables on 256 ranks, an estimate for each shard took more than half of the planning time.
    """

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        shards = [option.shards for option in sharding_options]
        for option in sharding_options:
            option.shards = list({tuple(shard.size): shard for shard in option.shards}.values())
        super().estimate(sharding_options, *args, **kwargs)
        for option, of_all_ranks in zip(sharding_options, shards, strict=True):
            by_size = {tuple(shard.size): shard.perf for shard in option.shards}
            option.shards = of_all_ranks
            for shard in of_all_ranks:
                shard.perf = by_size[tuple(shard.size)]


class _Storage(ShardEstimator):
    """Exact bytes of shards, instead of torchrec's estimates.

    torchrec counts the FP32 state of an FP16 table at half its size, and one state for LAMB, which has two.
    """

    def __init__(self, config: Config, topology: Topology) -> None:
        self._config, self._topology = config, topology

    def estimate(self, sharding_options: list[ShardingOption], *_: Any, **__: Any) -> None:
        """Set the storage of each shard; versions of torchrec add different arguments, by position or by keyword."""
        for option in sharding_options:
            by_size = {size: self._of(option, *size) for size in {tuple(shard.size) for shard in option.shards}}
            for shard in option.shards:
                shard.storage = by_size[tuple(shard.size)]

    def _of(self, option: ShardingOption, rows: int, columns: int) -> Storage:
        table, kernel = config_name(option.name), option.compute_kernel
        table_bytes = shard_bytes(self._config, table, rows, columns, kernel)
        shard = Shard(table, 0, (0, 0), (rows, columns), option.sharding_type, kernel)
        table_bytes += cache_bytes(self._config, [shard])
        if self._topology.on_gpu:
            return Storage(hbm=table_bytes.device, ddr=table_bytes.host)
        return Storage(hbm=0, ddr=table_bytes.device + table_bytes.host)


def table_constraints(config: Config, table: str, topology: Topology) -> ParameterConstraints:
    """Return a table's constraints for torchrec's planner."""
    choice = _choice(config.tables[table])
    if topology.world_size == 1 and choice is not ShardingChoice.data_parallel:
        choice = ShardingChoice.table_wise  # nothing is split, and other types would exchange ids needlessly
    types = _automatic_types(config, table) if choice is ShardingChoice.auto else [choice]
    num_features = sum(feature.table == table for feature in config.features.values())
    settings = config.tables[table]
    kernel = settings.compute_kernel if topology.on_gpu else ComputeKernel.fused
    return ParameterConstraints(
        sharding_types=[sharding.value for sharding in types],
        compute_kernels=[kernel.value, EmbeddingComputeKernel.DENSE.value],
        cache_params=(
            CacheParams(load_factor=settings.cache_load_factor) if kernel is ComputeKernel.fused_uvm_caching else None
        ),
        pooling_factors=[1.0] * num_features,
        stochastic_rounding=settings.stochastic_rounding,  # on by default in torchrec on GPUs
        output_dtype=fbgemm_output(config, topology.on_gpu),
    )


def _choice(table: TableConfig) -> ShardingChoice:
    """Return a table's sharding type; a table with a penalty on all rows has to be replicated."""
    return ShardingChoice.data_parallel if table.l2_all_rows else table.sharding_type


def fbgemm_output(config: Config, on_gpu: bool) -> DataType | None:
    """Return the type of the vectors that FBGEMM returns, and of their gradients; None: FP32.

    FP16 cannot hold gradients of the mean over a large batch, so vectors are rounded to FP16 after FBGEMM.
    """
    return DataType.BF16 if on_gpu and config.precision.output_dtype is FloatType.BF16 else None


def _automatic_types(config: Config, table: str) -> Iterable[ShardingChoice]:
    settings, optimizer = config.tables[table], config.table_optimizer(table)
    types = [ShardingChoice.table_wise, ShardingChoice.row_wise, ShardingChoice.table_row_wise]
    whole_rows = settings.sparsity is not None and settings.sparsity.group_lasso > 0
    if not whole_rows and (not optimizer.name.is_row_wise or optimizer.allow_column_split):
        types += COLUMN_SPLITS
    small = settings.num_embeddings * settings.embedding_dim <= _REPLICATED_ELEMENTS
    if small and optimizer.name.value.in_torch and not optimizer.weight_decay:
        types.append(ShardingChoice.data_parallel)
    return [choice for choice in types if choice in UNPOOLED] if table in config.unpooled_tables() else types
