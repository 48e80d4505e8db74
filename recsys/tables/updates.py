"""What updates the tables on a rank: FBGEMM's kernels, or rules in torch if FBGEMM has none."""

import pydoc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, TensorProperties
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.optimizers import SGD

from recsys.config import Config, TableOptimizerConfig
from recsys.config.choices import StateType
from recsys.runtime.world import World
from recsys.tables.by_id import look_up_as_sums
from recsys.tables.module_names import config_name
from recsys.tables.replicated import ReplicatedTables
from recsys.tables.torch_update import TorchTable, update_in_torch

Offsets = tuple[int, ...]


class _StateTypes(dict[str, SparseType]):
    """Types by name of the state, as FBGEMM expects them; hashable, since torchrec groups tables by their arguments."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((name, dtype.value) for name, dtype in self.items())))


def attach_table_optimizers(parameters: Mapping[str, nn.Parameter], config: Config, on_gpu: bool) -> None:
    """Mark the tables, before they are sharded, to be updated in the backward pass by FBGEMM.

    Args:
        parameters: weights by table.
    """
    for table, parameter in parameters.items():
        settings = config.table_optimizer(table)
        rule = settings.name.value
        if rule.path is None or not in_fbgemm(config, table, on_gpu):
            # FBGEMM needs some optimizer, though `update_in_torch` lets no gradient reach it.
            apply_optimizer_in_backward(SGD, [parameter], {"lr": 0.0})
            continue
        arguments: dict[str, Any] = {name: getattr(settings, name) for name in rule.numbers}
        arguments["lr"] = settings.learning_rate
        if settings.weight_decay:
            arguments["weight_decay"] = settings.weight_decay
        if settings.state_dtype is StateType.BF16:
            arguments["optimizer_state_dtypes"] = _StateTypes(momentum1=SparseType.BF16)
        apply_optimizer_in_backward(pydoc.locate(rule.path), [parameter], arguments)
        if settings.weight_decay and rule.decay_has_modes:
            # FBGEMM has three modes of weight decay, and no decay by default. torchrec passes these arguments on when
            # it shards. Only its optimizer class does not accept this one, so it is added after that has been built.
            arguments["weight_decay_mode"] = WeightDecayMode.DECOUPLE


def in_fbgemm(config: Config, table: str, on_gpu: bool) -> bool:
    """Return whether FBGEMM, not a rule in torch, updates a table that is not replicated."""
    rule, data_type = config.table_optimizer(table).name.value, config.tables[table].data_type
    return rule.in_fbgemm(on_gpu, data_type) and not config.updated_in_torch(table)


class TableUpdates:
    """Updates of the tables on this rank of a sharded model.

    Attributes:
        replicated: trains the replicated tables, which are taken out of autograd.
    """

    def __init__(self, model: DistributedModelParallel, config: Config, world: World) -> None:
        self._model, on_gpu = model, world.device.type == "cuda"
        self._fbgemm: list[tuple[TableOptimizerConfig, list[str], Any]] = []
        self._shards: list[TorchTable] = []
        for kernel in kernels(model, FusedOptimizerModule):
            tables = [config_name(table.name) for table in kernel.config.embedding_tables]
            if all(in_fbgemm(config, table, on_gpu) for table in tables):
                settings = config.table_optimizer(tables[0])  # all have the same optimizer
                self._fbgemm.append((settings, tables, kernel.emb_module))
                if not on_gpu and kernel.emb_module.pooling_mode is PoolingMode.NONE:
                    look_up_as_sums(kernel.emb_module)
            else:
                shards = _torch_tables(kernel, config)
                update_in_torch(kernel, shards)
                self._shards += shards
            if not on_gpu:
                _allow_no_rows(kernel.emb_module)
        replicas: list[TorchTable] = []
        for kernel in kernels(model, BatchedDenseEmbeddingBag):
            kernel.emb_module.weights.requires_grad_(False)
            replicas += _torch_tables(kernel, config)
        # With two parts, one process on a CPU sums like two processes; see `recsys.models.halves`.
        self.replicated = ReplicatedTables(replicas, 2 if not on_gpu and world.world_size == 1 else 1)

    def begin(self, factor: float, updates_of: Callable[[str], int]) -> None:
        """Set learning rates (those of the config times `factor`) and numbers of updates before a step.

        FBGEMM itself counts forward passes, also of evaluations and skipped steps. It has one count for all tables of
        a kernel, so a new table among older ones is treated as if its rows were first looked up late.

        Args:
            updates_of: returns the number of updates that a table has had.
        """
        for settings, tables, fbgemm in self._fbgemm:
            fbgemm.set_learning_rate(settings.learning_rate * factor)
            if settings.name.value.counts_updates:
                num_updates = max(map(updates_of, tables))
                # If the counter on the host is 0, FBGEMM uses the one that checkpoints hold.
                fbgemm.iter_cpu = fbgemm.iter_cpu.cpu().fill_(num_updates)
                fbgemm.iter.fill_(num_updates)
        for table in (*self._shards, *self.replicated.tables):
            table.learning_rate, table.num_updates = table.settings.learning_rate * factor, updates_of(table.name)

    def forget_caches(self) -> None:
        """Drop the GPU's cached rows of tables in host memory, after these tables were changed."""
        for _, _, fbgemm in self._fbgemm:
            fbgemm.reset_cache_states()

    def state(self) -> dict[str, Any]:
        """Return the state of the optimizers by `TABLE/STATE`: ShardedTensors, and tensors of replicated tables."""
        tensors: dict[str, Any] = {}
        for key, states in self._model.fused_optimizer.state_dict()["state"].items():
            table = table_of(key)
            for name, value in states.items():
                if hasattr(value, "local_shards"):
                    tensors[f"{table}/{name.rpartition('.')[2]}"] = value
        shards = {(shard.name, shard.offset): shard.state for shard in self._shards}
        weights = table_tensors(self._model) if shards else {}
        for table in sorted({name for name, _ in shards}):
            tensors |= _sharded_state(table, weights[table], shards)
        for replica in self.replicated.tables:
            tensors |= {_state_name(replica.name, number): values for number, values in enumerate(replica.state)}
        return tensors


def _allow_no_rows(fbgemm: Any) -> None:
    """Let tables in host memory have no row on this rank, as happens with fewer rows than ranks.

    Without any weights FBGEMM would look for a GPU. And it treats features whose tables begin at the same row as those
    of one table, so a table without rows would be mixed up with the next, which may have another width.
    """
    if not fbgemm.weights_host.numel():
        fbgemm.weights_host = nn.Parameter(fbgemm.weights_host.new_zeros(fbgemm.max_D))
    ends, tables = fbgemm.hash_size_cumsum, torch.tensor([*fbgemm.feature_table_map, -1])
    ends[1:] += ((ends.diff() == 0) & (tables.diff() != 0)).cumsum(0)


def _torch_tables(kernel: Any, config: Config) -> list[TorchTable]:
    """Return a kernel's tables, in their order."""
    tables = []
    for table, weights in zip(kernel.config.embedding_tables, kernel.emb_module.split_embedding_weights(), strict=True):
        name, offsets = place_of(table)
        optimizer, settings = config.table_optimizer(name), config.tables[name]
        tables.append(
            TorchTable(name, weights, optimizer, settings.sparsity, offsets, table.feature_names, settings.l2_all_rows)
        )
    return tables


def place_of(table: Any) -> tuple[str, Offsets]:
    """Return a table's name, and the row and column where this rank's shard begins, from its config in a kernel."""
    shard = table.local_metadata  # None for a replicated table
    return config_name(table.name), (0, 0) if shard is None else tuple(shard.shard_offsets)


def _sharded_state(
    table: str, weights: ShardedTensor, shards: Mapping[tuple[str, Offsets], list[torch.Tensor]]
) -> dict[str, ShardedTensor]:
    """Return the states of a table that is updated in torch, sharded as its weights are."""
    by_shard = [
        (shard.metadata, shards[table, tuple(shard.metadata.shard_offsets)]) for shard in weights.local_shards()
    ]
    metadata = replace(weights.metadata(), tensor_properties=TensorProperties(torch.float32))
    return {
        _state_name(table, number): ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(states[number], place) for place, states in by_shard], metadata
        )
        for number in range(len(by_shard[0][1]))
    }


def _state_name(table: str, number: int) -> str:
    return f"{table}/momentum{number + 1}"  # as FBGEMM names its own


def table_tensors(model: DistributedModelParallel) -> dict[str, Any]:
    """Return the weights of the tables by name: a ShardedTensor, or a tensor of a replicated table."""
    return {table_of(key): value for key, value in model.state_dict().items() if is_table(key)}


def is_table(key: str) -> bool:
    """Return whether a key of a step's state dict belongs to a table."""
    return not key.startswith("dense.")


def table_of(key: str) -> str:
    """Return the table of a key for which `is_table` holds."""
    return config_name(key.removesuffix(".weight").rpartition(".")[2])


def kernels(model: DistributedModelParallel, kernel_type: type) -> Iterator[Any]:
    """Yield the kernels of a type on this rank; torchrec keeps lookups in lists, which `modules()` does not see."""
    for lookup in lookups(model):
        yield from (m for m in lookup.modules() if isinstance(m, kernel_type) and hasattr(m, "emb_module"))


def lookups(model: nn.Module) -> Iterator[nn.Module]:
    """Yield torchrec's local lookup modules on this rank, one for each sharding type."""
    for sharded in model.modules():
        if isinstance(sharded, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            yield from sharded._lookups
