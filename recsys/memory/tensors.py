"""Bytes of the dense part and of tables: from shapes, and from the tensors that a rank holds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from recsys.config import Config
from recsys.config.schema import DenseOptimizer, DenseOptimizerConfig
from recsys.step.dense_shards import Layout, shards_dense
from recsys.tables.bytes import rank_tables
from recsys.tables.spec import Shard, local_shards

Bytes = dict[str, int]


def table_entries(
    config: Config, shards: Sequence[Shard], rank: int, weights: Mapping[str, Any], states: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the report's entry of each table with a shard on `rank`: predicted and measured bytes.

    Args:
        weights: by table. states: by TABLE/STATE. Both hold ShardedTensors, or tensors that every rank has whole.
    """
    entries = []
    for name, predicted in rank_tables(config, shards, rank).items():
        own = [shard for shard in shards if shard.rank == rank and shard.table == name]
        of_table = [value for state, value in states.items() if state.split("/")[0] == name]
        entries.append(
            {
                "name": name,
                "pieces": [{"offset": list(p.offset), "rows": p.size[0], "columns": p.size[1]} for p in own],
                "data_type": config.tables[name].data_type.name,
                "optimizer": config.table_optimizer(name).name.name,
                "sharding_type": own[0].sharding_type,
                "compute_kernel": own[0].compute_kernel,
                "predicted": {"weight_bytes": predicted.weight, "optimizer_bytes": predicted.optimizer},
                "measured": {"weight_bytes": _held_bytes(weights[name]), "optimizer_bytes": _held_bytes(*of_table)},
            }
        )
    return entries


def _held_bytes(*values: Any) -> int:
    return _num_bytes(tensor for value in values for tensor, _ in local_shards(value))


def predict_dense(dense: Any, config: Config, world_size: int) -> dict[str, Any]:
    """Return the bytes of `dense`, a `DenseHalf`, from the shapes of its parameters, before any step has been run.

    With several ranks, the gradients include `DenseHalf.sums`. `optimizer_bytes` is a tuple by rank.
    """
    shapes = [p.shape for p in dense.model.parameters() if p.requires_grad]
    sharded = shards_dense(config, world_size)
    layout = Layout.of(shapes, world_size if sharded else 1)
    state = [
        4 * sum(_dense_state_elements(layout.shape(cut), config.optimizer.dense) for cut in layout.slices(rank))
        for rank in range(len(layout.cuts) - 1)
    ]
    numbers = sum(shape.numel() for shape in shapes)
    return {
        "parameter_bytes": 4 * (layout.starts[-1] if sharded else numbers),
        "gradient_bytes": 4 * (numbers + (dense.sums.numel() if world_size > 1 else 0)),
        "optimizer_bytes": tuple(state if sharded else state * world_size),
    }


def _dense_state_elements(shape: torch.Size, optimizer: DenseOptimizerConfig) -> int:
    """Return how many FP32 numbers an optimizer keeps for a parameter, including counters and norms."""
    match optimizer.name:
        case DenseOptimizer.adam | DenseOptimizer.adamw:
            return 2 * shape.numel() + 1
        case DenseOptimizer.adagrad:
            return shape.numel() + 1
        case DenseOptimizer.lamb:
            return 2 * shape.numel() + 3
        case DenseOptimizer.adafactor:
            factors = shape.numel() // shape[-1] + shape.numel() // shape[-2] if len(shape) > 1 else shape.numel()
            return factors + 1
        case DenseOptimizer.sgd:
            return shape.numel() if optimizer.momentum else 0


def dense_update_bytes(dense: Any, config: Config) -> int:
    """Return the bytes that a step of the dense optimizer needs besides its state: updates of one parameter or of all.

    Optimizers that can be sharded are fused, and need none.
    """
    sizes = [4 * p.numel() for p in dense.model.parameters() if p.requires_grad]
    match config.optimizer.dense.name:
        case DenseOptimizer.adafactor:
            return max(sizes, default=0)
        case DenseOptimizer.lamb:
            return sum(sizes)
    return 0  # fused: each number is updated as it is read


def measure_dense(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, slices: Iterable[torch.Tensor] | None = None
) -> Bytes:
    """Return the measured bytes of a model's parameters, their gradients, and their state in an optimizer.

    Args:
        slices: the parts of the parameters that this rank's optimizer trains; default: all of them.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    trained = parameters if slices is None else slices
    states = [value for p in trained for value in optimizer.state.get(p, {}).values()]
    return {
        "parameter_bytes": storage_bytes(parameters),
        "gradient_bytes": gradient_bytes(parameters),
        "optimizer_bytes": _num_bytes(value for value in states if isinstance(value, torch.Tensor)),
    }


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the gradients that parameters have."""
    return storage_bytes(p.grad for p in parameters if p.grad is not None)


def storage_bytes(tensors: Any) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
