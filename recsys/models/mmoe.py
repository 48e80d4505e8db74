"""Multi-gate mixture of experts: several labels over shared experts, each with a gate and a tower of its own."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.models.attention import AttendedLists, AttentionConfig
from recsys.models.base import WIDEST, DenseInputs, Model, Vectors, check_equal_widths, mlp
from recsys.models.columns import PairwiseDots


@dataclass
class TaskConfig(AttentionConfig):
    """Keys of all models with a tower for each task; a task is a label."""

    tower_mlp: list[int] = bounded([32], 1, WIDEST)  # hidden widths of the tower of a task; the output has width 1
    dropout: float = bounded(0.0, 0, below=1)  # dropout after each hidden layer
    # Let the layers also read the dot products of all pairs of vectors, as the top MLP of DLRM does. Without these,
    # they are slow to learn what depends on two ids together.
    dots: bool = False

    free: ClassVar[tuple[str, ...]] = ("dropout",)
    shapes: ClassVar[tuple[str, ...]] = (*AttentionConfig.shapes, "tower_mlp", "dots")

    def check(self, config: Config) -> None:
        super().check(config)
        if self.dots:
            check_equal_widths(config, "config key 'model.dots': vectors are multiplied, so make their widths equal")


class TaskModel(Model):
    """Base of models that read all features side by side, and have a tower for each label.

    Attributes:
        width: number of columns of what `read` returns.
    """

    def __init__(self, config: TaskConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        number = len(inputs.dims)
        self.width = sum(inputs.dims.values()) + len(inputs.floats) + config.dots * (number * (number - 1) // 2)
        self.attention = AttendedLists(config, inputs)
        self._config, self._dots = config, PairwiseDots()

    def make_towers(self, width: int) -> nn.ModuleList:
        """Return a tower for each label, from [rows, width] to logits [rows, 1]."""
        return nn.ModuleList(mlp(width, self._config.tower_mlp, 1, self._config.dropout) for _ in self.labels)

    def read(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return all features side by side, [rows, self.width]."""
        of_ids = list(self.attention(vectors).values())
        if self._config.dots:
            of_ids.append(self._dots(of_ids))
        return torch.cat([*of_ids, floats], dim=1)

    def rehearse(self, device: torch.device) -> None:
        self._dots.like = device.type


@dataclass
class MMoEConfig(TaskConfig):
    """MMoE (Ma et al. 2018, doi:10.1145/3219819.3220007), over all features.

    With one expert, all gates are 1, and the model is a shared bottom.
    """

    name: str = "mmoe"
    num_experts: int = bounded(4, 1, 1024)  # MLPs that all tasks share; each task weights them by a gate of its own
    expert_mlp: list[int] = bounded([64], 1, WIDEST)  # widths of the layers of an expert; the last is its output

    shapes: ClassVar[tuple[str, ...]] = (*TaskConfig.shapes, "num_experts", "expert_mlp")


class MMoE(TaskModel):
    """Every expert reads all features; a task's tower reads the experts' outputs, weighted by the task's gate."""

    Config = MMoEConfig

    def __init__(self, config: MMoEConfig, inputs: DenseInputs) -> None:
        super().__init__(config, inputs)
        self.experts = make_experts(config.num_experts, self.width, config)
        self.gates = nn.ModuleList(nn.Linear(self.width, config.num_experts, bias=False) for _ in inputs.labels)
        self.towers = self.make_towers(config.expert_mlp[-1] if config.expert_mlp else self.width)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, labels]."""
        x = self.read(vectors, floats)
        experts = [expert(x) for expert in self.experts]
        mixed = mixtures([gate(x) for gate in self.gates], experts)
        return torch.cat([tower(vector) for tower, vector in zip(self.towers, mixed, strict=True)], dim=1)


def make_experts(number: int, width: int, config: MMoEConfig) -> nn.ModuleList:
    """Return experts that read [rows, width]."""
    return nn.ModuleList(mlp(width, config.expert_mlp, None, config.dropout) for _ in range(number))


def mixtures(gates: list[torch.Tensor], experts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return, for each gate [rows, experts], the mean of experts' outputs weighted by its softmax, [rows, width]."""
    weights = torch.stack([gate.softmax(dim=1) for gate in gates], dim=1)
    return list((weights @ torch.stack(experts, dim=1)).unbind(dim=1))
