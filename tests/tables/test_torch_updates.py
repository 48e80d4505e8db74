"""State of optimizers that FBGEMM lacks: saved and resumed, on the same plan to the bit, on another up to rounding."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import load_tables
from launch import losses_of, must_train

from recsys.config import load_config
from recsys.memory.levers import LEVERS

CONFIG = "configs/dlrm_sample.yaml"
OPTIONS = (
    "data.valid=null", "data.test=null", "data.window_mib=1", "train.epochs=9", "train.log_every_steps=1",
    "train.checkpoint_every_steps=10", "train.keep_checkpoints=9", "optimizer.schedule={name: linear}",
    "tables.user.optimizer={name: ftrl, l1: 1e-4}", "tables.item.optimizer={name: adam, learning_rate: 0.01}",
    "tables.device.optimizer={name: ftrl, l1: 1e-4}", "run.num_threads=1",
    # So wide that torchrec's planner splits columns.
    *(f"tables.{name}.embedding_dim=256" for name in ("user", "item", "category", "device", "hour")),
)  # fmt: skip
PLAN = ("tables.user.sharding_type=row_wise", "tables.item.sharding_type=column_wise",
        "tables.device.sharding_type=data_parallel")  # fmt: skip


def train(run_dir: Path, nproc: int, *options: str) -> None:
    must_train(CONFIG, f"run.dir={run_dir}", *OPTIONS, "train.max_steps=20", *options, nproc=nproc)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run_dir = tmp_path_factory.mktemp("torch_updates") / "whole"
    train(run_dir, 2, *PLAN)
    yield run_dir


@pytest.mark.slow
@pytest.mark.parametrize(
    "nproc, plan",
    [
        (2, PLAN),
        (1, ()),
        pytest.param(3, PLAN, marks=pytest.mark.slow),
        pytest.param(2, [option.replace("data_parallel", "table_wise") for option in PLAN], marks=pytest.mark.slow),
    ],
)
def test_resumed_is_uninterrupted(nproc: int, plan: tuple[str, ...], whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "resumed"
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-000000020")
    train(run_dir, nproc, "run.resume=true", *plan)
    saved = [load_tables(path / "checkpoints/step-000000020", "") for path in (whole, run_dir)]
    for table in ("user", "item", "device"):
        states = [f"table_optimizer/{table}/momentum{number}" for number in (1, 2)]
        assert all(saved[0][name].any() and saved[0][name].dtype is torch.float32 for name in states)
    exact = plan is PLAN and nproc == 2
    if exact:
        assert losses_of(run_dir) == losses_of(whole)
    torch.testing.assert_close(losses_of(run_dir), losses_of(whole), rtol=0, atol=1e-5)
    for name, value in saved[0].items():
        if name.startswith("table"):
            torch.testing.assert_close(saved[1][name], value, rtol=0, atol=0 if exact else 1e-3)
    report = json.loads((run_dir / "memory/rank_0.json").read_text())
    assert all(line["predicted_bytes"] == line["measured_bytes"] for line in report["lines"])


def test_memory_fit_leaves_them_in_device_memory() -> None:
    config = load_config(CONFIG, ["tables.user.optimizer={name: ftrl}"])
    topology: Any = SimpleNamespace(on_gpu=True, world_size=1, device_bytes=1)
    levers = [lever for lever in LEVERS if lever.__name__ == "_caching"]
    keys = {key for lever in levers for change in lever(config, topology) for key in change.settings}
    assert "tables.item.compute_kernel" in keys and "tables.user.compute_kernel" not in keys
