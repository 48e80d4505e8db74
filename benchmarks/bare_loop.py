"""The bare torchrec loop that benchmarks compare with: torchrec's own DLRM, sharded, in its pipeline."""

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch as BareBatch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys.data.batch import Batch
from recsys.runtime.world import World
from recsys.tables.shard import TableSharder

Make = Callable[[EmbeddingBagCollection, int, torch.device], torch.nn.Module]


class Bare:
    """torchrec as its examples use it: DLRMTrain, DistributedModelParallel, TrainPipelineSparseDist.

    Args:
        batches: trained again and again. rows: of the table of each key. dim: of all tables.
        make: returns torchrec's model for tables, a number of floats and a device.
        sharding: of all tables; None: as torchrec's planner chooses.
    """

    def __init__(
        self,
        batches: list[BareBatch],
        world: World,
        rows: Mapping[str, int],
        dim: int,
        make: Make,
        sharding: str | None = None,
    ) -> None:
        device = self._device = world.device
        self._world_size = world.world_size
        tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=f"t_{key}", embedding_dim=dim, num_embeddings=number, feature_names=[key])
                for key, number in rows.items()
            ],
        )
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
        train = DLRMTrain(make(tables, batches[0].dense_features.shape[1], device))
        sharders, plan = [TableSharder()], None  # torchrec's own, with row-wise sharding on CPU
        if sharding is not None:
            constraints = {f"t_{key}": ParameterConstraints(sharding_types=[sharding]) for key in rows}
            on_gpu = device.type == "cuda"  # torchrec would assume 32 GiB on any GPU
            memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
            topology = Topology(world.world_size, device.type, hbm_cap=memory)
            plan = EmbeddingShardingPlanner(topology, constraints=constraints).collective_plan(train, sharders)
        model = DistributedModelParallel(train, device=device, sharders=sharders if sharding else None, plan=plan)
        optimizer = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adam(params, 1e-3)
        )
        self._pipeline = TrainPipelineSparseDist(model, optimizer, device)
        self.batches: Iterator[BareBatch] = cycle(batches)
        self._rows = batches[0].dense_features.shape[0]

    def progress(self, batches: Iterator[BareBatch]) -> None:
        """Train a step."""
        self._pipeline.progress(batches)

    def measure(self, steps: int, num_threads: int) -> float:
        """Train `steps` steps; return rows/s."""
        torch.set_num_threads(num_threads)
        start = now(self._device)
        for _ in range(steps):
            self._pipeline.progress(self.batches)
        return steps * self._rows * self._world_size / (now(self._device) - start)


def bare_batch(batch: Batch) -> BareBatch:
    """Return a copy of a batch of our loader as torchrec's Batch."""
    ids = batch.ids
    return BareBatch(
        dense_features=batch.floats.clone(),
        sparse_features=KeyedJaggedTensor(ids.keys(), ids.values().long(), lengths=ids.lengths().clone()),
        labels=batch.labels[:, 0].clone(),
    )


def pinned(batch: BareBatch, device: torch.device) -> BareBatch:
    """Return a batch in page-locked memory, if it is for a GPU."""
    return batch.pin_memory() if device.type == "cuda" else batch


def now(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
