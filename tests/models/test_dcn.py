"""DCN by hand."""

import pytest
import torch

from recsys.config import LabelConfig
from recsys.config.choices import CrossStructure
from recsys.models import DenseInputs
from recsys.models.dcn import DCN, DCNConfig


@pytest.mark.parametrize("structure", CrossStructure)
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("labels, bottom", [(1, []), (2, []), (1, [3, 2])])
def test_by_hand(structure: CrossStructure, rank: int | None, labels: int, bottom: list[int]) -> None:
    torch.manual_seed(0)
    inputs = DenseInputs({"a": 4, "b": 8}, ["x"], {f"l{i}": LabelConfig() for i in range(labels)})
    model = DCN(DCNConfig(num_cross_layers=2, rank=rank, bottom_mlp=bottom, mlp=[5], structure=structure), inputs)
    vectors, floats = {"a": torch.randn(3, 4), "b": torch.randn(3, 8)}, torch.randn(3, 1)
    logits = model(vectors, floats).view(3, labels)
    if bottom:
        first, second = (layer for layer in model.bottom if isinstance(layer, torch.nn.Linear))
        floats = (second(first(floats).relu())).relu()
    for row in range(3):
        start = x = torch.cat([vectors["a"][row], vectors["b"][row], floats[row]])
        for layer in range(2):
            matrix = (
                model.cross.kernels[layer]
                if rank is None
                else model.cross.W_kernels[layer] @ model.cross.V_kernels[layer]
            )
            x = start * (matrix @ x + model.cross.bias[layer].flatten()) + x
        if structure is CrossStructure.stacked:
            expected = model.last(model.mlp(x[None]))[0]
        else:
            expected = model.last(torch.cat([x[None], model.mlp(start[None])], dim=1))[0]
        torch.testing.assert_close(logits[row], expected)
