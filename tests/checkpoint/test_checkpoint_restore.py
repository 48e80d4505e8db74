"""What one plan on some ranks has saved, another on others goes on with as if it had been its own."""

import json
import shutil
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from launch import losses_of, must_train, records_of

from recsys.config import load_config

CONFIG = "configs/dlrm_sample.yaml"
SAVED, END = 10, 30
COLUMN_SPLITS = ("column_wise", "grid_shard")
KINDS = ("table_wise", "row_wise", "data_parallel", *COLUMN_SPLITS)
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
CANONICAL = (1, "table_wise")
TABLES = {name: (table.num_embeddings, table.embedding_dim) for name, table in load_config(CONFIG).tables.items()}


def settings(optimizer: str) -> list[str]:
    fixed = ("data.window_mib=1", "data.test=null", "train.log_every_steps=1", "train.epochs=9", "model.dropout=0.1",
             "run.num_threads=1")  # fmt: skip
    types = [f"tables.{name}.data_type=FP32" for name in TABLES]
    return [*fixed, *types, f"optimizer.tables.name={optimizer}", "optimizer.tables.allow_column_split=true"]


def plan(folder: Path, world_size: int, kind: str) -> list[str]:
    """Return the options for a sharding type; torchrec's planner would not split columns as narrow as these."""
    if kind not in COLUMN_SPLITS:
        return [f"tables.{name}.sharding_type={kind}" for name in TABLES]
    shards = []
    for number, (table, (rows, columns)) in enumerate(TABLES.items()):
        half, block = columns // 2, -(-rows // world_size)
        for column in (0, half):
            if kind == "column_wise":
                pieces = [((number + column // half) % world_size, 0, rows)]
            else:
                pieces = [(rank, rank * block, min(block, rows - rank * block)) for rank in range(world_size)]
            for rank, first, size in pieces:
                place = {"table": table, "rank": rank, "offset": (first, column), "size": (size, half)}
                shards.append({**place, "sharding_type": kind, "compute_kernel": "fused"})
    path = folder / f"{kind}-{world_size}.json"
    path.write_text(json.dumps({"world_size": world_size, "shards": shards}))
    return [f"run.plan={path}"]


def train(run_dir: Path, where: tuple[int, str], optimizer: str, *options: str) -> str:
    """Train under a plan; return the log."""
    arguments = [*settings(optimizer), *plan(run_dir.parent, *where), *options]
    return must_train(CONFIG, f"run.dir={run_dir}", *arguments, nproc=where[0]).stdout


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in ("kind", "time")} for record in records_of(run_dir, "valid")]


def go_on(run_dir: Path, where: tuple[int, str], optimizer: str) -> str:
    return train(run_dir, where, optimizer, "run.resume=true", f"train.max_steps={END}", "train.eval_every_steps=10")


@cache
def scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def reference(optimizer: str) -> Path:
    """A run that never stopped, and in `saved` its first steps."""
    run_dir = Path(scratch().name) / optimizer / "whole"
    run_dir.parent.mkdir()
    train(run_dir, CANONICAL, optimizer, f"train.max_steps={END}", f"train.checkpoint_every_steps={SAVED}",
          "train.keep_checkpoints=9", "data.valid=null")  # fmt: skip
    saved = run_dir.with_name("saved")
    shutil.copytree(run_dir, saved)
    for step in (20, 30):
        shutil.rmtree(saved / f"checkpoints/step-{step:09d}")
    resumed = run_dir.with_name("resumed")
    shutil.copytree(saved, resumed)
    go_on(resumed, CANONICAL, optimizer)
    assert losses_of(resumed) == losses_of(run_dir)
    return run_dir.parent


def assert_close(found: Any, expected: Any, atol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("world_size, kind, optimizer", [*product((1, 2, 4), KINDS, OPTIMIZERS)])
def test_saved_here_loaded_there(world_size: int, kind: str, optimizer: str, tmp_path: Path) -> None:
    where, whole = (world_size, kind), reference(optimizer)
    approximate = kind in COLUMN_SPLITS and optimizer == "rowwise_adagrad"

    there = tmp_path / "there"
    said = train(there, where, optimizer, f"train.max_steps={SAVED}")
    assert ("is approximate in the checkpoint" in said) == approximate
    (before,) = evaluations(there)
    said = go_on(there, CANONICAL, optimizer)
    assert ("is approximate: row-wise" in said) == approximate
    after = evaluations(there)[0]  # in its place
    assert before["step"] == after["step"] == SAVED and f"valid at step {SAVED}: " in said
    assert_close(after, before, 1e-6)

    here = tmp_path / "here"
    shutil.copytree(whole / "saved", here)
    go_on(here, where, optimizer)
    assert_close(evaluations(here)[0], evaluations(whole / "resumed")[0], 1e-6)
    if not approximate:
        assert_close(losses_of(there), losses_of(whole / "whole"), 1e-5)
        assert_close(losses_of(here), losses_of(whole / "whole"), 1e-5)
        assert_close(evaluations(here), evaluations(whole / "resumed"), 1e-5)
