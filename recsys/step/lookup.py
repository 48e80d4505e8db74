"""What the tables gave for a batch, and how the model sees it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.models.base import Vectors
from recsys.models.blocks import row_of_each_id, sum_by_row


@dataclass(frozen=True)
class Part:
    """Rows of a batch, and the slices that hold them in each of `Lookup.tensors`."""

    rows: tuple[int, int]
    slices: list[slice]


@dataclass(frozen=True)
class Lookup:
    """What the tables gave for the rows of a batch.

    Attributes:
        ids: table rows of the batch.
        pooled: a vector for each row, by feature; None where no table gives any.
        by_id: a vector for each id of the rows' lists, by feature.
        tensors: what gradients are wanted of: `pooled`, [rows, sum of its widths], then each in `by_id`, [ids, width].
    """

    ids: KeyedJaggedTensor
    pooled: KeyedTensor | None
    by_id: dict[str, JaggedTensor]
    tensors: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        # At once: torchrec waits for the exchange when the values are first asked for, and where that is under
        # no_grad they are cut off from the tables.
        pooled = [] if self.pooled is None else [self.pooled.values()]
        object.__setattr__(self, "tensors", [*pooled, *(each.values() for each in self.by_id.values())])

    def parts(self, bounds: Sequence[int], id_bounds: Sequence[Sequence[int]]) -> Iterator[Part]:
        """Yield the parts of the rows between each two of `bounds`; both as of a `Batch`."""
        ends: list[Sequence[int]] = [(0, each.values().shape[0]) for each in self.by_id.values()]
        if len(bounds) > 2:
            ends = [id_bounds[self.ids.keys().index(name)] for name in self.by_id]
        for number, rows in enumerate(pairwise(bounds)):
            of_pooled = [] if self.pooled is None else [slice(*rows)]
            yield Part(rows, [*of_pooled, *(slice(*each[number : number + 2]) for each in ends)])

    def rows(self, part: Part) -> list[torch.Tensor]:
        """Return the rows of a part of each tensor, in FP32 whatever type the tables give: so are their gradients."""
        return [tensor[rows].float() for tensor, rows in zip(self.tensors, part.slices, strict=True)]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hand on the gradients by `tensors`, FP32, as far as to the ranks that hold the rows."""
        wanted = [
            (each, gradient.to(each.dtype))
            for each, gradient in zip(self.tensors, gradients, strict=True)
            if each.requires_grad and gradient is not None
        ]
        if wanted:
            torch.autograd.backward([each for each, _ in wanted], [gradient for _, gradient in wanted])

    def add_l2(
        self, gradients: Sequence[torch.Tensor | None], factors: Mapping[str, float], weights: torch.Tensor
    ) -> None:
        """Add to the gradients by `tensors` those of the features' factors / 2 times the weighted squares of vectors.

        Args:
            factors: by feature. weights: of rows, [rows].
        """
        rest = list(zip(self.tensors, gradients, strict=True))
        if self.pooled is not None:
            vectors, gradient = rest.pop(0)
            widths = zip(self.pooled.keys(), self.pooled.length_per_key(), strict=True)
            by_column = torch.cat([weights.new_full((width,), factors.get(name, 0.0)) for name, width in widths])
            if gradient is not None:
                gradient.addcmul_(vectors.detach() * by_column, weights[:, None])
        for (name, jagged), (vectors, gradient) in zip(self.by_id.items(), rest, strict=True):
            if gradient is not None and name in factors:
                gradient.addcmul_(vectors.detach() * factors[name], weights[row_of_each_id(jagged)][:, None])

    def pooled_by_feature(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the columns of rows of `pooled`, or of a gradient by them, by feature."""
        assert self.pooled is not None
        # Their order follows the sharding plan; by key it cannot matter.
        return dict(zip(self.pooled.keys(), values.split(self.pooled.length_per_key(), dim=1), strict=True))

    def vectors(
        self, part: Part, tensors: Sequence[torch.Tensor], averaged: Collection[str], unpooled: Collection[str]
    ) -> Vectors:
        """Return what the model reads of a part.

        Args:
            tensors: slices of `self.tensors` by the part.
            averaged: features whose sums are divided by the lengths of their lists; those of an empty list are 0.
            unpooled: features that the model wants a vector of for each id.
        """
        keys, rest = self.ids.keys(), list(zip(tensors, part.slices, strict=True))
        lengths = self.ids.lengths().view(len(keys), -1)[:, slice(*part.rows)]
        vectors: Vectors = {}
        if self.pooled is not None:
            vectors.update(self.pooled_by_feature(rest.pop(0)[0]))
        for name, (values, where) in zip(self.by_id, rest, strict=True):
            weights = self.ids[name].weights_or_none()
            jagged = JaggedTensor(
                values, lengths=lengths[keys.index(name)], weights=None if weights is None else weights[where]
            )
            vectors[name] = jagged if name in unpooled else sum_by_row(jagged)
        for name in averaged:
            if name not in unpooled:
                vectors[name] = vectors[name] / lengths[keys.index(name)].clamp(min=1)[:, None]
        return vectors


def joined(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the gradient by a tensor of those by the rows of its parts; None where the model does not read it."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < len(gradients):
        return None
    return present[0] if len(present) == 1 else torch.cat(present)
