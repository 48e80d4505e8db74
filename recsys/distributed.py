"""The sharding plan, and the model wrapped to run on it."""

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType

from recsys.config import Config, ShardingChoice
from recsys.config.schema import TableOptimizer
from recsys.errors import UserError
from recsys.process_group import World
from recsys.tables import Shard

_RESERVED_SHARE = 0.15  # of memory, for what the planner does not place


class TableSharder(EmbeddingBagCollectionSharder):
    """torchrec's sharder with row-wise sharding on every device.

    torchrec leaves row-wise out on CPU, from before gloo had reduce_scatter; it runs there as on NCCL
    (meta-pytorch/torchrec#1252, #1396), given equal batch sizes on all ranks, which the loader ensures.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value, ShardingType.COLUMN_WISE.value]


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
        constraints={name: _constraints(config, name) for name in config.tables},
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


def _constraints(config: Config, table: str) -> ParameterConstraints:
    choice = config.tables[table].sharding_type
    if choice is not ShardingChoice.auto:
        types = [choice.value]
    else:
        types = [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]
        if config.optimizer.tables.name is not TableOptimizer.rowwise_adagrad:
            types.append(ShardingType.COLUMN_WISE.value)
    num_features = sum(feature.table == table for feature in config.features.values())
    return ParameterConstraints(
        sharding_types=types,
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
        pooling_factors=[1.0] * num_features,
        stochastic_rounding=False,  # on GPUs the default, and what it draws depends on the plan
    )


def shards(plan: ShardingPlan) -> Iterator[Shard]:
    """Yield every piece of every table of a plan."""
    for module in plan.plan.values():
        for table, sharding in module.items():
            for piece in sharding.sharding_spec.shards:
                yield Shard(
                    table,
                    piece.placement.rank(),
                    tuple(piece.shard_offsets),
                    tuple(piece.shard_sizes),
                    sharding.sharding_type,
                    sharding.compute_kernel,
                )


def describe_plan(plan: ShardingPlan) -> list[str]:
    """Return a line a table: its sharding type and which rank holds which rows."""
    lines: dict[str, list[str]] = {}
    for shard in shards(plan):
        rows = f"rank {shard.rank}: {shard.size[0]:,} × {shard.size[1]}"
        lines.setdefault(f"{shard.table} {shard.sharding_type} ({shard.compute_kernel})", []).append(rows)
    return [f"{head}: {'; '.join(places)}" for head, places in lines.items()]


def shard_model(step: nn.Module, plan: ShardingPlan, world: World) -> DistributedModelParallel:
    """Shard the tables of `step` by the plan, and move the rest to the device.

    `step.dense.task.model` is wrapped in DistributedDataParallel of its own; torchrec's wrapping of the whole
    dense part is left out, because it would hook the tables' backward too.
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
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    task.model = DistributedDataParallel(task.model, device_ids=device_ids, gradient_as_bucket_view=True)
    return model


def for_each_local_shard(tensors: dict[str, Any], action: Callable[[str, torch.Tensor, tuple[int, ...]], None]) -> None:
    """Call `action(name, tensor, offsets)` for each piece on this rank of ShardedTensors by name."""
    for name, value in tensors.items():
        for piece in value.local_shards():
            action(name, piece.tensor, tuple(piece.metadata.shard_offsets))


def table_tensors(model: DistributedModelParallel) -> dict[str, Any]:
    """Return the weights of the sharded tables, as ShardedTensors by table name."""
    suffix = ".weight"
    return {
        key.removesuffix(suffix).rpartition(".")[2]: value
        for key, value in model.state_dict().items()
        if hasattr(value, "local_shards")
    }


def table_optimizer_tensors(model: DistributedModelParallel) -> dict[str, Any]:
    """Return the state of the tables' optimizer, as ShardedTensors by `TABLE/STATE`."""
    found = {}
    for key, states in model.fused_optimizer.state_dict()["state"].items():
        table = key.removesuffix(".weight").rpartition(".")[2]
        for name, value in states.items():
            if hasattr(value, "local_shards"):
                found[f"{table}/{name.rpartition('.')[2]}"] = value
    return found
