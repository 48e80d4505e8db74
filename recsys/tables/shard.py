"""Sharding: plans from files, and the model wrapped to run on a plan."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import _remote_device
from torch.overrides import TorchFunctionMode
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from recsys.config import Config, ShardingChoice
from recsys.config.checks import check_sharding
from recsys.config.choices import MACHINE_SPLITS, FloatType
from recsys.errors import UserError, counted
from recsys.runtime.files import replace_file
from recsys.runtime.machine import Topology
from recsys.runtime.world import World
from recsys.tables.lookup import local_lookups
from recsys.tables.module_names import config_name, module_name
from recsys.tables.plan import fbgemm_output, make_plan, table_constraints
from recsys.tables.spec import Shard, vector_type
from recsys.tables.updates import attach_table_optimizers, is_table, lookups, table_of

_WIRES = {FloatType.FP32: CommType.FP32, FloatType.FP16: CommType.FP16, FloatType.BF16: CommType.BF16}


class TableSharder(EmbeddingBagCollectionSharder):
    """torchrec's sharder of pooled tables with all sharding types on every device.

    On CPU torchrec leaves out row-wise and the types built on it, since gloo once had no reduce_scatter. They work on
    gloo like on NCCL (meta-pytorch/torchrec#1252, #1396) if all ranks have equal batch sizes, which the loader ensures.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all sharding types, by their names in plans."""
        return [choice.value for choice in ShardingChoice if choice is not ShardingChoice.auto]


def _sharders(config: Config) -> list[Any]:
    wires, codecs = (config.precision.forward_wire, config.precision.backward_wire), None
    if wires != (FloatType.FP32, FloatType.FP32):
        codecs = get_qcomm_codecs_registry(
            QCommsConfig(forward_precision=_WIRES[wires[0]], backward_precision=_WIRES[wires[1]])
        )
    return [sharder(qcomm_codecs_registry=codecs) for sharder in (TableSharder, EmbeddingCollectionSharder)]


def plan_tables(step: nn.Module, config: Config, topology: Topology, must_fit: bool = True) -> ShardingPlan:
    """Return the plan in the file `run.plan`, or without one a plan of `make_plan` for the tables of `step`.

    Raises:
        UserError: the tables fit under no plan that the config allows; or the plan in the file is for other tables
            or another number of ranks, or contradicts the config.
    """
    if config.run.plan is not None:
        return _load_plan(step, Path(config.run.plan), config, topology)
    return make_plan(step, _sharders(config), config, topology, must_fit)


def save_plan(shards: Iterable[Shard], world_size: int, path: Path) -> None:
    """Write a plan as JSON: the number of ranks, and every shard of every table."""
    content = {"world_size": world_size, "shards": [asdict(shard) for shard in shards]}
    replace_file(path, json.dumps(content, indent=1) + "\n")


def _load_plan(step: nn.Module, path: Path, config: Config, topology: Topology) -> ShardingPlan:
    key = f"config key 'run.plan': '{path}'"
    try:
        content = json.loads(path.read_text())
        shards = [_read_shard(**shard) for shard in content["shards"]]
        world_size = content["world_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{key} is not a plan that a run has written ({' '.join(str(error).split())})") from error
    if world_size != topology.world_size:
        raise UserError(
            f"{key} is for {counted(world_size, 'rank')}, and this run has {topology.world_size}; start as many, or "
            f"drop it"
        )
    by_table: dict[str, list[Shard]] = {}
    for shard in sorted(shards, key=lambda shard: (shard.offset[1], shard.offset[0], shard.rank)):
        by_table.setdefault(shard.table, []).append(shard)
    for name in config.tables:
        if wrong := _wrong_shards(by_table.get(name, []), name, config, topology):
            raise UserError(f"{key} has table '{name}' {wrong}; drop the key, and a plan is made")
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for key in filter(is_table, dict(step.named_parameters())):
        # A key is `MODULE.embeddings.TABLE.weight`; there may be several modules.
        module, name = modules.setdefault(key.rsplit(".", 3)[0], EmbeddingModuleShardingPlan()), table_of(key)
        module[module_name(name)] = _parameter_sharding(by_table[name], config, topology)
    return ShardingPlan(dict(modules))


def _read_shard(
    table: str, rank: int, offset: list[int], size: list[int], sharding_type: str, compute_kernel: str
) -> Shard:
    """Return a shard of a plan's file; raises ValueError or TypeError if it is malformed."""
    (row, column), (rows, columns) = offset, size
    if not all(type(number) is int and number >= 0 for number in (rank, row, column, rows, columns)):
        raise ValueError(f"rank, offset and size of a piece must be whole numbers, found {rank}, {offset}, {size}")
    if ShardingChoice(sharding_type) is ShardingChoice.auto:
        raise ValueError("sharding_type is 'auto'")
    return Shard(str(table), rank, (row, column), (rows, columns), sharding_type, compute_kernel)


def _wrong_shards(shards: list[Shard], name: str, config: Config, topology: Topology) -> str:
    """Return why torchrec could not use these shards of a table with this config; an empty string if it could."""
    table, num_ranks, on_machine = config.tables[name], topology.world_size, topology.local_world_size
    shardings = {(shard.sharding_type, shard.compute_kernel) for shard in shards}
    if len(shardings) != 1:
        return f"in pieces of {len(shardings)} kinds"
    rows, columns = (max(shard.offset[i] + shard.size[i] for shard in shards) for i in (0, 1))
    if (rows, columns) != (table.num_embeddings, table.embedding_dim):
        return f"as {rows} × {columns}, and the config as {table.num_embeddings} × {table.embedding_dim}"
    choice, kernel = ShardingChoice(shards[0].sharding_type), shards[0].compute_kernel
    constraints = table_constraints(config, name, topology)
    is_planned = choice.value in (constraints.sharding_types or [])  # `table_wise` for all on one rank
    if table.sharding_type not in (choice, ShardingChoice.auto) and not is_planned:
        return f"as {choice.name}, and the config as tables.{name}.sharding_type={table.sharding_type.name}"
    kernels = constraints.compute_kernels or []
    expected = kernels[-1 if choice is ShardingChoice.data_parallel else 0]
    if kernel != expected:
        return f"with compute_kernel '{kernel}', and by the config it is '{expected}' here"
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(rows, columns, device="meta"), num_ranks, on_machine, choice.value, shards[0].size[1]
    )
    places = [(list(shard.size), list(shard.offset)) for shard in shards]
    if places != list(zip(sizes, offsets, strict=True)) or not _on_ranks(choice, [s.rank for s in shards], topology):
        return f"in pieces or on ranks that {choice.name} does not have on {num_ranks} ranks, {on_machine} a machine"
    try:
        check_sharding(config, name, replace(table, sharding_type=choice))
    except UserError as error:
        return f"as {choice.name}, which the config does not allow ({error})"
    return ""


def _on_ranks(choice: ShardingChoice, ranks: list[int], topology: Topology) -> bool:
    """Return whether shards may lie on these ranks; rows are split over the ranks of a machine, or over all ranks."""
    on_machine = topology.local_world_size
    if choice in (ShardingChoice.data_parallel, ShardingChoice.row_wise):
        return ranks == list(range(topology.world_size))
    if choice in MACHINE_SPLITS:
        first = [rank - rank % on_machine for rank in ranks[::on_machine]]
        if ranks != [start + number for start in first for number in range(on_machine)]:
            return False
    return max(ranks) < topology.world_size


def _parameter_sharding(table_shards: list[Shard], config: Config, topology: Topology) -> ParameterSharding:
    constraints = table_constraints(config, table_shards[0].table, topology)
    shards = [
        ShardMetadata(
            list(shard.offset),
            list(shard.size),
            f"rank:{shard.rank}/{f'cuda:{shard.rank % topology.local_world_size}' if topology.on_gpu else 'cpu'}",
        )
        for shard in table_shards
    ]
    return ParameterSharding(
        sharding_type=table_shards[0].sharding_type,
        compute_kernel=table_shards[0].compute_kernel,
        ranks=[shard.rank for shard in table_shards],
        sharding_spec=None if table_shards[0].is_replicated else EnumerableShardingSpec(shards),
        cache_params=constraints.cache_params,
        stochastic_rounding=constraints.stochastic_rounding,
        output_dtype=constraints.output_dtype,
    )


def shards_of(plan: ShardingPlan, config: Config, world_size: int) -> Iterator[Shard]:
    """Yield every shard of every table of a plan; a replicated table has one on each rank."""
    shardings = {config_name(name): sharding for module in plan.plan.values() for name, sharding in module.items()}
    for table, settings in config.tables.items():
        sharding = shardings[table]
        how = sharding.sharding_type, sharding.compute_kernel
        if sharding.sharding_spec is None:
            size = settings.num_embeddings, settings.embedding_dim
            yield from (Shard(table, rank, (0, 0), size, *how) for rank in range(world_size))
            continue
        for shard in sharding.sharding_spec.shards:
            yield Shard(table, shard.placement.rank(), tuple(shard.shard_offsets), tuple(shard.shard_sizes), *how)


class _NoDraws(TorchFunctionMode):
    """Skips torchrec's own initial weights, which one thread would draw twice; `fill_initial` sets them later."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.uniform_:
            return args[0]
        if function is torch.nn.init.uniform_:
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def shard_model(step: nn.Module, plan: ShardingPlan, config: Config, world: World) -> DistributedModelParallel:
    """Shard the tables of `step` by the plan, and move the rest to the device.

    With several ranks, `DenseHalf` exchanges the gradients of the dense part; torchrec's own wrapper would hook the
    backward pass of the tables too. The weights of the tables are not set. Collective.

    Raises:
        UserError: the plan splits a table over the ranks of a machine, and machines have different numbers of them.
    """
    _check_machines(plan, world)
    step.dense.to(world.device)
    tables = {table_of(key): weights for key, weights in step.named_parameters() if is_table(key)}
    attach_table_optimizers(tables, config, world.device.type == "cuda")
    _place(plan, world)
    with _NoDraws():
        model = DistributedModelParallel(
            step,
            env=ShardingEnv.from_process_group(world.group),
            device=world.device,
            plan=plan,
            sharders=_sharders(config),
            init_data_parallel=False,
        )
    vectors = fbgemm_output(config, world.device.type == "cuda")
    if vectors is not None:
        _set_empty_output_type(model, vectors)
    dense: Any = model.module.dense
    dense.gate.output_dtype = vector_type(config, world.device.type == "cuda")
    dense.late_exchange = world.device.type == "cuda"
    for lookup in lookups(model):
        dense.gate.guard(lookup)
    sharded: Any = model.module
    collections = sharded.embeddings, sharded.embeddings_by_id
    sharded.local, sharded.local_by_id = local_lookups(*collections, config, world, dense.gate)
    if world.world_size > 1:
        dense.replicate(world.device)
    return model


def _set_empty_output_type(model: nn.Module, vectors: DataType) -> None:
    """Give the empty output of ranks without tables the same type as that of other ranks; torchrec uses FP32."""
    for lookup in lookups(model):
        if isinstance(lookup, GroupedEmbeddingsLookup | GroupedPooledEmbeddingsLookup):
            empty = lookup._dummy_embs_tensor.detach().to(data_type_to_dtype(vectors))
            lookup._dummy_embs_tensor = empty.requires_grad_()


def _check_machines(plan: ShardingPlan, world: World) -> None:
    """Refuse a plan for which ranks would form different process groups, and wait for each other forever."""
    types = {config_name(name): s.sharding_type for module in plan.plan.values() for name, s in module.items()}
    split = [name for name, sharding in types.items() if ShardingChoice(sharding) in MACHINE_SPLITS]
    if split and len(sizes := {*world.gather(world.local_world_size)}) > 1:
        raise UserError(
            f"table '{split[0]}' is split as {ShardingChoice(types[split[0]]).name}, over the ranks of a machine, but "
            f"machines have {' and '.join(map(str, sorted(sizes)))} of them; start as many on each, or set "
            f"tables.{split[0]}.sharding_type=row_wise"
        )


def _place(plan: ShardingPlan, world: World) -> None:
    """Put this rank's device into the plan: torchrec's planner counts a machine's GPUs, but a rank may see only one."""
    for module in plan.plan.values():
        for sharding in module.values():
            if sharding.sharding_spec is None:  # of a replicated table
                continue
            for shard in sharding.sharding_spec.shards:
                if shard.placement.rank() == world.rank:
                    shard.placement = _remote_device(f"rank:{world.rank}/{world.device}")
