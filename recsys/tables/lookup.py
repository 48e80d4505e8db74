"""Lookups of CPU ranks without torchrec's exchanges, and the gate where gradients wait before they update tables."""

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys.config import Config, ShardingChoice
from recsys.config.choices import FloatType
from recsys.runtime.world import World

_NOTHING = -1  # in the place of the id of an empty list
_WHOLE, _WITH_GAPS, _LISTS = range(3)  # what a rank says of its batch: each row has an id, at most one, any number


class Cut(torch.autograd.Function):
    """A tensor as it is, whose gradient is handed to a function and goes no further."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, vectors: torch.Tensor, take: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Return `vectors`; the first argument is to require a gradient, so that autograd comes here."""
        ctx.take = take
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        """Hand the gradient over."""
        ctx.take(gradients[0])
        return None, None, None


class UpdateGate:
    """Keeps gradients from the tables on this rank until it is opened.

    FBGEMM updates tables as soon as a gradient comes in. Here it waits after the exchange over the ranks, so that this
    need not wait for what the ranks have to agree on first.

    Attributes:
        given: type in which vectors leave the tables, whatever FBGEMM gives (`plan.fbgemm_output`).
    """

    given = torch.float32

    def __init__(self) -> None:
        # Edges in place of tensors: what was looked up for all ranks is large, and not read after its exchange.
        self._waiting: list[tuple[GradientEdge, list[torch.Tensor]]] = []
        self._on_their_way: list[dist.Work] = []

    def wait_for(self, exchange: dist.Work) -> None:
        """Take note that gradients are not there before an exchange is done."""
        self._on_their_way.append(exchange)

    def guard(self, kernels: nn.Module) -> None:
        """Hook the local lookups so that their output gradients are held until `open`."""
        kernels.register_forward_hook(lambda _, __, vectors: self.cut(vectors))

    def cut(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return what a local lookup gives in the type `given`, with its gradient held until `open`."""
        if not (torch.is_grad_enabled() and vectors.requires_grad):
            return vectors.to(self.given)
        gradients: list[torch.Tensor] = []
        self._waiting.append((get_gradient_edge(vectors), gradients))
        asks = vectors.new_empty(0, requires_grad=True)
        cut: torch.Tensor = Cut.apply(asks, vectors.detach().to(self.given), gradients.append)
        return cut

    def open(self, scale: float | torch.Tensor, is_bad: torch.Tensor | None = None) -> None:
        """Let the gradients that have come in update the tables, as `scaled` makes them."""
        edges = [edge for edge, gradients in self._waiting if gradients]
        gradients = [gradient for _, gradients in self._waiting for gradient in gradients]
        self.close()
        if not edges:
            return
        torch.autograd.backward(edges, scaled([gradient.float() for gradient in gradients], scale, is_bad))

    def close(self) -> None:
        """Forget the gradients that have come in."""
        for exchange in self._on_their_way:
            exchange.wait()
        self._waiting, self._on_their_way = [], []


def scaled(
    gradients: list[torch.Tensor], scale: float | torch.Tensor, is_bad: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return gradients times a number, and 0 in their place where `is_bad`, a bool tensor of no dimensions."""
    if not isinstance(scale, torch.Tensor) and scale == 1:
        return gradients
    products = list(torch._foreach_mul(gradients, scale))  # not in place, for two may be the same tensor
    return products if is_bad is None else [product.masked_fill_(is_bad, 0) for product in products]


class LocalLookup:
    """Gives what torchrec's sharded collection gives where nothing is exchanged, by the same lookup.

    The collection splits ids by ranks, plans exchanges and waits for them also where there is one rank: half a
    millisecond a step, 6 to 8 % of one of 2048 rows.

    Args:
        sharded: the collection, of one sharding type. gate: where gradients by what was looked up wait.
    """

    def __init__(self, sharded: Any, gate: UpdateGate) -> None:
        (self._all,), (sharding,) = sharded._lookups, sharded._embedding_shardings
        self._kernels, self._gate = self._all._emb_modules, gate
        self._features = sharding.feature_names()
        self._names, self._dims = sharding.embedding_names(), sharding.embedding_dims()

    def __call__(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        """Return the sums of the rows of each list, by feature."""
        return KeyedTensor(self._names, self._dims, self._lookup(self._in_order(ids)))

    def _lookup(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Return vectors, [rows, sum of dims]; one kernel for all needs nothing of what is done for several."""
        vectors: torch.Tensor = self._all(ids) if len(self._kernels) != 1 else self._gate.cut(self._kernels[0](ids))
        return vectors

    def _in_order(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys = ids.keys()
        if keys == self._features:
            return ids
        with torch.no_grad():
            return ids.permute([keys.index(name) for name in self._features])


class ExchangingLookup(LocalLookup):
    """Gives what torchrec's sharded collection gives where each table is on one of several ranks, with fewer messages.

    The collection sends how much it will send, then the lengths of lists, then ids. While no row has more than one id
    of a feature, one message does: ids of all rows, with a mark where there is none. It says what it is, so that all
    ranks know of a rank that has a list; from then on, all leave batches to the collection.

    Args:
        sharded, gate: as of LocalLookup.
    """

    def __init__(self, sharded: Any, gate: UpdateGate) -> None:
        super().__init__(sharded, gate)
        self._sharded, self._has_lists = sharded, False
        (sharding,) = sharded._embedding_shardings
        features = sharding.feature_names_per_rank()
        self._sent, self._own = list(map(len, features)), features[dist.get_rank()]
        self._widths: list[int] = sharding._dim_sum_per_rank()

    def __call__(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        """Return the sums of the rows of each list, by feature; collective, of batches of as many rows on each rank."""
        received = None if self._has_lists else self._exchanged(self._in_order(ids))
        if received is None:
            self._has_lists = True
            sums: KeyedTensor = self._sharded(ids).wait()
            return sums
        vectors = SendBack.apply(self._lookup(received), ids.stride(), self._widths, self._gate)
        return KeyedTensor(self._names, self._dims, vectors)

    @torch.no_grad()
    def _exchanged(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor | None:
        """Return the ids of this rank's features from all ranks, in their order; None if some rank has a list."""
        kind, by_feature = _one_id_each(ids)
        num_rows, num_ranks = ids.stride(), len(self._sent)
        said = by_feature.new_full((1,), kind)
        parts = by_feature.split([number * num_rows for number in self._sent])
        message = torch.cat([tensor for part in parts for tensor in (said, part)])
        sizes = [1 + number * num_rows for number in self._sent]
        received = message.new_empty(num_ranks, 1 + len(self._own) * num_rows)
        dist.all_to_all_single(received.view(-1), message, [received.shape[1]] * num_ranks, sizes)
        if (most := int(received[:, 0].max())) == _LISTS:
            return None
        values = received[:, 1:].unflatten(1, (len(self._own), num_rows)).transpose(0, 1).flatten()
        if most == _WHOLE:
            return KeyedJaggedTensor(self._own, values, **_ones(len(values)))
        there = values != _NOTHING
        return KeyedJaggedTensor(self._own, values[there], lengths=there.int())


class SendBack(torch.autograd.Function):
    """Vectors to the ranks that asked for them, and the gradients by them back, as means over the ranks."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, num_rows: int, widths: list[int], gate: UpdateGate) -> torch.Tensor:
        """Return the vectors of this rank's rows from all ranks, [num_rows, sum of widths]; collective.

        Args:
            vectors: of the rows of all ranks in order, [ranks * num_rows, width]; of any shape where width is 0.
            widths: of the vectors of each rank. gate: told what is to be waited for before gradients are read.
        """
        ctx.shape, ctx.widths, ctx.gate = vectors.shape, widths, gate
        received = vectors.new_empty(num_rows * sum(widths))
        ctx.sizes = [num_rows * width for width in widths]
        ctx.own_sizes = [vectors.numel() // len(widths)] * len(widths)
        dist.all_to_all_single(received, vectors.flatten(), ctx.sizes, ctx.own_sizes)
        return torch.cat([part.view(num_rows, -1) for part in received.split(ctx.sizes) if len(part)], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradient by `vectors`, which is on its way."""
        by_rank = gradients[0].split(ctx.widths, dim=1)
        message = torch.cat([part.flatten() for part in by_rank]).div_(len(by_rank))
        received = message.new_empty(ctx.shape)
        sent = dist.all_to_all_single(received.view(-1), message, ctx.own_sizes, ctx.sizes, async_op=True)
        ctx.gate.wait_for(sent)
        return received, None, None, None


def _one_id_each(ids: KeyedJaggedTensor) -> tuple[int, torch.Tensor]:
    """Return what a batch is, and the id of each feature and row, feature by feature; anything in place of lists."""
    values, lengths = ids.values(), ids.lengths()
    most, least = (int(lengths.max()), int(lengths.min())) if len(lengths) else (1, 1)
    if most == least == 1:
        return _WHOLE, values
    by_feature = values.new_full(lengths.shape, _NOTHING)
    if most > 1:
        return _LISTS, by_feature
    by_feature[lengths.bool()] = values
    return _WITH_GAPS, by_feature


@lru_cache(maxsize=4)
def _ones(number: int) -> dict[str, torch.Tensor]:
    return {"lengths": torch.ones(number, dtype=torch.int32), "offsets": torch.arange(number + 1, dtype=torch.int32)}


def is_local(config: Config, sharding_types: Collection[str], world_size: int, on_gpu: bool) -> bool:
    """Return whether ranks look up pooled tables, of some sharding types, as `LocalLookup` does.

    That is on CPU ranks that hold each table whole. The weights of ids are left to torchrec, which changes them on
    their way, and so are vectors that are sent in another type than the tables give.
    """
    wires = {config.precision.forward_wire, config.precision.backward_wire}
    is_changed = any(feature.weights is not None for feature in config.features.values()) or (
        world_size > 1 and wires != {FloatType.FP32}
    )
    return not on_gpu and set(sharding_types) == {ShardingChoice.table_wise.value} and not is_changed


def local_lookup(sharded: Any, config: Config, world: World, gate: UpdateGate) -> LocalLookup | None:
    """Return the lookup of a sharded collection of pooled tables, if there is one, where `is_local` holds."""
    if sharded is None:
        return None
    sharding_types = {table.sharding_type for table in sharded.module_sharding_plan.values()}
    if not is_local(config, sharding_types, world.world_size, world.device.type == "cuda"):
        return None
    return (LocalLookup if world.world_size == 1 else ExchangingLookup)(sharded, gate)
