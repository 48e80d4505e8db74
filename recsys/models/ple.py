"""Progressive layered extraction: several labels over experts that all labels share and experts of each label."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recsys.config.bounds import bounded
from recsys.models.base import DenseInputs, Vectors
from recsys.models.mmoe import MMoEConfig, TaskModel, make_experts, mixtures


@dataclass
class PLEConfig(MMoEConfig):
    """PLE (Tang et al. 2020, doi:10.1145/3383313.3412236), over all features; one level is the paper's CGC."""

    name: str = "ple"
    num_experts: int = bounded(2, 1, 1024)  # experts of a level that all tasks share
    num_task_experts: int = bounded(2, 1, 1024)  # further experts of a level for each task
    num_levels: int = bounded(2, 1, 64)  # levels of experts; each reads the mixtures of the level before

    shapes: ClassVar[tuple[str, ...]] = (*MMoEConfig.shapes, "num_task_experts", "num_levels")


class Extraction(nn.Module):
    """A level: each task mixes its own and the shared experts; except in the last level, a shared state mixes all."""

    def __init__(self, config: PLEConfig, width: int, num_tasks: int, is_last: bool) -> None:
        super().__init__()
        numbers = [*[config.num_task_experts] * num_tasks, config.num_experts]
        self.experts = nn.ModuleList(make_experts(number, width, config) for number in numbers)
        mixed = [config.num_task_experts + config.num_experts] * num_tasks + ([] if is_last else [sum(numbers)])
        self.gates = nn.ModuleList(nn.Linear(width, number, bias=False) for number in mixed)

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the states of the tasks and, except in the last level, the shared state, [rows, width] each; `inputs`
        are those of the level before."""
        own = [[expert(x) for expert in experts.children()] for experts, x in zip(self.experts, inputs, strict=True)]
        mixed = [*(group + own[-1] for group in own[:-1]), [expert for group in own for expert in group]]
        return [mixtures([gate(x)], experts)[0] for gate, x, experts in zip(self.gates, inputs, mixed, strict=False)]


class PLE(TaskModel):
    """Levels of experts, each of which reads what the one before has mixed; then a tower for each task."""

    Config = PLEConfig

    def __init__(self, config: PLEConfig, inputs: DenseInputs) -> None:
        super().__init__(config, inputs)
        width, last = config.expert_mlp[-1] if config.expert_mlp else self.width, config.num_levels - 1
        self.levels = nn.ModuleList(
            Extraction(config, width if level else self.width, len(inputs.labels), level == last)
            for level in range(config.num_levels)
        )
        self.towers = self.make_towers(width)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, labels]."""
        states = [self.read(vectors, floats)] * (len(self.towers) + 1)
        for level in self.levels:
            states = level(states)
        return torch.cat([tower(x) for tower, x in zip(self.towers, states, strict=True)], dim=1)
