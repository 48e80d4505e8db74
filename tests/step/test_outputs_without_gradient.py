"""Outputs of a user's model that have no gradient, beside a loss that needs all rows at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import ROOT
from torch import nn

from recsys.config import Device, ModelConfig, load_config
from recsys.memory.data_facts import data_facts
from recsys.memory.fakes import fake_inputs
from recsys.models.base import DenseInputs, Model
from recsys.runtime.world import open_world
from recsys.step.build import build_dense_half


@dataclass
class SeveralConfig(ModelConfig):
    name: str = f"{__name__}.Several"


class Several(Model):
    Config, loss_by_rows = SeveralConfig, False

    def __init__(self, config: SeveralConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.layer = nn.Linear(4, 1)

    def forward(self, vectors: Any, floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.layer(vectors["user_id"][:, :4])
        return scores, scores.detach().long(), scores.detach(), 2 * scores

    def losses(self, outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        scores, whole, fixed, _ = outputs  # the last of them is not read
        assert (scores.dtype, whole.dtype) == (torch.float32, torch.int64)
        return {"all": (scores * (whole + fixed)).sum() * scores.sum()}


@pytest.mark.parametrize(("autocast", "precision"), [("none", 1e-6), ("bf16", 0.02)])
def test_micro_batches_give_the_gradients_of_the_whole_batch(autocast: str, precision: float, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"base: {ROOT}/configs/dlrm_sample.yaml\nmodel: {{name: {__name__}.Several}}")
    config, gradients = load_config(path, [f"precision.autocast={autocast}"]), []
    with open_world(Device.cpu, 1):
        for bounds in ((0, 8), (0, 3, 8)):
            dense = build_dense_half(config, lambda: (torch.zeros(0), 0))
            pooled, by_id, batch = fake_inputs(config, data_facts(config, None, 1), 8, bounds)
            assert pooled is not None
            values = pooled.values().detach()
            values.copy_(torch.arange(values.numel()).view_as(values) / values.numel())
            batch.weights.fill_(1)
            dense(pooled, [by_id], batch)
            gradients.append(dense.model.layer.weight.grad)
            del dense
    assert gradients[0].any()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=precision, atol=precision)
