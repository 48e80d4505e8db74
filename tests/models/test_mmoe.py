"""MMoE by hand; tests/models/test_labels.py trains it on one to three processes."""

import pytest
import torch

from recsys.config import LabelConfig
from recsys.models import DenseInputs
from recsys.models.mmoe import MMoE, MMoEConfig


@pytest.mark.parametrize("expert_mlp", [[5], []])
def test_by_hand(expert_mlp: list[int]) -> None:
    torch.manual_seed(0)
    labels = {"click": LabelConfig(), "buy": LabelConfig()}
    config = MMoEConfig(num_experts=3, expert_mlp=expert_mlp, tower_mlp=[])
    model = MMoE(config, DenseInputs({"a": 4, "b": 4}, ["x"], labels))
    vectors, floats = {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}, torch.randn(2, 1)
    inputs = torch.cat([vectors["a"], vectors["b"], floats], dim=1)
    for task in range(2):
        for row in range(2):
            gate = torch.softmax(model.gates[task].weight @ inputs[row], dim=0)
            mixed = sum(gate[i] * model.experts[i](inputs[row : row + 1])[0] for i in range(3))
            expected = model.towers[task][0].weight @ mixed + model.towers[task][0].bias
            torch.testing.assert_close(model(vectors, floats)[row, task], expected[0])
