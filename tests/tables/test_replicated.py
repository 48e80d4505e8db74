"""Tables that every rank holds, updated piece by piece."""

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.config import TableOptimizerConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.tables import replicated
from recsys.tables.replicated import ReplicatedTable, ReplicatedTables

ROWS, DIM = 37, 4


def trained(
    monkeypatch: pytest.MonkeyPatch, optimizer: TableOptimizer, dtype: torch.dtype, at_once: int
) -> list[torch.Tensor]:
    monkeypatch.setattr(replicated, "_ELEMENTS_AT_ONCE", {"cpu": at_once})
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)  # of one rank
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ROWS, DIM, generator=generator).to(dtype)
    table = ReplicatedTable("t", weights, ["f"], TableOptimizerConfig(name=optimizer), learning_rate=0.1)
    for _ in range(3):
        ids = torch.randint(0, ROWS, (50,), generator=generator)
        batch = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.full((25,), 2, dtype=torch.int32))
        ReplicatedTables([table]).update(batch, {"f": torch.randn(25, DIM, generator=generator)})
    return [weights, *table.state.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "optimizer", [TableOptimizer.sgd, TableOptimizer.adagrad, TableOptimizer.rowwise_adagrad], ids=lambda o: o.name
)
def test_pieces_of_a_table_make_no_difference(
    optimizer: TableOptimizer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(monkeypatch, optimizer, dtype, ROWS * DIM)
    for at_once in (1, 5 * DIM):
        pieces = trained(monkeypatch, optimizer, dtype, at_once)
        torch.testing.assert_close(pieces, whole, rtol=0, atol=0)
