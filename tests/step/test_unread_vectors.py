"""A model that reads the vectors of a list only if its rows have ids, as each micro-batch and rank sees them."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from launch import losses_of, must_train
from torch import nn

from recsys.config import ModelConfig
from recsys.config.model import Needs
from recsys.models.base import DenseInputs, Model, Vectors, sum_by_row

CONFIG = f"""
data: {{train: log.parquet, label_column: label, num_streams: 1, window_mib: 64}}
features: {{user_id: {{table: user}}, history: {{table: item, max_length: 4}}}}
tables:
  user: {{num_embeddings: 100, embedding_dim: 4}}
  item: {{num_embeddings: 100, embedding_dim: 4, init_range: 0.5}}
optimizer: {{tables: {{name: adam, learning_rate: 0.05}}}}
model: {{name: {Path(__file__).stem}.Lists}}
train: {{global_batch_size: 8, log_every_steps: 1, max_steps: 12, epochs: 4}}
"""


@dataclass
class ListsConfig(ModelConfig):
    name: str = f"{Path(__file__).stem}.Lists"

    def needs(self) -> Needs:
        return Needs(sequences=("history",))


class Lists(Model):
    """A linear layer over a user's vector and the sum of their list's, which it computes only if there are ids."""

    Config = ListsConfig

    def __init__(self, config: ListsConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.layer = nn.Linear(4, 1)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        user, history = vectors["user_id"], vectors["history"]
        if history.values().shape[0]:
            user = user + sum_by_row(history)
        return self.layer(user)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in which most rows have empty lists, so that some micro-batches and ranks have no id of a list."""
    folder = tmp_path_factory.mktemp("unread")
    lists = [[i % 50, i % 7] if i % 5 == 0 else [] for i in range(48)]
    labels = [int(i % 5 == 0) for i in range(48)]
    table = pa.table({"user_id": [i % 9 for i in range(48)], "history": lists, "label": labels})
    pq.write_table(table, folder / "log.parquet")
    (folder / "c.yaml").write_text(CONFIG.replace("log.parquet", str(folder / "log.parquet")))
    return folder / "c.yaml"


def losses(config: Path, run: Path, *overrides: str, nproc: int = 1) -> list[float]:
    must_train(str(config), f"run.dir={run}", *overrides, nproc=nproc, cwd=Path(__file__).parent)
    return losses_of(run)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses where each batch is in one part."""
    found = losses(config, tmp_path_factory.mktemp("whole"))
    assert len(found) == 12 and found[-1] < 0.9 * found[0]
    return found


@pytest.mark.parametrize(("nproc", "micro_batch_size"), [(1, 1), (1, 2), (2, None), (2, 1)])
def test_lists_that_a_part_does_not_have_change_nothing(
    nproc: int, micro_batch_size: int | None, config: Path, whole: list[float], tmp_path: Path
) -> None:
    size = "null" if micro_batch_size is None else micro_batch_size
    parts = losses(config, tmp_path / "parts", f"train.micro_batch_size={size}", nproc=nproc)
    assert parts == pytest.approx(whole, rel=1e-5)
