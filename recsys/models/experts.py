"""Gated sums of the vectors of a feature's experts."""

import torch
import torch.nn.functional as F
from torch import nn

from recsys.config import Config
from recsys.config.choices import Gate
from recsys.config.experts import gate_inputs
from recsys.config.features import model_features, table_of_feature, with_experts
from recsys.models.base import Vectors
from recsys.models.halves import InParts, in_parts
from recsys.tables.module_names import module_name

GATES = "expert_gates"  # name of `ExpertSums` in a model


class ExpertGate(InParts, nn.Module):
    """Factors of a feature's experts: 2 sigmoid(x) with x = a bias of the expert + a linear function of other vectors.

    Both are 0 at first, so that all factors are 1, and the experts begin as a plain sum.
    """

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_experts))
        self.weight = nn.Parameter(torch.zeros(num_experts, width)) if width else None

    def forward(self, others: list[torch.Tensor]) -> torch.Tensor:
        """Return the factors, [rows, experts], or [experts] if they do not depend on `others`, [rows, width] each."""
        if self.weight is None:
            return 2 * self.bias.sigmoid()
        return 2 * in_parts(self._logits, self.num_parts, torch.cat(others, dim=1)).sigmoid()

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return F.linear(inputs, self.weight, self.bias)


class ExpertSums(nn.ModuleDict):
    """Sums of the experts' vectors of features, gated if their table says so; a mapping of gates by feature."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._names: dict[str, list[str]] = {}  # by feature, those of its experts' vectors
        self._gate_inputs: dict[str, list[str]] = {}
        tables = {name: table_of_feature(config, name) for name in model_features(config)}
        for name, table in tables.items():
            if table.experts is None:
                continue
            self._names[name] = with_experts(config, [name])
            if table.experts.gate is not Gate.none:
                others = gate_inputs(config, name) if table.experts.gate is Gate.features else []
                width = sum(tables[other].model_dim for other in others)
                self[module_name(name)] = ExpertGate(len(self._names[name]), width)
                self._gate_inputs[name] = others

    def forward(self, model: nn.Module, inputs: tuple[Vectors, torch.Tensor]) -> tuple[Vectors, torch.Tensor]:
        """Return the inputs of `Model.forward` with one vector a feature; called as a hook before it."""
        vectors, floats = inputs
        of_experts = {name: [vectors[expert] for expert in names] for name, names in self._names.items()}
        further = {expert for names in self._names.values() for expert in names[1:]}
        plain = {name: vector for name, vector in vectors.items() if name not in further}
        plain |= {name: sum(others, start=first) for name, (first, *others) in of_experts.items()}
        gated = {}
        for name, others in self._gate_inputs.items():
            factors = self[module_name(name)]([plain[other] for other in others])
            weighted = [vector * factors[..., i, None] for i, vector in enumerate(of_experts[name])]
            gated[name] = sum(weighted[1:], start=weighted[0])
        return plain | gated, floats


def add_experts(model: nn.Module, config: Config) -> None:
    """Add `ExpertSums` to a model, which then reads one vector for each feature with experts."""
    if any(table.experts for table in config.tables.values()):
        sums = ExpertSums(config)
        model.add_module(GATES, sums)
        model.register_forward_pre_hook(sums)
