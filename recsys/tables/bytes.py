"""Bytes of table shards by kind, as FBGEMM lays them out."""

from collections.abc import Iterable
from dataclasses import dataclass

from recsys.config import ComputeKernel, Config, DataType
from recsys.config.choices import StateType
from recsys.tables.spec import Shard

# FBGEMM's FP8 rows (NFP8) are plain e4m3: a byte an element, neither scale nor padding (`construct_split_state` adds
# such only to INT8).
WEIGHT_BYTES = {DataType.FP32: 4, DataType.FP16: 2, DataType.FP8: 1}
_CACHE_BYTES = {DataType.FP32: 4, DataType.FP16: 2, DataType.FP8: 2}  # of an element; FP8 is cached as FP16
# Part of a checkpoint's tensor that is written or read at once: the extra memory of saving, loading and exporting.
CHUNK_BYTES = 8 << 20
PUBLISHED_BYTES = 8 << 20  # part of a table whose changed rows publishing gathers at once
_ROW_STATE_BYTES = 4  # state of a row is FP32 whatever the weights are
_STATE_BYTES = {StateType.FP32: 4, StateType.BF16: 2}  # of an element
_WAYS = 32  # slots in each of the cache's sets
_SLOT_BYTES = 8 + 8  # which row a slot holds (lxu_cache_state), and when it was used (lxu_state)
_CACHED_ROW_BYTES = 4  # which table a row is of (cache_index_table_map), for every row of a cached table


@dataclass(frozen=True)
class TableBytes:
    """Bytes of tables in device and host memory, by kind; on CPU the device is the host.

    Attributes:
        device_cache: cached rows of tables in host memory; device_metadata: what keeps track of them.
    """

    device_weight: int = 0
    device_optimizer: int = 0
    device_cache: int = 0
    device_metadata: int = 0
    host_weight: int = 0
    host_optimizer: int = 0

    def __add__(self, other: "TableBytes") -> "TableBytes":
        return TableBytes(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def weight(self) -> int:
        """Bytes of weights, wherever they are."""
        return self.device_weight + self.host_weight

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer state, wherever it is."""
        return self.device_optimizer + self.host_optimizer

    @property
    def device(self) -> int:
        """Bytes in device memory."""
        return self.device_weight + self.device_optimizer + self.device_cache + self.device_metadata

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return self.host_weight + self.host_optimizer


def shard_bytes(config: Config, table: str, rows: int, columns: int, kernel: str) -> TableBytes:
    """Return the bytes of `rows` × `columns` of a table, without the cache of `fused_uvm_caching`.

    Args:
        kernel: name of the compute kernel, as in a plan.
    """
    optimizer = config.table_optimizer(table)
    weight = rows * columns * WEIGHT_BYTES[config.tables[table].data_type]
    by_row = rows * optimizer.name.value.row_state * _ROW_STATE_BYTES
    by_element = rows * columns * optimizer.name.value.element_state * _STATE_BYTES[optimizer.state_dtype]
    if kernel in (ComputeKernel.fused_uvm.value, ComputeKernel.fused_uvm_caching.value):
        # State of whole rows stays on the device; no state is cached.
        return TableBytes(host_weight=weight, host_optimizer=by_element, device_optimizer=by_row)
    return TableBytes(device_weight=weight, device_optimizer=by_row + by_element)


def _lookup_groups(config: Config, shards: Iterable[Shard]) -> list[list[Shard]]:
    """Return a rank's shards in groups, one for each FBGEMM module, whose shards share their tensors' memory."""
    groups: dict[tuple[object, ...], list[Shard]] = {}
    by_id = config.unpooled_tables()  # one collection for each dimension; see `build_embeddings`
    for shard in shards:
        settings = config.tables[shard.table]
        key = (
            shard.sharding_type,
            settings.embedding_dim if shard.table in by_id else None,
            settings.data_type,
            settings.stochastic_rounding,
            tuple(vars(config.table_optimizer(shard.table)).values()),
        )
        groups.setdefault(key, []).append(shard)
    return list(groups.values())


def cache_bytes(config: Config, shards: Iterable[Shard]) -> TableBytes:
    """Return the bytes of a rank's caches: one for each group of tables, each slot as wide as the widest of them."""
    groups = ([shard for shard in group if shard.is_cached] for group in _lookup_groups(config, shards))
    return sum((_cache_of(config, group) for group in groups if group), TableBytes())


def _cache_of(config: Config, shards: list[Shard]) -> TableBytes:
    rows, tables = sum(shard.size[0] for shard in shards), [config.tables[shard.table] for shard in shards]
    # The tables' factors, weighted by the rows of the whole tables.
    factor = sum(t.cache_load_factor * t.num_embeddings for t in tables) / sum(t.num_embeddings for t in tables)
    slots = max(1, (int(rows * factor) + _WAYS - 1) // _WAYS) * _WAYS
    width = max(shard.size[1] for shard in shards)
    return TableBytes(
        device_cache=slots * width * _CACHE_BYTES[tables[0].data_type],
        device_metadata=slots * _SLOT_BYTES + rows * _CACHED_ROW_BYTES,
    )


def rank_tables(config: Config, shards: Iterable[Shard], rank: int) -> dict[str, TableBytes]:
    """Return the bytes of each table with a shard on `rank`, without caches, which tables share."""
    by_table: dict[str, TableBytes] = {}
    for shard in shards:
        if shard.rank == rank:
            size = shard_bytes(config, shard.table, *shard.size, shard.compute_kernel)
            by_table[shard.table] = by_table.get(shard.table, TableBytes()) + size
    return by_table


def published_bytes(config: Config, rank: int, world_size: int) -> int:
    """Return the bytes that a rank needs to gather and write changed rows for `train.publish`, if all have changed."""
    if config.train.publish.dir is None or rank:
        return 0
    largest = max((4 * table.num_embeddings * table.embedding_dim for table in config.tables.values()), default=0)
    # Rows of this chunk and the one before, as gathered, sorted and serialised; with several ranks also as messages.
    return (4 if world_size == 1 else 6) * min(PUBLISHED_BYTES, largest)
