"""Multi-gate mixture of experts: several labels over shared experts, each with a gate and a tower of its own."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recsys.config import ModelConfig
from recsys.config.bounds import bounded
from recsys.models.base import WIDEST, DenseInputs, Model, Vectors, mlp


@dataclass
class MMoEConfig(ModelConfig):
    """MMoE (Ma et al. 2018, doi:10.1145/3219819.3220007), over all features; a task is a label."""

    name: str = "mmoe"
    num_experts: int = bounded(4, 1, 1024)  # MLPs that all tasks share, each task by weights of its own
    expert_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths of an expert; the last is that of what it gives
    tower_mlp: list[int] = bounded([32], 1, WIDEST)  # hidden widths of a task's tower; the last is 1
    dropout: float = bounded(0.0, 0, below=1)  # after each hidden layer

    free: ClassVar = ("dropout",)
    shapes: ClassVar = ("num_experts", "expert_mlp", "tower_mlp")


class MMoE(Model):
    """Every expert reads all features; a task's tower reads the experts' outputs, weighted by the task's gate."""

    Config = MMoEConfig

    def __init__(self, config: MMoEConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.features = list(inputs.dims)
        width, tasks = sum(inputs.dims.values()) + len(inputs.floats), range(len(inputs.labels))
        given = config.expert_mlp[-1] if config.expert_mlp else width
        self.experts = nn.ModuleList(
            mlp(width, config.expert_mlp, None, config.dropout) for _ in range(config.num_experts)
        )
        self.gates = nn.ModuleList(nn.Linear(width, config.num_experts, bias=False) for _ in tasks)
        self.towers = nn.ModuleList(mlp(given, config.tower_mlp, 1, config.dropout) for _ in tasks)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, labels]."""
        inputs = torch.cat([*(vectors[name] for name in self.features), floats], dim=1)
        experts = torch.stack([expert(inputs) for expert in self.experts], dim=1)  # [rows, experts, width]
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            shares = gate(inputs).softmax(dim=1)  # [rows, experts]
            logits.append(tower((shares[:, :, None] * experts).sum(dim=1)))
        return torch.cat(logits, dim=1)
