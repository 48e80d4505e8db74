"""Bytes that a rank's table lookups and updates need, from shapes and the mean number of ids in a row."""

import math
from collections.abc import Iterator, Mapping, Sequence

from recsys.config import Config
from recsys.config.choices import ROW_SPLITS, ShardingChoice
from recsys.config.features import dims_of, features_by_table
from recsys.tables.plan import fbgemm_output
from recsys.tables.spec import Shard, vector_type
from recsys.tables.updates import in_fbgemm

_DISTINCT_BYTES = 32  # of an id, while a table's distinct ids are found: ids joined and sorted, their order and places
_PLACE_BYTES = 8  # of the place of an id or a row


class Lookups:
    """Bytes and ids of one rank's lookups, for `rows` rows in a rank's batch and `means`, the ids in a row by feature.

    Args:
        shards: those of tables on this rank. ranks: how many there are in all.

    Attributes:
        number_bytes: of a number in the tables' vectors. given_bytes: of a number in FBGEMM's output, before that.
    """

    def __init__(self, config: Config, shards: Sequence[Shard], ranks: int, on_gpu: bool) -> None:
        self._config, self._shards, self._ranks, self._on_gpu = config, shards, ranks, on_gpu
        self._dims, self._by_id = dims_of(config), config.unpooled_tables()
        self._features_of = features_by_table(config)
        self.number_bytes = vector_type(config, on_gpu).itemsize
        self.given_bytes = 4 if fbgemm_output(config, on_gpu) is None else self.number_bytes

    def pooled(self, rows: int, means: Mapping[str, float]) -> int:
        """Return the bytes of the vectors of this rank's rows, for all features."""
        by_id = {name for name, feature in self._config.features.items() if feature.table in self._by_id}
        numbers = sum(rows * dim * (means[name] if name in by_id else 1) for name, dim in self._dims.items())
        return int(self.number_bytes * numbers)

    def _features(self, shard: Shard, rank_rows: int, means: Mapping[str, float]) -> Iterator[tuple[str, int, float]]:
        """Yield each feature that is looked up in a shard, with the rows and ids that this rank looks up for it."""
        rows = rank_rows * (1 if shard.is_replicated else self._ranks)
        share = 1 if shard.is_replicated else shard.size[0] / self._config.tables[shard.table].num_embeddings
        for name in self._features_of[shard.table]:
            yield name, rows, rows * means[name] * share

    def of_ranks(self, rows: int, means: Mapping[str, float]) -> tuple[int, int, int]:
        """Return the bytes of the vectors that this rank looks up for all ranks, how many of these bytes are summed
        over ranks, and the number of ids that it looks up."""
        vectors = reduced = ids = 0.0
        for shard in self._shards:
            # A rank with some rows of a table has vectors of its ids, or partial sums of all rows, to be added up.
            by_id = shard.table in self._by_id
            split = ShardingChoice(shard.sharding_type) in ROW_SPLITS
            for _, of_rows, of_ids in self._features(shard, rows, means):
                size = (of_ids if by_id else of_rows) * shard.size[1] * self.given_bytes
                vectors += size
                reduced += size if split and not by_id else 0
                ids += of_ids
        return int(vectors), int(reduced), int(ids)

    def update_temporaries(self, rows: int, means: Mapping[str, float]) -> int:
        """Return the most bytes that the update of a table by a rule in torch needs: to find its distinct ids, or later
        for a gradient of each distinct row and, if lists are pooled, of each id of a feature."""
        most = 0.0
        for shard in self._shards:
            if shard.is_replicated or in_fbgemm(self._config, shard.table, self._on_gpu):
                continue
            ids = [of_ids for *_, of_ids in self._features(shard, rows, means)]
            by_id = 0.0 if shard.table in self._by_id else max(ids, default=0.0)
            distinct = shard.size[0] * -math.expm1(-sum(ids) / max(1, shard.size[0]))  # at most: equally frequent
            summed = (4 * shard.size[1] + _PLACE_BYTES) * (by_id + distinct) + _PLACE_BYTES * sum(ids)
            most = max(most, summed, _DISTINCT_BYTES * sum(ids))
        return int(most)

    def replicated_gradient(self, rows: int, means: Mapping[str, float]) -> int:
        """Return the bytes of gradients of tables that every rank holds: in FP32, as they are summed over ranks, with a
        mark for each row; and of the largest gradient of a feature by id."""
        replicas = {shard.table: shard.size for shard in self._shards if shard.is_replicated}
        of_tables = sum(height * (columns + 1) for height, columns in replicas.values())
        of_tables *= 2 if self._ranks == 1 and not self._on_gpu else 1  # one for each half of the batch
        by_ids = (
            means[name] * replicas[feature.table][1]
            for name, feature in self._config.features.items()
            if feature.table in replicas
        )
        return 4 * (of_tables + int(rows * max(by_ids, default=0)))
