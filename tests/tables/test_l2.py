"""Penalties on the rows that are looked up, and on all rows of a table: what plain torch learns with them."""

from pathlib import Path

import pytest
import torch
from test_plans import assert_as_plain_torch, folder, reference, write
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys.config import load_config
from recsys.errors import UserError
from recsys.step.micro_batches import Lookup

__all__ = ["folder"]  # a fixture

L2 = ("tables.user.l2=0.3", "tables.item.l2=0.1", "tables.category.l2=0.2", "tables.category.pooling=mean")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("model.attention={history: item_id}", "train.micro_batch_size=50")])
def test_l2_of_what_is_looked_up(options: tuple[str, ...], folder: Path) -> None:
    plan = ("tables.user.sharding_type=data_parallel", "tables.item.sharding_type=row_wise")
    _, expected = assert_as_plain_torch(folder, 2, plan, (*L2, *options))
    without = reference(folder, *options)[1]
    assert weights_size(expected) < 0.9 * weights_size(without)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_l2_of_lists_that_are_summed(kind: torch.dtype, weighted: bool) -> None:
    """Where a plan or a code has their ids looked up one by one, it is of the sum too; and small in FP16 it is no 0."""
    lengths, rows, factor = torch.tensor([2, 0, 3]), torch.tensor([0, 0, 2, 2, 2]), 1e-7
    vectors, of_ids = torch.rand(5, 4).to(kind), torch.rand(5) if weighted else None
    ids = KeyedJaggedTensor(["list"], torch.arange(5), of_ids, lengths)
    lookup = Lookup(ids, None, {"list": JaggedTensor(vectors.requires_grad_(), lengths=lengths)}, {})
    weights, gradient = torch.tensor([1.0, 5.0, 0.5]), torch.zeros(5, 4)
    lookup.add_l2([gradient], {"list": factor}, weights, unpooled=())
    leaf = vectors.detach().float().requires_grad_()
    sums = torch.zeros(3, 4).index_add(0, rows, leaf if of_ids is None else leaf * of_ids[:, None])
    (factor / 2 * weights[:, None] * sums.square()).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=0)
    by_id = torch.zeros(5, 4)
    lookup.add_l2([by_id], {"list": factor}, weights, unpooled=["list"])
    torch.testing.assert_close(by_id, factor * weights[rows][:, None] * vectors.detach().float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "optimizer, world_size",
    [("adam", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("adam", 1), ("rowwise_adagrad", 3)))],
)
def test_l2_of_all_rows(optimizer: str, world_size: int, folder: Path) -> None:
    """Rows that no step looks up go towards 0 too, and Adam's moments of all move in each step."""
    options = (f"optimizer.tables.name={optimizer}", "optimizer.tables.eps=1e-4", "tables.user.l2=0.1")
    options += ("tables.user.l2_all_rows=0.02", "tables.category.l2_all_rows=0.5", "tables.item.data_type=FP16")
    options += ("tables.item.l2_all_rows=0.1", "tables.user.num_embeddings=2000")
    _, expected = assert_as_plain_torch(folder, world_size, (), options)
    without = reference(folder, *options, *(f"tables.{name}.l2_all_rows=0" for name in ("user", "category", "item")))
    for name in ("user", "category", "item"):
        assert (expected[name] != without[1][name]).any(dim=1).all()


def weights_size(tables: dict[str, torch.Tensor]) -> float:
    return float(sum(weights.square().sum() for weights in tables.values()))


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            "sharding_type: row_wise",
            "'tables.item.l2_all_rows' is for replicated tables .* found sharding_type: row_wise; set",
        ),
        ("quantize: INT8", "'tables.item.l2_all_rows' .* found one that is looked up id by id; set"),
        (
            "optimizer: {name: lamb}",
            "'tables.item.optimizer.name': .* found lamb; .* or set tables.item.l2_all_rows to 0",
        ),
        (
            "optimizer: {weight_decay: 0.1}",
            "'tables.item.optimizer.weight_decay': .* set it to 0, or tables.item.l2_all",
        ),
        (
            "compute_kernel: fused_uvm",
            "'tables.item.compute_kernel': .* use fused, or set tables.item.l2_all_rows to 0",
        ),
    ],
)
def test_what_does_not_go_with_a_penalty_on_all_rows(settings: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(write(tmp_path), [f"tables.item={{l2_all_rows: 0.1, {settings}}}"])
