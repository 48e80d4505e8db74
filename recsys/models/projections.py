"""Projections of vectors to the width that a model reads; for narrow tables: a product of two low-rank factors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import Config
from recsys.config.features import id_features
from recsys.models.base import Vectors
from recsys.tables.module_names import module_name

PROJECTIONS = "table_projections"  # name of `TableProjections` in a model


class EqualWidths(nn.ModuleDict):
    """A matrix for each feature whose vectors have another width than `dim`, to which it projects them."""

    def __init__(self, dims: Mapping[str, int], dim: int) -> None:
        others = {name: own for name, own in dims.items() if own != dim}
        super().__init__({module_name(name): nn.Linear(own, dim, bias=False) for name, own in others.items()})

    def forward(self, vectors: Vectors) -> list[torch.Tensor]:
        """Return a vector of width `dim` for each feature, in their order: [rows, dim] each."""
        return [
            self[module_name(name)](vector) if module_name(name) in self else vector for name, vector in vectors.items()
        ]


class TableProjections(nn.ModuleDict):
    """A matrix of the dense part for each table, [projected_dim, embedding_dim], which its features share.

    Mixed dimensions: Ginart et al. 2019, arXiv:1909.11810.
    """

    def __init__(self, config: Config) -> None:
        narrow = {name: table for name, table in config.tables.items() if table.projected_dim is not None}
        super().__init__(
            {module_name(name): nn.Linear(t.embedding_dim, t.model_dim, bias=False) for name, t in narrow.items()}
        )
        self._tables = {name: config.features[name].table or "" for name in id_features(config)}

    def forward(self, model: nn.Module, inputs: tuple[Vectors, torch.Tensor]) -> tuple[Vectors, torch.Tensor]:
        """Return the inputs of `Model.forward` with projected vectors; called as a hook before it."""
        vectors, floats = inputs
        wider = {
            name: self._wider(self[module_name(table)], vectors[name])
            for name, table in self._tables.items()
            if name in vectors and module_name(table) in self
        }
        return vectors | wider, floats

    def _wider(self, matrix: nn.Module, vectors: Any) -> Any:
        if not isinstance(vectors, JaggedTensor):
            return matrix(vectors)
        weights, values = vectors.weights_or_none(), matrix(vectors.values())
        return JaggedTensor(values, weights=weights, lengths=vectors.lengths(), offsets=vectors.offsets_or_none())


def add_projections(model: nn.Module, config: Config) -> None:
    """Add `TableProjections` to a model, which then reads the projected vectors of narrow tables."""
    projections = TableProjections(config)
    if projections:
        model.add_module(PROJECTIONS, projections)
        model.register_forward_pre_hook(projections)
