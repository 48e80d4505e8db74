"""`tables.X.projected_dim`: a model reads the vectors of a narrow table by a matrix of the dense part."""

from pathlib import Path

import pytest
import torch
from launch import fork_train, train_losses
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import load_config
from recsys.models.projections import TableProjections

NARROW = ("tables.item.embedding_dim=4", "tables.item.projected_dim=8")


def train(run_dir: Path, *overrides: str, nproc: int = 1) -> list[float]:
    settings = (
        "train.log_every_steps=1",
        "data.window_mib=1",
        "train.max_steps=12",
        "optimizer.dense.learning_rate=0.01",
        *NARROW,
    )
    return train_losses("configs/dlrm_sample.yaml", run_dir, *settings, *overrides, nproc=nproc)


def test_features_of_a_table_share_its_matrix() -> None:
    projections = TableProjections(load_config(Path("configs/dlrm_sample.yaml"), NARROW))
    (matrix,) = projections.parameters()
    item, user = torch.randn(3, 4), torch.randn(3, 8)
    history = JaggedTensor(torch.randn(5, 4), lengths=torch.tensor([2, 0, 3]))
    vectors, _ = projections(nn.Module(), ({"item_id": item, "history": history, "user_id": user}, torch.zeros(3, 0)))
    torch.testing.assert_close(vectors["item_id"], item @ matrix.T)
    torch.testing.assert_close(vectors["history"].values(), history.values() @ matrix.T)
    assert vectors["user_id"] is user and matrix.shape == (8, 4)


@pytest.mark.slow
def test_it_learns_the_same_on_two_ranks_and_resumed(tmp_path: Path) -> None:
    one = train(tmp_path / "one")
    assert sum(one[-3:]) < sum(one[:3])
    two = train(tmp_path / "two", "tables.item.sharding_type=row_wise", nproc=2)
    assert two == pytest.approx(one, abs=1e-5)
    train(tmp_path / "parts", "train.max_steps=5")
    assert train(tmp_path / "parts", "run.resume=true")[-7:] == one[-7:]


def test_a_narrower_projection_is_refused(tmp_path: Path) -> None:
    done = fork_train("configs/dlrm_sample.yaml", f"run.dir={tmp_path}", "tables.item.projected_dim=4")
    assert done.returncode == 1 and "must be at least embedding_dim=8, found 4" in done.stderr
