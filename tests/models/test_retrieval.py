"""The two-tower model: its loss by hand, and the same numbers on any number of ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch import evaluate, fork_train
from retrieval import NUM_USERS, write_retrieval
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.checkpoint.state import Marker
from recsys.data.batch import Batch
from recsys.data.facts import RowCounter
from recsys.data.order import Position
from recsys.data.pool import Fence
from recsys.models import DenseInputs, two_tower
from recsys.runtime.world import open_world


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval(tmp_path_factory.mktemp("retrieval"))


def train(config: Path, run_dir: Path, *overrides: str, nproc: int = 1) -> tuple[dict[str, float], list[float]]:
    done = fork_train(str(config), f"run.dir={run_dir}", *overrides, nproc=nproc)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = json.loads((run_dir / "result.json").read_text())["metrics"]["test"]
    return metrics, [record["loss"] for record in records if record["kind"] == "train"]


@pytest.fixture(scope="module")
def one_process(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], list[float]]:
    return train(config, tmp_path_factory.mktemp("one"))


# Three ranks have 21, 21 and 22 of 64 rows, so that batches of two are filled up.
@pytest.mark.parametrize("nproc", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5, 6, 7, 8))])
def test_ranks_share_their_negatives(
    nproc: int, config: Path, one_process: tuple[dict[str, float], list[float]], tmp_path: Path
) -> None:
    alone, losses = one_process
    metrics, losses_of_ranks = train(config, tmp_path, nproc=nproc)
    assert len(losses) == 12 * -(-600 // 64)
    torch.testing.assert_close(losses_of_ranks[:20], losses[:20], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses_of_ranks, losses, rtol=0, atol=1e-4)
    torch.testing.assert_close(metrics, alone, rtol=0, atol=1e-6)
    assert alone["users"] == NUM_USERS
    again = evaluate(tmp_path)
    torch.testing.assert_close(again["test"], alone, rtol=0, atol=1e-6)
    assert again["valid"] == again["test"]
    # At random 10 of the 45 items not seen, 5 of which are sought, hold 22% of them; of one's own half, 67%.
    assert alone["recall@10"] > 0.5


def refuse_to_count() -> None:
    """In a process of its own, makes it an error to count rows."""

    def add(self: RowCounter, chunk: pa.Array) -> None:
        raise AssertionError("rows are counted again")

    RowCounter.add = add  # type: ignore[method-assign]


def test_rows_are_counted_once(config: Path, tmp_path: Path) -> None:
    """What the correction goes by is kept with the run; runs that did not keep it count again, and keep it then."""
    train(config, tmp_path, "train.epochs=1", "train.max_steps=4")
    kept = tmp_path / "vocabulary" / "item.counts.parquet"
    counts = pq.read_table(kept)["count"].to_pylist()
    assert len(counts) == 500 and sum(counts) == 600
    resumed = [str(config), f"run.dir={tmp_path}", "run.resume=true", "train.epochs=1"]
    done = fork_train(*resumed, "train.max_steps=6", before=refuse_to_count)
    assert done.returncode == 0, done.stderr[-3000:]
    assert evaluate(tmp_path)["test"]["users"] == NUM_USERS
    # As an earlier version has left it.
    for folder in tmp_path.glob("checkpoints/step-*"):
        replace(Marker.read(folder), facts={}).write(folder)
    kept.unlink()
    done = fork_train(*resumed, "train.max_steps=8")
    assert done.returncode == 0, done.stderr[-3000:]
    assert pq.read_table(kept)["count"].to_pylist() == counts


@pytest.mark.parametrize("scores_at_once", [1, 11, 1000])
def test_the_loss_by_hand(scores_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_tower, "_SCORES", {"cpu": scores_at_once})
    users, items = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    item_rows = [7, 2, 7, 4, 2]  # rows 0 and 2 hold the same item, and row 4 is fill
    weights = torch.tensor([1.0, 2.0, 1.0, 0.5, 0.0])
    log_q = torch.log(torch.arange(1, 11) / 55)
    lengths = torch.tensor([1, 1, 1, 1, 1], dtype=torch.int32)
    ids = KeyedJaggedTensor(keys=["item"], values=torch.tensor(item_rows), lengths=lengths)
    batch = Batch(ids, torch.zeros(5, 0), torch.zeros(5), weights, None, 4, 0, (0, 5), Position(), Fence())

    expected = torch.zeros(())
    for i in range(4):
        scores = {}
        for j in range(4):
            if j == i or item_rows[j] != item_rows[i]:
                scores[j] = users[i] @ items[j] / 0.5 - log_q[item_rows[j]]
        total = torch.stack([score.exp() for score in scores.values()]).sum()
        expected = expected - weights[i] * (scores[i] - total.log())

    with open_world():
        config = two_tower.TwoTowerConfig(
            user_features=["user"], item_features=["item"], item_id="item", temperature=0.5
        )
        model = two_tower.TwoTower(config, DenseInputs({"user": 4, "item": 4}, [], log_shares=log_q))
        loss = model.losses((users, items), batch)["softmax"]
        gradients = torch.autograd.grad(3 * loss, (users, items))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * expected, (users, items)))
