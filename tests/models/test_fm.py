"""Factorisation machine and DeepFM by hand."""

import torch

from recsys.config import LabelConfig
from recsys.models import DenseInputs
from recsys.models.fm import FM, DeepFM, DeepFMConfig, FMConfig

_INPUTS = DenseInputs({"a": 4, "b": 4}, ["x"], {"label": LabelConfig()})


def _logit(model: FM, row: list[torch.Tensor]) -> torch.Tensor:
    """The sum over pairs as the paper writes it."""
    pairs = sum(row[i][:3] @ row[j][:3] for i in range(len(row)) for j in range(i))
    return model.bias + sum(vector[3] for vector in row) + pairs


def _rows(model: FM, vectors: dict[str, torch.Tensor], floats: torch.Tensor) -> list[list[torch.Tensor]]:
    return [[vectors["a"][i], vectors["b"][i], model.numbers[0] * floats[i, 0]] for i in range(len(floats))]


def test_fm_by_hand() -> None:
    torch.manual_seed(0)
    model, vectors, floats = (
        FM(FMConfig(), _INPUTS),
        {"b": torch.randn(3, 4), "a": torch.randn(3, 4)},
        torch.randn(3, 1),
    )
    torch.nn.init.constant_(model.bias, 0.3)
    expected = torch.stack([_logit(model, row) for row in _rows(model, vectors, floats)])
    torch.testing.assert_close(model(vectors, floats), expected)


def test_deepfm_by_hand() -> None:
    torch.manual_seed(0)
    model = DeepFM(DeepFMConfig(mlp=[5]), _INPUTS)
    vectors, floats = {"b": torch.randn(3, 4), "a": torch.randn(3, 4)}, torch.randn(3, 1)
    rows = _rows(model, vectors, floats)
    expected = torch.stack([_logit(model, row) + model.mlp(torch.cat(row)[None])[0, 0] for row in rows])
    torch.testing.assert_close(model(vectors, floats), expected)
