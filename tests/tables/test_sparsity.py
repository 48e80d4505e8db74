"""Penalties by which rows become exactly 0: steps by hand, on every plan, and rows that are pruned without loss."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import load_tables
from launch import losses_of, run_recsys

from recsys.config import SparsityConfig, TableOptimizerConfig, load_config
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError
from recsys.tables.rules import shrunk
from recsys.tables.torch_update import TorchTable

SETTINGS = (
    *("optimizer.tables={name: sgd, learning_rate: 10}", "train.max_steps=20", "train.log_every_steps=1"),
    *("data.window_mib=1", "tables.item.data_type=FP32", "data.test=null"),
    *("tables.user.sparsity.group_lasso=0.001", "tables.item.sparsity.l1=0.0002"),
)
MORE_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("table_wise", "data_parallel")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("sparse") / "run"
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={run_dir}", *SETTINGS)
    return run_dir


def test_steps_by_hand() -> None:
    rows = torch.tensor([[3.0, -4.0], [0.3, 0.4], [0.0, 0.0], [0.06, -0.2]])
    expected = torch.tensor([[2.9, -3.9], [0.2, 0.3], [0.0, 0.0], [0.0, -0.1]])
    torch.testing.assert_close(shrunk(rows, SparsityConfig(l1=0.2), 0.5), expected)
    # Of lengths 5 and 0.5, half of 1 is taken.
    expected = torch.tensor([[2.7, -3.6], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert (shrunk(rows, SparsityConfig(group_lasso=1.0), 0.5)[1:] == 0).all()
    torch.testing.assert_close(shrunk(rows, SparsityConfig(group_lasso=1.0), 0.5), expected)


@pytest.mark.parametrize("optimizer", [TableOptimizer.sgd, TableOptimizer.adagrad, TableOptimizer.adam])
def test_rows_that_no_batch_touches_stay(optimizer: TableOptimizer) -> None:
    weights = torch.full((3, 2), 0.5)
    table = TorchTable("t", weights, TableOptimizerConfig(name=optimizer), SparsityConfig(l1=10.0), learning_rate=0.1)
    table.update_looked_up(torch.tensor([[1.0, 1.0], [0.0, 0.0], [9.0, 9.0]]), torch.tensor([1, 1, 0]))
    assert weights.tolist() == [[0, 0], [0, 0], [0.5, 0.5]]


@pytest.mark.parametrize("kind", ["row_wise", *MORE_KINDS])
def test_the_plan_does_not_matter(kind: str, run: Path, tmp_path: Path) -> None:
    split = [f"tables.{table}.sharding_type={kind}" for table in ("user", "item")]
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={tmp_path}/two", *SETTINGS, *split, nproc=2)
    torch.testing.assert_close(losses_of(tmp_path / "two"), losses_of(run), rtol=0, atol=1e-5)
    here, there = load_tables(run)["user"], load_tables(tmp_path / "two")["user"]
    zeros = [(table == 0).all(1) for table in (here, there)]
    assert 20 < zeros[0].sum() < 700 and (zeros[0] != zeros[1]).sum() <= 1
    assert ((load_tables(run)["item"] == 0).sum(1) % 8 > 0).any(), "elements by themselves"


def test_rows_of_0_are_pruned_without_loss(run: Path, tmp_path: Path) -> None:
    options = ("--steps", "prune", "--max-loss", "0.0000001")
    run_recsys("compress", str(run), f"{tmp_path}/small", *options)
    found = json.loads((tmp_path / "small" / "compression.json").read_text())["stages"]
    assert found[1]["metrics"]["auc"] >= found[0]["metrics"]["auc"] - 1e-7
    kept = load_tables(tmp_path / "small")["user"]
    assert len(kept) <= (load_tables(run)["user"] != 0).any(1).sum() + 2
    assert not (kept[1:-1] == 0).all(1).any() and (kept[-1] == 0).all()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["tables.user.sparsity.l1=1"], "needs optimizer adagrad, sgd, adam without weight_decay"),
        (["optimizer.tables.name=sgd", "tables.user.sparsity={l1: 0}"], "has no effect while l1 and group_lasso are 0"),
        (
            [
                "optimizer.tables.name=sgd",
                "tables.user={sparsity: {group_lasso: 1}, sharding_type: column_wise}",
            ],
            "'tables.user.sparsity.group_lasso' prunes whole rows, which column_wise splits",
        ),
    ],
)
def test_mistakes(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        load_config("configs/dlrm_sample.yaml", overrides)
    assert said in str(error.value)
