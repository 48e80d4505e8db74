"""The learning rates fall where the metric of early stopping stands still, in a resumed run as in one that went on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import must_train, records_of

from recsys.checkpoint import Marker

CONFIG = "configs/dlrm_sample.yaml"
# Rates so high that what is learned soon fits no other rows.
OPTIONS = (
    "train.epochs=9", "train.log_every_steps=1", "train.eval_every_steps=2", "train.keep_checkpoints=99",
    "train.checkpoint_every_steps=2", "train.early_stop={metric: auc, patience: 99}", "data.test=null",
    "optimizer.tables.learning_rate=2.0", "optimizer.dense.learning_rate=0.5", "run.num_threads=1", "data.max_rows=600",
)  # fmt: skip
PLATEAU = "optimizer.schedule={name: plateau, plateau_factor: 0.25, plateau_patience: 2}"


def train(run_dir: Path, *options: str) -> list[float]:
    must_train(CONFIG, f"run.dir={run_dir}", *OPTIONS, "train.max_steps=16", *options)
    return lines(run_dir, "train")


def lines(run_dir: Path, kind: str, key: str = "loss") -> list[Any]:
    return [record[key] for record in records_of(run_dir, kind)]


@pytest.mark.slow
def test_rates_fall_on_a_plateau(tmp_path: Path) -> None:
    losses = train(tmp_path / "run", PLATEAU)
    factors, best, since = [], 0.0, 0
    for value in lines(tmp_path / "run", "valid", "auc")[:8]:
        best, since = (value, 0) if value > best else (best, since + 1)
        factors.append((factors[-1] if factors else 1.0) * (0.25 if since and since % 2 == 0 else 1))
    states = [Marker.read(tmp_path / f"run/checkpoints/step-{2 * i + 2:09d}").state for i in range(8)]
    assert [state.rate_factor for state in states] == factors and factors[-1] < 1
    first = 2 * factors.index(0.25) + 2  # steps before the rate fell
    constant = train(tmp_path / "constant")
    assert losses[:first] == constant[:first]
    assert abs(torch.tensor(losses[first + 1 :]) - torch.tensor(constant[first + 1 :])).min() > 0

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run", resumed)
    for path in resumed.glob("checkpoints/step-*"):
        if int(path.name[-9:]) > first + 2:
            shutil.rmtree(path)
    assert train(resumed, PLATEAU, "run.resume=true") == losses
    train(resumed, "run.resume=true", "train.max_steps=17")
    *_, on_plateau, constant = lines(resumed, "train", "learning_rate")
    assert on_plateau["tables"] < 2 and constant == {"dense": 0.5, "tables": 2.0}, "another schedule goes by itself"
