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
    monkeypatch: pytest.MonkeyPatch,
    optimizer: TableOptimizer,
    dtype: torch.dtype,
    at_once: int = ROWS * DIM,
    steps: tuple[int, ...] = (ROWS, ROWS, ROWS),
    decay: float = 0.9,
    penalty: float = 0.0,
) -> list[torch.Tensor]:
    """Return the weights and states after steps that look up the first so many rows alone.

    Args:
        decay: of the learning rate after each step. penalty: on all rows.
    """
    monkeypatch.setattr(torch_update, "_ELEMENTS_AT_ONCE", {"cpu": at_once})
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)  # of one rank
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ROWS, DIM, generator=generator).to(dtype)
    l1 = 5.0 if optimizer is TableOptimizer.ftrl else 0.0
    settings = TableOptimizerConfig(name=optimizer, learning_rate=0.1, l1=l1)
    table = TorchTable("t", weights, settings, features=["f"], l2_all_rows=penalty, learning_rate=0.1)
    for rows in steps:
        ids = torch.randint(0, rows, (50,), generator=generator)
        batch = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.full((25,), 2, dtype=torch.int32))
        ReplicatedTables([table]).update(batch, {"f": torch.randn(25, DIM, generator=generator)})
        table.num_updates += 1
        table.learning_rate *= decay
    return [weights, *table.state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", IN_TORCH, ids=lambda o: o.name)
def test_pieces_of_a_table_make_no_difference(
    optimizer: TableOptimizer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for penalty in (0.0, 0.5):
        whole = trained(monkeypatch, optimizer, dtype, penalty=penalty)
        for at_once in (1, 5 * DIM):
            pieces = trained(monkeypatch, optimizer, dtype, at_once, penalty=penalty)
            torch.testing.assert_close(pieces, whole, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", IN_TORCH, ids=lambda o: o.name)
def test_rows_that_are_not_looked_up_stay(optimizer: TableOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum alone would move them, and so would a threshold that follows the learning rate."""
    before = trained(monkeypatch, optimizer, torch.float32, steps=(ROWS, ROWS))
    after = trained(monkeypatch, optimizer, torch.float32, steps=(ROWS, ROWS, 5))
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[5:], old[5:]) and not torch.equal(new[:5], old[:5])


@pytest.mark.parametrize("optimizer", IN_TORCH, ids=lambda o: o.name)
def test_a_learning_rate_of_0_moves_nothing(optimizer: TableOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a schedule, elements of FTRL that are 0 stay so; a row's first lookup is what may make them 0."""
    first, before, after = (
        trained(monkeypatch, optimizer, torch.float32, steps=(ROWS,) * steps, decay=0)[0] for steps in (0, 1, 3)
    )
    known = (before != first).any(dim=1)
    torch.testing.assert_close(after[known], before[known], rtol=1e-5, atol=0)
    assert bool((after[known] == 0).any()) == (optimizer is TableOptimizer.ftrl)
