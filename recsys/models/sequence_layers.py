"""Layers of sequence models: attention over an id and those before it, and layers of each id by itself."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from recsys.config.choices import SequenceLayer
from recsys.models.base import mlp
from recsys.models.columns import take_rows
from recsys.models.dropout import RowDropout
from recsys.models.jagged import Lists, PaddedLists

_FACTORS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 25}  # of HSTU's attention, in FP32; several tensors have this size
_FAKE_PARTS = 4  # the most parts of fake tensors: each takes a dry run time, and more would show it little else


class SwiGLU(nn.Module):
    """Two linear layers with a gate between them (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, dim: int, width: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, 2 * width), nn.Linear(width, dim)
        self.dropout = RowDropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, [ids, dim], for x, [ids, dim]."""
        gate, value = self.inner(x).chunk(2, dim=1)
        return self.outer(self.dropout(F.silu(gate) * value))


class Block(nn.Module):
    """Attention over an id and those before it, then a feed-forward network; both read their input normalised.

    Their outputs are added to the input, in `ligr` after multiplication by a gate, a function of the input. In
    `original` they are added to the normalised input, but attention makes keys and values of the input as it is.
    """

    def __init__(self, layer: SequenceLayer, dim: int, num_heads: int, width: int | None, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.is_original = num_heads, layer is SequenceLayer.original
        is_gated = layer is SequenceLayer.ligr
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.gates = nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim)] if is_gated else [])
        self.dropouts = nn.ModuleList([RowDropout(dropout), RowDropout(dropout)])
        if self.is_original:
            self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        else:
            self.qkv = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)
        self.feed_forward: nn.Module = (
            SwiGLU(dim, width or 4 * dim, dropout) if is_gated else mlp(dim, [width or dim], dim, dropout)
        )

    def forward(self, x: torch.Tensor, lists: Lists | PaddedLists) -> torch.Tensor:
        """Return the output, [ids, dim], for x, [ids, dim]."""
        normed = self.norms[0](x)
        qkv = torch.cat([self.query(normed), self.key_value(x)], dim=1) if self.is_original else self.qkv(normed)
        x = self._with(0, x, normed, self.output(lists.attend(qkv, self.num_heads)))
        normed = self.norms[1](x)
        return self._with(1, x, normed, self.feed_forward(normed))

    def _with(self, half: int, x: torch.Tensor, normed: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        change = self.dropouts[half](change)
        if len(self.gates):
            change = self.gates[half](x).sigmoid() * change
        return (normed if self.is_original else x) + change


class HSTU(nn.Module):
    """Attention whose factors are SiLUs of products, divided by a constant; multiplied by a gate, added to the input.

    A learned number for the distance of the two ids is added to each product. The constant is `max_length`: if it were
    the length of a batch's longest list, rows would depend on each other.
    """

    def __init__(self, dim: int, num_heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.dim, self.num_heads, self.length = dim, num_heads, max_length
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.inner, self.outer = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.dropout = RowDropout(dropout)
        self.distances = nn.Parameter(torch.zeros(max_length + 1))

    def forward(self, x: torch.Tensor, lists: Lists | PaddedLists) -> torch.Tensor:
        """Return the output, [ids, dim], for x, [ids, dim]."""
        gate, qkv = F.silu(self.inner(self.norms[0](x))).split([self.dim, 3 * self.dim], dim=1)
        attended = lists.attend(qkv, self.num_heads, self._attention)
        return x + self.outer(self.dropout(self.norms[1](attended) * gate))

    def _attention(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        places = torch.arange(queries.shape[2], device=queries.device)
        between = places[:, None] - places
        added = take_rows(self.distances, between.clamp(min=0).flatten()).view(between.shape)

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            # In place, since these are the largest tensors; only the gradient of SiLU needs its input.
            products = (queries @ keys.transpose(2, 3)).add_(added)
            factors = F.silu(products, inplace=not torch.is_grad_enabled()).div_(self.length)
            return factors.masked_fill_(between < 0, 0.0) @ values

        if torch.compiler.is_exporting():
            return attend(queries, keys, values)
        at_once = max(1, _FACTORS_AT_ONCE[queries.device.type] // max(1, self.num_heads * len(places) ** 2))
        if isinstance(queries, FakeTensor):
            at_once = max(at_once, -(-len(queries) // _FAKE_PARTS))
        chunks = zip(*(matrix.split(at_once) for matrix in (queries, keys, values)), strict=True)
        return torch.cat([attend(*chunk) for chunk in chunks])
