"""Planning: what torchrec's planner is asked to estimate, and that asking for less gives the same plans."""

from collections.abc import Sequence
from typing import Any

import pytest
from launch import ROOT
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import Shard as PlannerShard
from torchrec.distributed.planner.types import ShardingOption

from recsys.config import load_config
from recsys.errors import NoPlanError
from recsys.memory.autofit import planned_shards
from recsys.runtime.machine import topology_of
from recsys.step.build import build_tables
from recsys.tables import plan
from recsys.tables.shard import plan_tables, shards_of

MACHINES = ("topology.device=cuda", "topology.device_memory=80GiB", "topology.local_world_size=8")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("tables.user.num_embeddings=50000003", "tables.user.embedding_dim=128", "model.bottom_mlp=[8]"),
        ("tables.item.sharding_type=row_wise", "tables.user.sharding_type=table_row_wise"),
    ],
)
def test_shards_of_one_size_are_estimated_once(options: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table split over 64 ranks has shards of three sizes at most: full ones, the rest, and none."""
    config = load_config(ROOT / "configs" / "dlrm_sample.yaml", [*MACHINES, "topology.world_size=64", *options])
    estimated: list[int] = []
    original = EmbeddingPerfEstimator.estimate

    def estimate(self: EmbeddingPerfEstimator, sharding_options: list[ShardingOption], *args: Any, **kw: Any) -> None:
        estimated.extend(len(option.shards) for option in sharding_options)
        original(self, sharding_options, *args, **kw)

    monkeypatch.setattr(EmbeddingPerfEstimator, "estimate", estimate)
    shards = planned_shards(config, topology_of(config))
    assert 1 <= max(estimated) <= 3
    monkeypatch.setattr(plan, "_Seconds", EmbeddingPerfEstimator)
    assert planned_shards(config, topology_of(config)) == shards
    assert max(estimated) == 64


def test_plans_are_the_same_where_copies_of_shards_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner gives ranks to shards of proposals while it holds copies of the plans that it found before."""
    options = [
        *MACHINES,
        "topology.world_size=64",
        "tables.user.num_embeddings=50000003",
        "tables.user.embedding_dim=64",
    ]
    config = load_config(ROOT / "configs" / "dlrm_sample.yaml", options)
    shards = planned_shards(config, topology_of(config))
    assert len({shard.rank for shard in shards}) > 1
    monkeypatch.setattr(plan, "_Shard", PlannerShard)
    assert planned_shards(config, topology_of(config)) == shards


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_tables_that_leave_little_free_have_the_plan_of_the_dry_run(share: float) -> None:
    """The planner likes 15 % to stay free; what a run takes beside tables is for the prediction to say."""
    rows = 1_000_000
    room = int(rows * (64 * 4 + 4) / share)  # weights, and the state of a row
    options = [*MACHINES, "topology.world_size=1", "topology.local_world_size=1", f"topology.device_memory={room}"]
    tables = [f"tables.user={{num_embeddings: {rows}, embedding_dim: 64}}"]
    config = load_config(ROOT / "configs" / "dlrm_sample.yaml", [*options, *tables])
    topology, step = topology_of(config), build_tables(config)
    if share > 1:
        with pytest.raises(NoPlanError, match="the tables fit under no plan"):
            plan_tables(step, config, topology)
    else:
        assert list(shards_of(plan_tables(step, config, topology), config, 1)) == planned_shards(config, topology)
