"""A plan in a file that a run cannot follow is refused by what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT

from recsys.config import load_config
from recsys.errors import UserError
from recsys.memory.autofit import pieces_of
from recsys.runtime.machine import topology_of
from recsys.tables.shard import save_plan

OPTIONS = ["topology.world_size=2", "topology.device=cpu", "tables.user.sharding_type=row_wise"]
Edit = Callable[[list[dict[str, Any]]], object]
EDITS: dict[str, tuple[Edit, str]] = {
    "rank": (lambda user: user[1].update(rank=7), "a piece is on rank 7, and ranks go to 1"),
    "text": (lambda user: user[1].update(rank="1"), "must be whole numbers"),
    "negative": (lambda user: user[1].update(offset=[-1, 0]), "must be whole numbers"),
    "dimensions": (lambda user: user[1].update(offset=[0]), "no plan that a run has written"),
    "kind": (lambda user: user[1].update(sharding_type="diagonal"), "'diagonal' is not a valid ShardingChoice"),
    "kernel": (lambda user: user[1].update(compute_kernel="quantum"), "there is no compute_kernel 'quantum'"),
    "two kinds": (lambda user: user[1].update(sharding_type="table_wise"), "pieces have different kinds"),
    "gap": (lambda user: user[0].update(size=[499, 8]), "pieces overlap or leave gaps"),
    "twice": (lambda user: user[1].update(offset=[0, 0], size=[1000, 8]), "pieces overlap or leave gaps"),
    "several": (
        lambda user: [piece.update(sharding_type="table_wise") for piece in user],
        "which one rank holds, there are several pieces",
    ),
    "not on each": (
        lambda user: [piece.update(sharding_type="data_parallel", rank=0) for piece in user],
        "which every rank holds, there is not a piece on each",
    ),
    "key": (lambda user: user[0].update(colour="red"), "no plan that a run has written"),
}


@pytest.mark.parametrize("edit, said", EDITS.values(), ids=EDITS)
def test_plan_file(edit: Edit, said: str, tmp_path: Path) -> None:
    sample, path = ROOT / "configs" / "dlrm_sample.yaml", tmp_path / "plan.json"
    config = load_config(sample, OPTIONS)
    pieces = pieces_of(config, topology_of(config))
    save_plan(pieces, 2, path)
    config = load_config(sample, [*OPTIONS, f"run.plan={path}"])
    assert pieces_of(config, topology_of(config)) == pieces
    content = json.loads(path.read_text())
    edit([piece for piece in content["shards"] if piece["table"] == "user"])
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"^config key 'run\.plan'") as caught:
        pieces_of(config, topology_of(config))
    assert said in str(caught.value) and "\n" not in str(caught.value)
