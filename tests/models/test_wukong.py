"""Wukong by hand."""

import pytest
import torch

from recsys.config import LabelConfig, load_config
from recsys.errors import UserError
from recsys.memory.layers import analyse_layers
from recsys.models import DenseInputs
from recsys.models.wukong import Wukong, WukongConfig
from recsys.tables.module_names import parameter_name

ROWS, DIM = 3, 4
SIZES = WukongConfig(num_layers=3, fm_vectors=2, linear_vectors=3, rank=6, fm_mlp=[7], bottom_mlp=[9], top_mlp=[11])


def a_model(labels: int, floats: int) -> tuple[Wukong, dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    names = {f"l{i}": LabelConfig() for i in range(labels)}
    model = Wukong(SIZES, DenseInputs({"a": DIM, "b": 3, "c": DIM}, ["x"] * floats, names))
    for parameter in model.parameters():  # norms would be no factors, and no terms
        torch.nn.init.normal_(parameter)
    vectors = {"a": torch.randn(ROWS, DIM), "b": torch.randn(ROWS, 3), "c": torch.randn(ROWS, DIM)}
    return model, vectors, torch.randn(ROWS, floats)


def by_hand(parameters: dict[str, torch.Tensor], vectors: list[torch.Tensor], floats: torch.Tensor) -> torch.Tensor:
    """Return the logits of one row, in the order and letters of the paper."""

    def mlp(name: str, x: torch.Tensor) -> torch.Tensor:
        hidden = (parameters[f"{name}.0.weight"] @ x + parameters[f"{name}.0.bias"]).clamp(min=0)
        return parameters[f"{name}.3.weight"] @ hidden + parameters[f"{name}.3.bias"]

    def normalised(name: str, x: torch.Tensor) -> torch.Tensor:
        spread = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return (x - x.mean(-1, keepdim=True)) / spread * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    first = [mlp("bottom", floats)] if len(floats) else []
    x = torch.stack([*first, vectors[0], parameters["projections.b.weight"] @ vectors[1], vectors[2]])
    for number in range(SIZES.num_layers):
        layer = f"layers.{number}"
        products = x @ x.T @ parameters[f"{layer}.factors.weight"].T  # X Xᵀ Y
        fmb = mlp(f"{layer}.mlp", normalised(f"{layer}.products_norm", products.flatten())).view(-1, DIM)
        lcb = parameters[f"{layer}.linear.weight"] @ x
        residual = parameters.get(f"{layer}.residual.weight", torch.eye(len(x)))
        x = normalised(f"{layer}.norm", torch.cat([fmb, lcb]) + residual @ x)
    return mlp("top", x.flatten())


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("floats", [0, 2])
def test_by_hand(labels: int, floats: int) -> None:
    model, vectors, numbers = a_model(labels, floats)
    parameters = {parameter_name(name): parameter for name, parameter in model.named_parameters()}
    assert "layers.0.residual.weight" in parameters and "layers.1.residual.weight" not in parameters
    logits = model(vectors, numbers).view(ROWS, labels)
    for row in range(ROWS):
        expected = by_hand(parameters, [vector[row] for vector in vectors.values()], numbers[row])
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_layers_by_hand() -> None:
    """Of n = 4 vectors in the first layer, and of 2 + 3 in the others."""
    model, vectors, numbers = a_model(1, 2)
    flops = {layer.name: layer.flops for layer in analyse_layers(model, lambda: model(vectors, numbers))}
    assert flops["projections.b"] == 2 * ROWS * 3 * DIM
    for number, n in enumerate((4, 5, 5)):
        assert flops[f"layers.{number}.linear"] == 2 * ROWS * DIM * n * 3
        assert flops[f"layers.{number}.factors"] == 2 * ROWS * DIM * n * 6
        assert flops[f"layers.{number}.mlp.0"] == 2 * ROWS * (6 * n) * 7
        assert flops[f"layers.{number}.mlp.3"] == 2 * ROWS * 7 * (2 * DIM)
    assert flops["layers.0.residual"] == 2 * ROWS * DIM * 4 * 5 and "layers.1.residual" not in flops
    assert flops["top.0"] == 2 * ROWS * (5 * DIM) * 11


def test_vectors_of_one_number_are_refused() -> None:
    config = load_config("configs/dlrm_sample.yaml")
    WukongConfig().check(config)
    for table in config.tables.values():
        table.embedding_dim = 1
    with pytest.raises(UserError, match=r"leaves nothing of those of width 1; set a larger model\.embedding_dim"):
        WukongConfig().check(config)
    WukongConfig(embedding_dim=2).check(config)
