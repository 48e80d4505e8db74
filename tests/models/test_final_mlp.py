"""FinalMLP by hand."""

import pytest
import torch

from recsys.config import LabelConfig, load_config
from recsys.errors import UserError
from recsys.models import DenseInputs
from recsys.models.base import mlp
from recsys.models.final_mlp import FinalMLP, FinalMLPConfig


@pytest.mark.parametrize("labels", [1, 2])
def test_by_hand(labels: int) -> None:
    torch.manual_seed(0)
    inputs = DenseInputs({"a": 4, "b": 8, "gate": 4}, ["x"], {f"l{i}": LabelConfig() for i in range(labels)})
    config = FinalMLPConfig(mlp_1=[6, 4], mlp_2=[8], num_heads=2, gate_1=["gate"], gate_mlp=[5])
    model = FinalMLP(config, inputs)
    vectors = {"a": torch.randn(3, 4), "b": torch.randn(3, 8), "gate": torch.randn(3, 4)}
    floats = torch.randn(3, 1)
    logits = model(vectors, floats).view(3, labels)
    for row in range(3):
        inputs_of_row = torch.cat([vectors["a"][row], vectors["b"][row], floats[row]])
        gates = [2 * model.gates[0](vectors["gate"][row]).sigmoid(), 2 * model.gates[1](torch.ones(1)).sigmoid()]
        first, second = (model.streams[i](gates[i] * inputs_of_row) for i in range(2))
        for label in range(labels):
            heads = [first[2 * h : 2 * h + 2] @ model.products[label, h] @ second[4 * h : 4 * h + 4] for h in range(2)]
            expected = model.linear.weight[label] @ torch.cat([first, second]) + model.linear.bias[label] + sum(heads)
            torch.testing.assert_close(logits[row, label], expected)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_layers_are_normalised_before_the_relu(layer_norm: bool) -> None:
    torch.manual_seed(0)
    first, norm, _, last = layers = mlp(5, [7], 2, 0.0, layer_norm)
    x = 1e-4 * torch.randn(3, 5)
    hidden = x @ first.weight.T + first.bias
    if layer_norm:
        torch.nn.init.normal_(norm.weight)
        mean, variance = hidden.mean(1, keepdim=True), hidden.var(1, unbiased=False, keepdim=True)
        hidden = (hidden - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
        assert not first.bias.any()  # which would hide vectors as short as these
    torch.testing.assert_close(layers(x), hidden.clamp(min=0) @ last.weight.T + last.bias)


def test_numbers_alone_are_nothing_to_be_gated() -> None:
    """The sample has the float price beside its id features."""
    config = FinalMLPConfig(gate_1=["user_id", "item_id", "history"], gate_2=["category", "device", "hour"])
    with pytest.raises(UserError, match=r"leave no id feature to gate, found \['user_id', .*; drop some"):
        config.check(load_config("configs/dlrm_sample.yaml"))
