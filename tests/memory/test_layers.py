"""Parameters, outputs and FLOPs of layers against formulas worked out by hand."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recsys.memory.layers import Layer, analyse_layers, format_layers
from recsys.models.dcn import _CrossNet

BATCH, LENGTH, WIDTH = 5, 7, 12


def layers(module: nn.Module, *shapes: tuple[int, ...]) -> dict[str, Layer]:
    inputs = [torch.ones(shape) for shape in shapes]
    return {layer.name: layer for layer in analyse_layers(module, lambda: module(*inputs))}


def test_linear_and_feed_forward() -> None:
    found = layers(nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 2, bias=False)), (BATCH, 3))
    # in * out + out parameters; B * out outputs, each a dot product over `in`: 2 * B * in * out FLOPs.
    assert found["0"] == Layer("0", "Linear", 3 * 10 + 10, BATCH * 10, 2 * BATCH * 3 * 10)
    assert found["2"] == Layer("2", "Linear", 10 * 2, BATCH * 2, 2 * BATCH * 10 * 2)
    # Over a sequence, the same at every place of it.
    assert layers(nn.Sequential(nn.Linear(3, 10)), (BATCH, LENGTH, 3))["0"].flops == 2 * BATCH * LENGTH * 3 * 10


def test_convolution() -> None:
    # 4 channels in, 6 out, in 2 groups, windows of 3: each output is a dot product over 2 channels times 3 places.
    # 7 places, no padding: 5 windows.
    found = layers(nn.Sequential(nn.Conv1d(4, 6, 3, groups=2)), (BATCH, 4, LENGTH))["0"]
    assert found == Layer("0", "Conv1d", 6 * 2 * 3 + 6, BATCH * 6 * 5, 2 * BATCH * 6 * 5 * 2 * 3)
    # 3 × 2 windows over 8 × 9 with stride 2: 3 × 4 of them.
    found = layers(nn.Sequential(nn.Conv2d(4, 6, (3, 2), stride=2)), (BATCH, 4, 8, 9))["0"]
    assert found.outputs == BATCH * 6 * 3 * 4 and found.flops == 2 * BATCH * 6 * 12 * 4 * 6


def test_attention() -> None:
    for batch_first in (True, False):
        module = nn.MultiheadAttention(WIDTH, 3, batch_first=batch_first)
        shape = (BATCH, LENGTH, WIDTH) if batch_first else (LENGTH, BATCH, WIDTH)
        inputs = [torch.ones(shape)] * 3
        wrapped = nn.ModuleDict({"attention": module})
        (found,) = analyse_layers(wrapped, lambda m=module, i=inputs: m(*i, need_weights=False))
        # Four projections of width × width with a bias.
        assert found.parameters == 4 * (WIDTH * WIDTH + WIDTH)
        assert found.outputs == BATCH * LENGTH * WIDTH
        # Projections: 4 * 2 * B * L * d * d. Scores and weighted sums: 2 * B * L * L * d each.
        assert found.flops == 8 * BATCH * LENGTH * WIDTH**2 + 4 * BATCH * LENGTH**2 * WIDTH


def test_cross_attention() -> None:
    keys = 4
    module = nn.MultiheadAttention(WIDTH, 3, kdim=8, vdim=20, batch_first=True)
    inputs = torch.ones(BATCH, LENGTH, WIDTH), torch.ones(BATCH, keys, 8), torch.ones(BATCH, keys, 20)
    (found,) = analyse_layers(nn.ModuleDict({"attention": module}), lambda: module(*inputs))
    # Queries and output of width d; keys from 8 and values from 20 numbers.
    projections = 2 * 2 * BATCH * LENGTH * WIDTH**2 + 2 * BATCH * keys * (8 + 20) * WIDTH
    assert found.flops == projections + 4 * BATCH * LENGTH * keys * WIDTH
    assert found.parameters == 2 * WIDTH**2 + WIDTH * 8 + WIDTH * 20 + 4 * WIDTH


def test_embeddings() -> None:
    bag = nn.EmbeddingBag(100, WIDTH, mode="sum")
    (found,) = analyse_layers(nn.ModuleList([bag]), lambda: bag(torch.arange(20), torch.arange(0, 20, 4)))
    # Every one of 20 ids adds a row of d numbers to one of 5 vectors.
    assert found == Layer("0", "EmbeddingBag", 100 * WIDTH, 5 * WIDTH, 20 * WIDTH)


def test_cross_layers() -> None:
    (found,) = layers(nn.Sequential(_CrossNet(WIDTH, 2)), (BATCH, WIDTH)).values()
    # Two matrices of width × width with a bias, whose products have B * d elements.
    assert found == Layer("0", "_CrossNet", 2 * (WIDTH**2 + WIDTH), 2 * BATCH * WIDTH, 2 * 2 * BATCH * WIDTH**2)


class Attending(nn.Module):
    """Attention with a parameter of its own, and one in a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor, self.others = nn.Parameter(torch.ones(3)), nn.ParameterList([torch.ones(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.norm(x))[:, None]
        return F.scaled_dot_product_attention(x, x, x)


def test_what_a_module_computes_outside_its_layers() -> None:
    with torch.no_grad():
        found = layers(Attending(), (BATCH, LENGTH, WIDTH))
    assert list(found) == ["model", "norm", "inner"]
    # Scores and weighted sums: 2 * B * L * L * d each. The layers have their own parameters and products.
    outputs = BATCH * LENGTH * WIDTH
    assert found["model"] == Layer("model", "Attending", 3 + 4, outputs, 4 * BATCH * LENGTH**2 * WIDTH)
    assert found["norm"] == Layer("norm", "LayerNorm", 2 * WIDTH, outputs, 0)
    assert found["inner"] == Layer("inner", "Linear", WIDTH**2 + WIDTH, outputs, 2 * BATCH * LENGTH * WIDTH**2)


def test_a_layer_called_twice_counts_twice_but_has_its_parameters_once() -> None:
    module = nn.ModuleDict({"shared": nn.Linear(3, 3)})
    (found,) = analyse_layers(module, lambda: module["shared"](module["shared"](torch.ones(BATCH, 3))))
    assert found == Layer("shared", "Linear", 12, 2 * BATCH * 3, 2 * 2 * BATCH * 9)
    assert "| **all** |  | 12 | 30 | 180 |" in format_layers([found], BATCH)


def test_fake_tensors_take_no_memory() -> None:
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(1 << 20, 1 << 20))  # 4 TiB
        (found,) = analyse_layers(module, lambda: module(torch.empty(1 << 16, 1 << 20)))
    assert found.flops == 2 * 2**16 * 2**20 * 2**20
