"""Logistic regression over any features: a weight for each id and each number, and a bias."""

from dataclasses import dataclass

import torch
from torch import nn

from recsys.config import Config, ModelConfig
from recsys.errors import UserError
from recsys.models.base import DenseInputs, Model, Vectors
from recsys.models.halves import in_parts


@dataclass
class LogisticRegressionConfig(ModelConfig):
    """Logistic regression; element t of the vector of an id is its weight for label number t."""

    name: str = "logistic_regression"

    def has_mlps(self) -> bool:
        return False

    def check(self, config: Config) -> None:
        for name, table in config.tables.items():
            if table.model_dim < len(config.labels()):
                raise UserError(
                    f"config key 'tables.{name}.embedding_dim' must be at least {len(config.labels())}, a weight for "
                    f"each label, found {table.model_dim}"
                )


class LogisticRegression(Model):
    """The sum of the weights of a row's ids, of its numbers times their weights, and of a bias."""

    Config = LogisticRegressionConfig

    def __init__(self, config: LogisticRegressionConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.numbers = nn.Linear(len(inputs.floats), len(inputs.labels), bias=False) if inputs.floats else None
        self.bias = nn.Parameter(torch.zeros(len(inputs.labels)))

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, labels]."""
        weights = sum(vector[:, : len(self.bias)] for vector in vectors.values())
        logits = in_parts(self.bias.add, self.num_parts, weights)
        return logits if self.numbers is None else logits + self.numbers(floats)
