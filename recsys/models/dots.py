"""Dot products of all pairs of a row's vectors."""

from typing import Any

import torch

_MOST_BY_MATRIX = 48  # vectors: the matrix has about half their number to the power of 4 elements, here 10 MiB


class PairwiseDots:
    """Computes the dot products, on CPUs by matrices that are made once.

    Attributes:
        like: computes as on a device of this type; None: as suits that of the vectors.
    """

    def __init__(self) -> None:
        # Made once for each type that vectors come in, which autocast may change.
        self._picks: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self.like: str | None = None

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the products below the diagonal, [rows, pairs], of [rows, n, dim]."""
        products: torch.Tensor = _PairwiseDots.apply(vectors, *self._picks_of(vectors))
        return products

    def _picks_of(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = vectors.dtype, vectors.device
        if vectors.shape[1] > _MOST_BY_MATRIX or (self.like or vectors.device.type) != "cpu":
            return vectors.new_zeros(0), vectors.new_zeros(0)
        if key not in self._picks:
            self._picks[key] = _pairs(vectors.shape[1], *key)
        return self._picks[key]


class _PairwiseDots(torch.autograd.Function):
    """The dot products of all pairs of a row's vectors, below the diagonal.

    Autograd's own backward takes two batched products where one is enough, since the products are symmetric, and picks
    the pairs by indices, which takes CPUs longer than multiplying by a matrix of zeros and ones, unless that is large.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, picked: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        """Return the products, [rows, pairs].

        Args:
            vectors: [rows, n, dim].
            picked, spread: what `_pairs` gives; without elements: indices pick the pairs.
        """
        ctx.save_for_backward(vectors, spread)
        n, products = vectors.shape[1], torch.bmm(vectors, vectors.transpose(1, 2))
        if not spread.numel():
            rows, columns = torch.tril_indices(n, n, offset=-1, device=vectors.device)
            return products[:, rows, columns]
        return products.flatten(1) @ picked

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        vectors, spread = ctx.saved_tensors
        n, gradient = vectors.shape[1], gradient.to(vectors.dtype)  # under autocast it comes in its type
        if not spread.numel():
            rows, columns = torch.tril_indices(n, n, offset=-1, device=vectors.device)
            both = gradient.new_zeros(len(gradient), n, n)
            both[:, rows, columns] = gradient
            both[:, columns, rows] = gradient
        else:
            both = (gradient @ spread).view(-1, n, n)
        return torch.bmm(both, vectors), None, None


def _pairs(n: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what picks the entries below the diagonal, [n * n, pairs], and what puts them on both of its sides."""
    rows, columns = torch.tril_indices(n, n, offset=-1, device=device)
    numbers = torch.arange(len(rows), device=device)
    picked, spread = torch.zeros(2, n * n, len(rows), dtype=dtype, device=device)
    picked[rows * n + columns, numbers] = 1
    spread[rows * n + columns, numbers] = spread[columns * n + rows, numbers] = 1
    return picked, spread.T.contiguous()
