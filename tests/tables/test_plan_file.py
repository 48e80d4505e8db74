"""A plan in a file that a run cannot follow is refused by what is wrong with it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT

from recsys.config import ShardingChoice, load_config
from recsys.errors import UserError
from recsys.memory.autofit import planned_shards
from recsys.runtime.machine import topology_of
from recsys.tables.shard import save_plan

SAMPLE, TABLES = ROOT / "configs" / "dlrm_sample.yaml", ("user", "item", "category", "device", "hour")
OPTIONS = ["topology.world_size=2", "topology.device=cpu", "tables.user.sharding_type=row_wise"]
Edit = Callable[[list[dict[str, Any]]], object]
EDITS: dict[str, tuple[Edit, str]] = {
    "rank": (lambda user: user[1].update(rank=7), "on ranks that row_wise does not have on 2 ranks, 2 a machine"),
    "other rank": (
        lambda user: [shard.update(rank=1 - shard["rank"]) for shard in user],
        "ranks that row_wise does not",
    ),
    "text": (lambda user: user[1].update(rank="1"), "must be whole numbers"),
    "negative": (lambda user: user[1].update(offset=[-1, 0]), "must be whole numbers"),
    "dimensions": (lambda user: user[1].update(offset=[0]), "not a plan that a run has written"),
    "kind": (lambda user: user[1].update(sharding_type="diagonal"), "'diagonal' is not a valid ShardingChoice"),
    "kernel": (
        lambda user: [p.update(compute_kernel="fused_uvm") for p in user],
        "and by the config it is 'fused' here",
    ),
    "replicated kernel": (lambda user: [p.update(compute_kernel="dense") for p in user], "with compute_kernel 'dense'"),
    "two kinds": (lambda user: user[1].update(sharding_type="table_wise"), "in pieces of 2 kinds"),
    "other table": (lambda user: [piece.update(table="users") for piece in user], "in pieces of 0 kinds"),
    "gap": (lambda user: user[0].update(size=[499, 8]), "in pieces or on ranks that row_wise does not have"),
    "twice": (lambda user: user[1].update(offset=[0, 0], size=[1000, 8]), "in pieces or on ranks that row_wise"),
    # Ids go to ranks by halves, whatever the shards are.
    "uneven": (
        lambda user: [user[0].update(size=[400, 8]), user[1].update(offset=[400, 0], size=[600, 8])],
        "in pieces or on ranks that row_wise does not have",
    ),
    "other kind": (
        lambda user: [shard.update(sharding_type="table_wise") for shard in user],
        "as table_wise, and the config as tables.user.sharding_type=row_wise",
    ),
    "key": (lambda user: user[0].update(colour="red"), "not a plan that a run has written"),
}


def plan_file(folder: Path, edit: Edit, table: str = "user", options: Sequence[str] = OPTIONS) -> str:
    """Write the plan of the sample config with some shards edited, and return the override that names it."""
    config, path = load_config(SAMPLE, options), folder / "plan.json"
    save_plan(planned_shards(config, topology_of(config)), 2, path)
    content = json.loads(path.read_text())
    edit([shard for shard in content["shards"] if shard["table"] == table])
    path.write_text(json.dumps(content))
    return f"run.plan={path}"


def refused(*options: str) -> str:
    """Return the sentence that a plan is refused by."""
    config = load_config(SAMPLE, options)
    with pytest.raises(UserError, match=r"^config key 'run\.plan'") as caught:
        planned_shards(config, topology_of(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("edit, said", EDITS.values(), ids=EDITS)
def test_plan_file(edit: Edit, said: str, tmp_path: Path) -> None:
    assert said in refused(*OPTIONS, plan_file(tmp_path, edit))


@pytest.mark.parametrize("kind", [choice.value for choice in ShardingChoice if choice is not ShardingChoice.auto])
def test_what_a_run_has_written_is_read_in_any_order(kind: str, tmp_path: Path) -> None:
    machines = ("topology.world_size=4", "topology.local_world_size=2", "topology.device=cpu")
    options = (*machines, "optimizer.tables.name=adagrad", *(f"tables.{name}.embedding_dim=256" for name in TABLES))
    options = (*options, "model.bottom_mlp=[8]", f"tables.user.sharding_type={kind}")
    config, path = load_config(SAMPLE, options), tmp_path / "plan.json"
    shards = planned_shards(config, topology_of(config))
    assert {shard.sharding_type for shard in shards if shard.table == "user"} == {kind}
    save_plan(shards[::-1], 4, path)
    config = load_config(SAMPLE, [*options, f"run.plan={path}"])
    assert planned_shards(config, topology_of(config)) == shards


def split(kind: str, rows: int, columns: int) -> Edit:
    """Return an edit that gives each of two ranks so much of a table of 1000 × 8."""

    def edit(shards: list[dict[str, Any]]) -> None:
        for rank, shard in enumerate(shards):
            offset = [rank * (1000 - rows), rank * (8 - columns)]
            kernel = "dense" if kind == "data_parallel" else "fused"
            shard.update(rank=rank, offset=offset, size=[rows, columns], sharding_type=kind, compute_kernel=kernel)

    return edit


COPIES, HALVES = split("data_parallel", 1000, 8), split("column_wise", 1000, 4)
GPUS = ("topology.device=cuda", "topology.device_memory=80GiB", "topology.host_memory=1TiB")
ATTENTION = "model.attention={history: item_id}"
FORBIDDEN: dict[str, tuple[str, Edit, list[str], str]] = {
    "columns of row-wise state": ("user", HALVES, [], "so what is learned would depend on the plan"),
    "columns of its own state": (
        *("user", HALVES, ["optimizer.tables.name=adagrad", "tables.user.optimizer={name: rowwise_adagrad}"]),
        "allow it with tables.user.optimizer.allow_column_split=true",
    ),
    "copies and LAMB": (
        "user",
        COPIES,
        ["optimizer.tables.name=lamb"],
        "replicated tables are trained by rowwise_",
    ),
    "copies and decay": (
        "user",
        COPIES,
        ["optimizer.tables.weight_decay=0.1"],
        "replicated tables are trained without it",
    ),
    "copies in host memory": (
        *("user", COPIES, [*GPUS, "tables.user.compute_kernel=fused_uvm"]),
        "a replicated table lies in device memory, found fused_uvm",
    ),
    "kernel": (
        *("user", HALVES, [*GPUS, "tables.user.compute_kernel=fused_uvm"]),
        "with compute_kernel 'fused', and by the config it is 'fused_uvm' here",
    ),
    "lists id by id": ("item", split("table_row_wise", 500, 8), [ATTENTION], "looks up feature 'history' id by id"),
    "a penalty on all rows": (
        *("user", split("row_wise", 500, 8), ["tables.user.l2_all_rows=0.1"]),
        "found sharding_type: row_wise",
    ),
    "another type": ("user", COPIES, ["tables.user.sharding_type=row_wise"], "tables.user.sharding_type=row_wise"),
}


@pytest.mark.parametrize("table, edit, options, said", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_the_config_forbids(table: str, edit: Edit, options: list[str], said: str, tmp_path: Path) -> None:
    by_rows = [*OPTIONS[:2], f"tables.{table}.sharding_type=row_wise"]
    plan = plan_file(tmp_path, edit, table, by_rows)
    sentence = refused(*OPTIONS[:2], *options, plan)
    assert f"has table '{table}' " in sentence and said in sentence
    # The same plan goes with a config that allows it.
    config = load_config(SAMPLE, [*OPTIONS[:2], "optimizer.tables.allow_column_split=true", plan])
    assert planned_shards(config, topology_of(config))


@pytest.mark.parametrize(
    "options, whole",
    [
        (["topology.world_size=2"], True),
        (["topology.world_size=8", "tables.user.num_embeddings=100000"], False),  # more ranks than tables
        (["topology.world_size=2", "topology.host_memory=4GiB", "tables.user.num_embeddings=70000000"], False),
    ],
)
def test_tables_are_whole_over_gloo_if_they_are_enough_and_fit(options: Sequence[str], whole: bool) -> None:
    config = load_config(SAMPLE, ["topology.device=cpu", *options])
    shards = planned_shards(config, topology_of(config))
    assert ({shard.sharding_type for shard in shards} == {"table_wise"}) == whole
    assert {shard.rank for shard in shards} == set(range(config.topology.world_size))
