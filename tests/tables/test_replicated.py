"""Tables that every rank holds, and rules in torch: updated piece by piece, and no row that was not looked up."""

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.config import TableOptimizerConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.tables import torch_update
from recsys.tables.replicated import ReplicatedTables
from recsys.tables.torch_update import TorchTable

ROWS, DIM = 37, 4
IN_TORCH = [name for name in TableOptimizer if name.value.in_torch]


def trained(
    monkeypatch: pytest.MonkeyPatch, optimizer: TableOptimizer, dtype: torch.dtype, at_once: int, last_row: int = ROWS
) -> list[torch.Tensor]:
    """Return the weights and states after three steps whose last looks up rows below `last_row` alone."""
    monkeypatch.setattr(torch_update, "_ELEMENTS_AT_ONCE", {"cpu": at_once})
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)  # of one rank
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ROWS, DIM, generator=generator).to(dtype)
    settings = TableOptimizerConfig(name=optimizer, l1=0.5 if optimizer is TableOptimizer.ftrl else 0)
    table = TorchTable("t", weights, settings, features=["f"], learning_rate=0.1)
    for rows in (ROWS, ROWS, last_row):
        ids = torch.randint(0, rows, (50,), generator=generator)
        batch = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.full((25,), 2, dtype=torch.int32))
        ReplicatedTables([table]).update(batch, {"f": torch.randn(25, DIM, generator=generator)})
        table.num_updates += 1
        table.learning_rate *= 0.9
    return [weights, *table.state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", IN_TORCH, ids=lambda o: o.name)
def test_pieces_of_a_table_make_no_difference(
    optimizer: TableOptimizer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(monkeypatch, optimizer, dtype, ROWS * DIM)
    for at_once in (1, 5 * DIM):
        pieces = trained(monkeypatch, optimizer, dtype, at_once)
        torch.testing.assert_close(pieces, whole, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", IN_TORCH, ids=lambda o: o.name)
def test_rows_that_are_not_looked_up_stay(optimizer: TableOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum alone would move them, and so would a threshold that follows the learning rate."""
    whole = trained(monkeypatch, optimizer, torch.float32, ROWS * DIM)
    some = trained(monkeypatch, optimizer, torch.float32, ROWS * DIM, last_row=5)
    two_steps = trained(monkeypatch, optimizer, torch.float32, ROWS * DIM, last_row=1)
    for after_all, after_some, before in zip(whole, some, two_steps, strict=True):
        assert torch.equal(after_some[5:], before[5:])
        assert not torch.equal(after_all[5:], before[5:]) and not torch.equal(after_some[:5], before[:5])
