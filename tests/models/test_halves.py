"""Gradients summed over halves of a batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from recsys.memory.trace import LivePeak
from recsys.models.base import checkpoint_mlps, mlp
from recsys.models.columns import PairwiseDots, take_rows
from recsys.models.dropout import dropouts, set_dropout_keys
from recsys.models.halves import PartByPart, in_parts, sum_in_halves
from recsys.models.products import add_products, product_over_rows


def gradients(layer: nn.Module, x: torch.Tensor, by_output: torch.Tensor) -> list[torch.Tensor]:
    wanted = [x.requires_grad_(), *layer.parameters()]
    outputs = layer(x)
    outputs.mul_(1)  # as the ReLU of an MLP, which changes what a layer gives in place
    return list(torch.autograd.grad(outputs, wanted, by_output))


def on_one_thread_and_two(compute: Callable[[], list[Any]]) -> list[list[Any]]:
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(compute())
    finally:
        torch.set_num_threads(threads)
    return found


def run(layers: nn.Module, x: torch.Tensor, by_output: torch.Tensor, first: int) -> list[torch.Tensor]:
    """Return the gradients by rows `first` and on of a batch, and by parameters."""
    set_dropout_keys(dropouts(layers), 1, 2, torch.arange(first, first + len(x)))
    return gradients(layers, x.detach().clone(), by_output)


def hold_to_halves(build: Callable[[], nn.Module], x: torch.Tensor, by_output: torch.Tensor) -> None:
    """Hold what one process sums on any threads to what two, of one each, add up, and to what plain layers give."""
    plain, whole, half = (build() for _ in range(3))
    for layers in (whole, half):
        layers.load_state_dict(plain.state_dict())
    expected = run(plain, x, by_output, 0)
    sum_in_halves(whole, 1)
    sum_in_halves(half, 2)
    cuts = slice(0, len(x) // 2), slice(len(x) // 2, len(x))
    parts, _ = on_one_thread_and_two(lambda: [run(half, x[rows], by_output[rows], rows.start) for rows in cuts])
    for found in on_one_thread_and_two(lambda: run(whole, x, by_output, 0)):
        assert torch.equal(found[0], torch.cat([part[0] for part in parts]))
        for of_whole, first, second in zip(found[1:], parts[0][1:], parts[1][1:], strict=True):
            assert torch.equal(of_whole, first + second)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape",
    [(64, 33), (64, 1), (1, 64), (1, 3000), (700, 800), (1500, 600), (2, 140_000), (5, 7), (9, 129), (7, 75_002)],
)
def test_one_process_sums_as_two(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    width, outputs = shape
    hold_to_halves(lambda: nn.Linear(width, outputs), torch.randn(128, width), torch.randn(128, outputs))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_layers_that_are_normalised_sum_in_halves_too(dropout: float) -> None:
    torch.manual_seed(0)
    x, by_output = torch.randn(700, 30), torch.randn(700, 4)
    hold_to_halves(lambda: nn.Sequential(mlp(30, [64, 32], 4, dropout, layer_norm=True)), x, by_output)


def test_odd_rows_frozen_weights_and_checkpoints() -> None:
    layers = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2))
    layers[0].weight.requires_grad_(False)
    wanted = list(layers[1].parameters())
    x, by_output = torch.randn(7, 4), torch.randn(7, 2)
    expected = torch.autograd.grad(layers(x), wanted, by_output)
    sum_in_halves(layers, 1)
    torch.testing.assert_close(torch.autograd.grad(layers(x), wanted, by_output), expected)
    again = checkpoint(layers, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, wanted, by_output), expected)
    assert isinstance(layers[0], nn.Linear) and list(layers.state_dict()) == ["0.weight", "1.weight", "1.bias"]


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(700, 800),
        lambda: nn.Linear(5, 7),
        lambda: mlp(12, [16, 700, 8], 1, dropout=0.3),
        lambda: nn.Sequential(mlp(12, [16], None, dropout=0.0, layer_norm=True), nn.Linear(16, 3, bias=False)),
    ],
    ids=["wide", "narrow", "MLP", "norm"],
)
def test_a_loss_may_have_gradients_in_it(build: Callable[[], nn.Module], num_parts: int) -> None:
    """Such as the penalty of Gulrajani et al. 2017 (arXiv:1704.00028) on the gradient by the input."""
    torch.manual_seed(0)
    plain, layers = build(), build()
    layers.load_state_dict(plain.state_dict())
    sum_in_halves(layers, 3 - num_parts)
    first = next(module for module in plain.modules() if isinstance(module, nn.Linear))
    x, found = torch.randn(64, first.in_features, requires_grad=True), []
    for module in (plain, layers):
        set_dropout_keys(dropouts(module), seed=1, step=2, rows=torch.arange(64))
        (by_x,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(by_x.square().mean(), [x, *module.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [64, 63, 5])
@pytest.mark.parametrize("last", [1, None])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("frozen", [[], ["0.weight"], ["0.weight", "0.bias", "3.bias"], ["6.weight", "6.bias"]])
def test_an_mlp_is_its_layers_one_by_one(rows: int, last: int | None, dropout: float, frozen: list[str]) -> None:
    """To the last bit, whatever is trained; what it is given, and the gradient by what it gives, stay as they were."""
    torch.manual_seed(0)
    layers, other = (mlp(12, [32, 700, 16], last, dropout) for _ in range(2))
    other.load_state_dict(layers.state_dict())
    for module in (layers, other):
        set_dropout_keys(dropouts(module), seed=1, step=2, rows=torch.arange(rows))
        sum_in_halves(module, 1)
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
    one_by_one = nn.Sequential(*other)
    for x_is_wanted in (True, False):
        x = torch.randn(rows, 12).requires_grad_(x_is_wanted)
        by_output = torch.randn(rows, last or 16)
        found = []
        for module in (one_by_one, layers):
            given, gradient = x.detach().clone().requires_grad_(x_is_wanted), by_output.clone()
            outputs = module(given)
            wanted = [each for each in (given, *module.parameters()) if each.requires_grad]
            found.append([outputs.detach().clone(), *torch.autograd.grad(outputs, wanted, gradient)])
            assert torch.equal(given, x) and torch.equal(gradient, by_output)
        assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    assert type(outputs.grad_fn).__name__ == "_MLPInPartsBackward"


@pytest.mark.parametrize("hidden", [[256], [256, 256, 256, 256], [512, 256, 64], [64, 512, 64, 512]])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_mlp_takes_less_than_its_layers(hidden: list[int], dropout: float) -> None:
    """What a layer gave goes when its gradient is there, and a gradient lies where the one behind the ReLU was."""
    peaks = []
    for one_by_one in (False, True):
        layers: nn.Module = mlp(8, hidden, 1, dropout)
        set_dropout_keys(dropouts(layers), seed=1, step=2, rows=torch.arange(4096))
        sum_in_halves(layers, 1)
        layers = nn.Sequential(*layers) if one_by_one else layers
        with LivePeak(layers.parameters()) as live:
            layers(torch.randn(4096, 8, requires_grad=True)).sum().backward()
        peaks.append(live.highest)
    assert peaks[0] <= peaks[1] - 4096 * 64 * 4


@pytest.mark.parametrize("last", [16, None])
@pytest.mark.parametrize(("shape", "dropout"), [((4096,), 0.0), ((4096,), 0.3), ((64, 64), 0.0)])
def test_mlps_that_are_computed_again_give_the_same_and_take_less(
    last: int | None, shape: tuple[int, ...], dropout: float
) -> None:
    torch.manual_seed(0)
    kept, again = (nn.ModuleList(mlp(16, [256, 128, 16], last, dropout) for _ in range(3)) for _ in range(2))
    again.load_state_dict(kept.state_dict())
    checkpoint_mlps(again)
    x, by_output, found, peaks = torch.randn(*shape, 16), torch.randn(*shape, 16), [], []
    for module in (kept, again):
        set_dropout_keys(dropouts(module), seed=1, step=2, rows=torch.arange(shape[0]))
        sum_in_halves(module, 1)
        with LivePeak(module.parameters()) as live:
            outputs = x
            for each in module:
                outputs = each(outputs)
            found.append(torch.autograd.grad(outputs, list(module.parameters()), by_output))
        peaks.append(live.highest)
    assert all(map(torch.equal, *found))
    assert peaks[1] < 0.7 * peaks[0]


@pytest.mark.parametrize(
    "layers",
    [
        mlp(4, [3], 1, dropout=0.0)[:2],
        mlp(4, [3], None, dropout=0.0).append(nn.Tanh()),
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
    ],
    ids=["no ReLU", "further", "linear"],
)
def test_other_layers_are_called_one_by_one(layers: nn.Sequential) -> None:
    layers.eval()
    x = torch.randn(32, 4)
    expected = layers(x)
    sum_in_halves(layers, 1)
    found = layers(x)
    torch.testing.assert_close(found, expected)
    assert type(found.grad_fn).__name__ != "_MLPInPartsBackward" and type(layers) is nn.Sequential


@pytest.mark.parametrize("shape", [(0, 4), (4,), (1, 4), (2, 0, 4)])
def test_few_rows_and_none(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(4, 3)
    x, by_output = torch.randn(shape), torch.randn(*shape[:-1], 3)
    expected = gradients(layer, x, by_output)
    sum_in_halves(layer, 1)
    torch.testing.assert_close(gradients(layer, x, by_output), expected)


@pytest.mark.parametrize("num_rows", [2, 6, 10, 18, 22])
def test_few_rows_are_multiplied_alike_on_any_threads(num_rows: int) -> None:
    """MKL has products of 5 to 11 rows of their own on two threads, on some processors."""
    torch.manual_seed(0)
    layer, x, by_output = nn.Linear(48, 96), torch.randn(num_rows, 48), torch.randn(num_rows, 96)
    expected = gradients(layer, x, by_output)
    sum_in_halves(layer, 1)
    one, two = on_one_thread_and_two(lambda: gradients(layer, x, by_output))
    assert all(map(torch.equal, one, two))
    torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


class OfOnePart(nn.Module, PartByPart):
    """Layers over ids, of which a part may have any number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 48, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("num_ids", [0, 5, 768, 1000, 3000])
def test_layers_of_a_part_sum_alike_on_any_threads(num_ids: int) -> None:
    """A product of more than 768 rows is shared out over threads, and LayerNorm's gradients by its own always are."""
    torch.manual_seed(0)
    plain = OfOnePart()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    x, by_output = torch.randn(num_ids, 48), torch.randn(num_ids, 48)
    expected, own = gradients(plain, x, by_output), OfOnePart()
    own.load_state_dict(plain.state_dict())
    sum_in_halves(own, 1)
    assert own.num_parts == 2
    found = on_one_thread_and_two(lambda: gradients(own, x, by_output))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(own(x), plain(x))


def test_products_do_not_follow_the_number_of_threads() -> None:
    torch.manual_seed(0)
    one, other, long = torch.randn(2100, 40), torch.randn(2100, 16), torch.randn(30, 2100)
    found = on_one_thread_and_two(
        lambda: [product_over_rows(one, other), add_products(torch.ones(30, 16), long, other)]
    )
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    expected = [(one.double().T @ other.double()).float(), (1 + long.double() @ other.double()).float()]
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-3)


def test_parts_of_a_function() -> None:
    weight, x = torch.randn(5, requires_grad=True), torch.randn(6, 5)
    (found,) = torch.autograd.grad(in_parts(weight.mul, 2, x).sum(), weight)
    assert torch.equal(found, x[:3].sum(0) + x[3:].sum(0))
    with torch.no_grad():
        assert torch.equal(in_parts(weight.mul, 2, x), weight * x)


@pytest.mark.parametrize("number", [1, 2, 7, 20])
def test_dot_products_do_not_depend_on_how_vectors_lie(number: int) -> None:
    """The plan decides in which order tables give their vectors, beside each other in memory."""
    torch.manual_seed(0)
    whole, first = torch.randn(100, (number - 1) * 16), torch.randn(100, 16)
    beside = [first, *whole.split(16, dim=1)][:number]
    apart = [first, *(each.clone() for each in beside[1:])]
    by_products = torch.randn(100, number * (number - 1) // 2)
    results = []
    for vectors in (beside, apart):
        leaves = [each.detach().requires_grad_() for each in vectors]
        products = PairwiseDots()(leaves)
        results.append([products, *torch.autograd.grad(products, leaves, by_products)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("width", [(), (16,)])
def test_gradients_of_rows_are_summed_in_their_order(width: tuple[int, ...]) -> None:
    """An index alone sums those of a CPU's threads by chance, so that no two runs would learn quite the same."""
    torch.manual_seed(0)
    tensor, rows = torch.randn(50, *width, requires_grad=True), torch.randint(0, 50, (40_000,))
    by_rows, threads = torch.randn(40_000, *width), torch.get_num_threads()
    expected = torch.zeros(50, *width).index_add(0, rows, by_rows)
    try:
        torch.set_num_threads(2)
        found = [torch.autograd.grad(take_rows(tensor, rows), tensor, by_rows)[0] for _ in range(20)]
        torch.set_num_threads(1)
        found += torch.autograd.grad(take_rows(tensor, rows), tensor, by_rows)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-3)


class Count(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_wide_layers_take_no_more_operators() -> None:
    """Their gradients are cut into pieces, of which there were 100,000: predictions took minutes."""
    with FakeTensorMode():
        layer, x = nn.Linear(200_000, 200_000, bias=False), torch.empty(128, 200_000)
        sum_in_halves(layer, 1)
        outputs = layer(x)
        with Count() as count:
            torch.autograd.grad(outputs, list(layer.parameters()), outputs)
    assert 256 < count.number < 10 * 256
