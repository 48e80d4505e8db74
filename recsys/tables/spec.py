"""Tables in torchrec's terms, and initial weights that depend on (seed, table, row, column) alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.modules.embedding_configs import DataType as TorchrecDataType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recsys.config import ComputeKernel, Config, DataType, ShardingChoice, TableConfig
from recsys.config.choices import FloatType
from recsys.config.features import features_by_table, has_weighted_ids
from recsys.runtime.counter_random import make_key, uniform_numbers
from recsys.runtime.uniform import uniform
from recsys.tables.module_names import module_name

_DATA_TYPES = {
    DataType.FP32: TorchrecDataType.FP32,
    DataType.FP16: TorchrecDataType.FP16,
    DataType.FP8: TorchrecDataType.NFP8,
}
_VECTOR_TYPES = {FloatType.FP32: torch.float32, FloatType.FP16: torch.float16, FloatType.BF16: torch.bfloat16}
# Elements drawn at a time: on CPU few, since glibc keeps freed memory of large temporaries; on GPU many, since each
# kernel has a fixed cost.
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
_BY_ONE_THREAD = (1 << 15) - 1  # most elements that torch copies in the calling thread alone


@dataclass(frozen=True)
class Shard:
    """Part of a table on one rank: from row `offset[0]` and column `offset[1]` on, of `size` (rows, columns)."""

    table: str
    rank: int
    offset: tuple[int, int]
    size: tuple[int, int]
    sharding_type: str
    compute_kernel: str

    @property
    def is_replicated(self) -> bool:
        """Whether it is the whole table, which every rank holds."""
        return self.sharding_type == ShardingChoice.data_parallel.value

    @property
    def is_cached(self) -> bool:
        """Whether it is in host memory, with a cache of its rows in device memory."""
        return self.compute_kernel == ComputeKernel.fused_uvm_caching.value


def local_shards(value: Any) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the local tensors of a ShardedTensor, or a tensor that all ranks hold, each with its offsets."""
    if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
        yield value, (0,) * value.dim()
    else:
        for shard in value.local_shards():
            yield shard.tensor, tuple(shard.metadata.shard_offsets)


def build_embeddings(config: Config) -> tuple[EmbeddingBagCollection | None, list[EmbeddingCollection]]:
    """Return the tables on the meta device, to be sharded before they take memory.

    The first collection sums the rows of a feature's list. The others hold the tables that have a feature read id by
    id, one collection for each dimension as torchrec requires: the two kinds cannot share weights. Other features of
    such tables are summed in the dense half of a step.
    """
    by_id, meta, features = config.unpooled_tables(), torch.device("meta"), features_by_table(config)
    pooled = [
        # Means are made from sums in the dense half of a step: torchrec would divide by lengths twice if some averaged
        # tables are split by rows and others are not, and by the wrong lengths under grid_shard.
        EmbeddingBagConfig(pooling=PoolingType.SUM, **_settings(config, name, features[name]))
        for name in config.tables
        if name not in by_id
    ]
    unpooled: dict[int, list[EmbeddingConfig]] = {}
    for name in config.tables:
        if name not in by_id:
            continue
        collection = unpooled.setdefault(config.tables[name].embedding_dim, [])
        collection.append(EmbeddingConfig(**_settings(config, name, features[name])))
    weighted = has_weighted_ids(config)
    return (
        EmbeddingBagCollection(tables=pooled, device=meta, is_weighted=weighted) if pooled else None,
        [EmbeddingCollection(tables=tables, device=meta) for tables in unpooled.values()],
    )


def _settings(config: Config, table: str, features: list[str]) -> dict[str, Any]:
    settings = config.tables[table]
    return {
        "name": module_name(table),
        "num_embeddings": settings.num_embeddings,
        "embedding_dim": settings.embedding_dim,
        "feature_names": features,
        "data_type": _DATA_TYPES[settings.data_type],
    }


def vector_type(config: Config, on_gpu: bool) -> torch.dtype:
    """Return the type of the vectors that tables return; on CPUs BF16 is replaced by FP32."""
    chosen = config.precision.output_dtype
    return torch.float32 if chosen is FloatType.BF16 and not on_gpu else _VECTOR_TYPES[chosen]


def init_range(table: TableConfig) -> float:
    """Return the bound of the uniform initial weights; torchrec's default is 1/sqrt(num_embeddings)."""
    return table.num_embeddings**-0.5 if table.init_range is None else table.init_range


def fill_initial(shard: torch.Tensor, row_offset: int, column_offset: int, seed: int, table: str, bound: float) -> None:
    """Set a shard of a table to its initial weights, uniform in [-bound, bound).

    Element (row, column) of the table is a function of (seed, table, row, column), so any sharding gives the same
    table, on any device.

    Args:
        shard: [rows, columns], set in place.
        row_offset, column_offset: where the shard begins in its table.
        seed: that of the run; table: its name; bound: half the width of the interval.
    """
    num_rows, num_columns = shard.shape
    key, device = make_key(seed, "table", table), shard.device
    columns = torch.arange(column_offset, column_offset + num_columns, device=device)
    chunk = max(1, CHUNK_ELEMENTS[device.type] // max(1, num_columns))
    by_one = max(1, _BY_ONE_THREAD // max(1, num_columns))

    def fill(start: int) -> None:
        stop = min(start + chunk, num_rows)
        rows = torch.arange(row_offset + start, row_offset + stop, device=device)
        if device.type == "cuda" or shard.dtype is torch.float8_e4m3fn:  # a type that NumPy lacks
            shard[start:stop].copy_((uniform(key, rows, columns) * 2 - 1) * bound)
            return
        # NumPy's operators start no threads of their own. But it rounds to FP16 one number at a time; torch needs a
        # twentieth of that time.
        numbers = uniform_numbers(key, rows.numpy(), columns.numpy())
        numbers *= 2
        numbers -= 1
        numbers *= np.float32(bound)
        for own, drawn in zip(shard[start:stop].split(by_one), torch.from_numpy(numbers).split(by_one), strict=True):
            own.copy_(drawn)

    shard, starts = shard.detach(), range(0, num_rows, chunk)
    if device.type == "cuda" or len(starts) < 2:
        for start in starts:
            fill(start)
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, starts))  # also raises the errors of the threads
