"""Dropout by row: what it keeps for the backward pass, and that a ReLU within it changes nothing."""

import pytest
import torch
from torch import nn

from recsys.models import RowDropout
from recsys.models.dropout import dropouts, set_dropout_keys
from recsys.runtime.uniform import kept, uniform

ROWS, COLUMNS = 50, 40


def passed(p: float, relu: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return what a layer, a ReLU and dropout give, the layer's gradient, and where what is kept of it lies."""
    torch.manual_seed(0)
    layer, numbers = nn.Linear(8, COLUMNS).to(dtype), torch.randn(ROWS, 8, dtype=dtype)
    model = nn.Sequential(RowDropout(p, relu)) if relu else nn.Sequential(RowDropout(p))
    set_dropout_keys(dropouts(model), seed=0, step=1, rows=torch.arange(ROWS))
    places: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        places.append(tensor.untyped_storage().data_ptr())
        return tensor

    given = layer(numbers)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(given if relu else given.relu())
    (result * torch.randn(ROWS, COLUMNS, dtype=dtype)).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    places = [place for place in places if place != result.untyped_storage().data_ptr()]
    return result.detach(), gradient, places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_relu_within_is_one_before_it_and_keeps_the_result_alone(p: float, dtype: torch.dtype) -> None:
    (apart, expected, others), (within, gradient, places) = passed(p, False, dtype), passed(p, True, dtype)
    assert torch.equal(within, apart) and torch.equal(gradient, expected)
    assert places == [] and (others or p == 0)  # the next layer keeps the result too
    assert abs(float((within == 0).float().mean()) - 0.5 * (1 + p)) < 0.1


def test_a_relu_without_training_changes_no_input() -> None:
    model, numbers = RowDropout(0.3, relu=True).eval(), torch.tensor([[-1.0, 2.0]])
    assert model(numbers).tolist() == [[0.0, 2.0]] and numbers.tolist() == [[-1.0, 2.0]]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 1e-9, 1 - 1e-9])
def test_what_is_kept_without_making_numbers_of_it(share: float) -> None:
    rows, columns = torch.randint(0, 1 << 30, (300,)), torch.arange(200)
    for some in (rows, rows.sort().values, torch.arange(300)):
        assert torch.equal(kept(7, some, columns, share), uniform(7, some, columns) >= share)
