"""The sharding plan, and the model wrapped to run on it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.fused import FusedOptimizerModule

from recsys.config import Config, Pooling, ShardingChoice
from recsys.config.checks import REPLICATED, ROWWISE
from recsys.config.schema import COLUMN_SPLITS
from recsys.errors import UserError
from recsys.process_group import World
from recsys.replicated import ReplicatedTable, ReplicatedTables
from recsys.tables import Shard

_RESERVED_SHARE = 0.15  # of memory, for what the planner does not place
_REPLICATED_ELEMENTS = 1 << 16  # of a table, up to which the planner may replicate it: a step works on all of them


class TableSharder(EmbeddingBagCollectionSharder):
    """torchrec's sharder with all sharding types on every device.

    torchrec leaves row-wise and what builds on it out on CPU, from before gloo had reduce_scatter; they run there as on
    NCCL (meta-pytorch/torchrec#1252, #1396), given equal batch sizes on all ranks, which the loader ensures.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [choice.value for choice in ShardingChoice if choice is not ShardingChoice.auto]


def plan_tables(step: nn.Module, config: Config, world: World) -> ShardingPlan:
    """Return torchrec's plan for the tables of `step`, made on rank 0 and the same on every rank.

    Raises:
        UserError: on every rank, when the tables fit under no plan that the config allows.
    """
    return world.from_rank_zero(lambda: _plan(step, config, world))


def _plan(step: nn.Module, config: Config, world: World) -> ShardingPlan:
    host_bytes = psutil.virtual_memory().total // world.local_world_size
    on_gpu = world.device.type == "cuda"
    topology = Topology(
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        compute_device=world.device.type,
        hbm_cap=torch.cuda.get_device_properties(world.device).total_memory if on_gpu else None,
        ddr_cap=host_bytes,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=config.train.global_batch_size // world.world_size,
        constraints={name: _constraints(config, name, world.world_size) for name in config.tables},
        storage_reservation=FixedPercentageStorageReservation(_RESERVED_SHARE),
        debug=False,
    )
    try:
        return planner.plan(step, [TableSharder()])
    except PlannerError as error:
        largest = max(
            config.tables, key=lambda name: config.tables[name].num_embeddings * config.tables[name].embedding_dim
        )
        table = config.tables[largest]
        raise UserError(
            f"the tables fit under no plan for {world.world_size} ranks with {_gib(topology)} GiB each; the largest is "
            f"tables.{largest} with num_embeddings={table.num_embeddings} and embedding_dim={table.embedding_dim}: "
            f"make it smaller, use more ranks, or leave tables.*.sharding_type=auto"
        ) from error


def _gib(topology: Topology) -> str:
    storage = topology.devices[0].storage
    return f"{(storage.hbm or storage.ddr) * (1 - _RESERVED_SHARE) / 2**30:.1f}"


def _constraints(config: Config, table: str, world_size: int) -> ParameterConstraints:
    choice = config.tables[table].sharding_type
    types = [choice] if choice is not ShardingChoice.auto else _automatic_types(config, table, world_size)
    num_features = sum(feature.table == table for feature in config.features.values())
    return ParameterConstraints(
        sharding_types=[each.value for each in types],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value],
        pooling_factors=[1.0] * num_features,
        stochastic_rounding=False,  # on GPUs the default, and what it draws depends on the plan
    )


def _automatic_types(config: Config, table: str, world_size: int) -> list[ShardingChoice]:
    if world_size == 1:
        return [ShardingChoice.table_wise]  # the planner takes any, and this one exchanges least
    settings, optimizer = config.tables[table], config.table_optimizer(table)
    types = [ShardingChoice.table_wise, ShardingChoice.row_wise, ShardingChoice.table_row_wise]
    if optimizer.name not in ROWWISE or optimizer.allow_column_split:
        types += [
            t for t in COLUMN_SPLITS if t is not ShardingChoice.grid_shard or settings.pooling is not Pooling.mean
        ]
    if optimizer.name in REPLICATED and settings.num_embeddings * settings.embedding_dim <= _REPLICATED_ELEMENTS:
        types.append(ShardingChoice.data_parallel)
    return types


def shards(plan: ShardingPlan, config: Config, world_size: int) -> Iterator[Shard]:
    """Yield every piece of every table of a plan; a replicated table is a piece on each rank."""
    for module in plan.plan.values():
        for table, sharding in module.items():
            how = sharding.sharding_type, sharding.compute_kernel
            if sharding.sharding_spec is None:
                size = config.tables[table].num_embeddings, config.tables[table].embedding_dim
                yield from (Shard(table, rank, (0, 0), size, *how) for rank in range(world_size))
                continue
            for piece in sharding.sharding_spec.shards:
                yield Shard(table, piece.placement.rank(), tuple(piece.shard_offsets), tuple(piece.shard_sizes), *how)


def describe_plan(pieces: Iterable[Shard]) -> list[str]:
    """Return a line a table: its sharding type and which rank holds which rows."""
    lines: dict[str, list[str]] = {}
    for shard in pieces:
        rows = f"rank {shard.rank}: {shard.size[0]:,} × {shard.size[1]}"
        lines.setdefault(f"{shard.table} {shard.sharding_type} ({shard.compute_kernel})", []).append(rows)
    return [f"{head}: {'; '.join(places)}" for head, places in lines.items()]


def shard_model(step: nn.Module, plan: ShardingPlan, world: World) -> DistributedModelParallel:
    """Shard the tables of `step` by the plan, and move the rest to the device.

    With several ranks `step.dense.task.model` is wrapped in DistributedDataParallel of its own; torchrec's wrapping of
    the whole dense part is left out, because it would hook the tables' backward too.
    """
    step.dense.to(world.device)
    model = DistributedModelParallel(
        step,
        env=ShardingEnv.from_process_group(world.group),
        device=world.device,
        plan=plan,
        sharders=[TableSharder()],
        init_data_parallel=False,
    )
    task: Any = model.module.dense.task
    if world.world_size > 1:
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        task.model = DistributedDataParallel(task.model, device_ids=device_ids, gradient_as_bucket_view=True)
    return model


def for_each_local_shard(tensors: dict[str, Any], action: Callable[[str, torch.Tensor, tuple[int, ...]], None]) -> None:
    """Call `action(name, tensor, offsets)` for each piece on this rank of ShardedTensors, or whole tensors, by name."""
    for name, value in tensors.items():
        for tensor, offsets in local_pieces(value):
            action(name, tensor, offsets)


def local_pieces(value: Any) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the pieces on this rank, each with its offsets, of a ShardedTensor or of a tensor that all ranks hold."""
    if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
        yield value, (0,) * value.dim()
    else:
        for piece in value.local_shards():
            yield piece.tensor, tuple(piece.metadata.shard_offsets)


def table_tensors(model: DistributedModelParallel) -> dict[str, Any]:
    """Return the weights of the tables by name, as ShardedTensors, or tensors where every rank holds all of a table."""
    suffix, inside = ".weight", ".embedding_bags."
    return {
        key.removesuffix(suffix).rpartition(inside)[2]: value
        for key, value in model.state_dict().items()
        if inside in f".{key}"
    }


def table_optimizer_tensors(model: DistributedModelParallel, replicated: ReplicatedTables) -> dict[str, Any]:
    """Return the state of the tables' optimizers by `TABLE/STATE`, as `table_tensors` does."""
    found: dict[str, Any] = {}
    for key, states in model.fused_optimizer.state_dict()["state"].items():
        table = key.removesuffix(".weight").rpartition(".")[2]
        for name, value in states.items():
            if hasattr(value, "local_shards"):
                found[f"{table}/{name.rpartition('.')[2]}"] = value
    return found | replicated.tensors()


def replicated_tables(model: DistributedModelParallel, config: Config) -> ReplicatedTables:
    """Take the tables that every rank holds out of autograd, and return what trains them."""
    weights, tables = table_tensors(model), []
    for kernel in _kernels(model, BatchedDenseEmbeddingBag):
        kernel.emb_module.weights.requires_grad_(False)
        for table in kernel.config.embedding_tables:
            settings = config.tables[table.name]
            tables.append(
                ReplicatedTable(
                    table.name,
                    weights[table.name].detach(),
                    table.feature_names,
                    settings.pooling,
                    config.table_optimizer(table.name),
                )
            )
    return ReplicatedTables(tables)


def learning_rate_setters(
    model: DistributedModelParallel, replicated: ReplicatedTables
) -> list[tuple[str, Callable[[float], None]]]:
    """Return what sets the learning rate of each table on this rank, after the table's name."""
    setters: list[tuple[str, Callable[[float], None]]] = [
        (table.name, table.set_learning_rate) for table in replicated.tables
    ]
    for kernel in _kernels(model, FusedOptimizerModule):
        # Tables of one kernel have one optimizer, so that the first stands for all.
        setters.append((kernel.config.embedding_tables[0].name, kernel.emb_module.set_learning_rate))
    return setters


def _kernels(model: DistributedModelParallel, kind: type) -> Iterator[Any]:
    """Yield the kernels of a kind on this rank; torchrec keeps them in a plain list, out of sight of `modules()`."""
    for sharded in model.modules():
        if isinstance(sharded, ShardedEmbeddingBagCollection):
            for lookup in sharded._lookups:
                yield from (m for m in lookup.modules() if isinstance(m, kind) and hasattr(m, "emb_module"))
