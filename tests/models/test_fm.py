"""Factorisation machine and DeepFM by hand."""

import torch

from recsys.config import LabelConfig
from recsys.models import DenseInputs
from recsys.models.fm import FM, DeepFM, DeepFMConfig, FMConfig

_LABELS = {"label": LabelConfig()}
_INPUTS = DenseInputs({"a": 4, "b": 4}, ["x"], _LABELS)


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
        {"a": torch.randn(3, 4), "b": torch.randn(3, 4)},
        torch.randn(3, 1),
    )
    torch.nn.init.constant_(model.bias, 0.3)
    expected = torch.stack([_logit(model, row) for row in _rows(model, vectors, floats)])
    torch.testing.assert_close(model(vectors, floats), expected)


def test_deepfm_by_hand() -> None:
    torch.manual_seed(0)
    model = DeepFM(DeepFMConfig(mlp=[5]), _INPUTS)
    vectors, floats = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}, torch.randn(3, 1)
    rows = _rows(model, vectors, floats)
    expected = torch.stack([_logit(model, row) + model.mlp(torch.cat(row)[None])[0, 0] for row in rows])
    torch.testing.assert_close(model(vectors, floats), expected)


def test_a_vector_of_numbers_is_one_feature() -> None:
    torch.manual_seed(0)
    model = DeepFM(DeepFMConfig(mlp=[5]), DenseInputs({"a": 4, "b": 4}, ["x", "v", "v", "w", "w", "w"], _LABELS))
    vectors, floats = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}, torch.randn(3, 6)
    sums = [[floats[i, part] @ model.numbers[part] for part in (slice(1, 3), slice(3, 6))] for i in range(3)]
    rows = [row + of_vectors for row, of_vectors in zip(_rows(model, vectors, floats), sums, strict=True)]
    expected = torch.stack([_logit(model, row) + model.mlp(torch.cat(row)[None])[0, 0] for row in rows])
    torch.testing.assert_close(model(vectors, floats), expected)
