"""Lookups of CPU ranks and of one GPU without torchrec's exchanges.

Also the gate where gradients wait before they update tables.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.config import Config, ShardingChoice
from recsys.config.choices import FloatType
from recsys.config.features import has_weighted_ids
from recsys.runtime.world import World
from recsys.tables.module_names import config_name

_NO_ID = -1  # stands for an empty list in a message
_ONE_EACH, _AT_MOST_ONE, _LISTS = range(3)  # how many ids the lists of a rank's batch have; _LISTS: any number


class Cut(torch.autograd.Function):
    """The identity; its backward pass hands the gradient to a function and stops there."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, vectors: torch.Tensor, receive: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Return `vectors`; the first argument must require a gradient, or autograd does not call `backward`."""
        ctx.receive = receive
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        """Hand the gradient to `receive`."""
        ctx.receive(gradients[0])
        return None, None, None


class UpdateGate:
    """Holds back the gradients of the tables on this rank until `open`.

    FBGEMM updates a table as soon as its gradient arrives. Here gradients wait after their exchange over the ranks, so
    the exchange itself need not wait until the ranks have agreed on the step.

    Attributes:
        output_dtype: type of the vectors that leave the tables, whatever FBGEMM returns (`plan.fbgemm_output`).
    """

    output_dtype = torch.float32

    def __init__(self) -> None:
        # Edges instead of tensors: what was looked up for all ranks is large, and not read after its exchange.
        self._waiting: list[tuple[GradientEdge, list[torch.Tensor]]] = []
        self._exchanges: list[dist.Work] = []

    def wait_for(self, exchange: dist.Work) -> None:
        """Note an exchange that must be done before gradients are read."""
        self._exchanges.append(exchange)

    def guard(self, kernels: nn.Module) -> None:
        """Hook the local lookups so that their output gradients are held until `open`."""
        kernels.register_forward_hook(lambda _, __, vectors: self.cut(vectors))

    def cut(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the vectors of a local lookup as `output_dtype`, with their gradient held until `open`."""
        if not (torch.is_grad_enabled() and vectors.requires_grad):
            return vectors.to(self.output_dtype)
        gradients: list[torch.Tensor] = []
        self._waiting.append((get_gradient_edge(vectors), gradients))
        asks = vectors.new_empty(0, requires_grad=True)
        cut: torch.Tensor = Cut.apply(asks, vectors.detach().to(self.output_dtype), gradients.append)
        return cut

    def open(self, scale: float | torch.Tensor, is_bad: torch.Tensor | None = None) -> None:
        """Update the tables by the gradients held so far, which `scaled` scales."""
        edges = [edge for edge, gradients in self._waiting if gradients]
        gradients = [gradient for _, gradients in self._waiting for gradient in gradients]
        self.close()
        if not edges:
            return
        torch.autograd.backward(edges, scaled([gradient.float() for gradient in gradients], scale, is_bad))

    def close(self) -> None:
        """Drop the gradients held so far."""
        for exchange in self._exchanges:
            exchange.wait()
        self._waiting, self._exchanges = [], []


def scaled(
    gradients: list[torch.Tensor], scale: float | torch.Tensor, is_bad: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return gradients times a number, or zeros if `is_bad`, a bool tensor of no dimensions, is true."""
    if not isinstance(scale, torch.Tensor) and scale == 1:
        return gradients
    products = list(torch._foreach_mul(gradients, scale))  # not in place, since two may be the same tensor
    return products if is_bad is None else [product.masked_fill_(is_bad, 0) for product in products]


class _KernelLookup:
    """The kernels of a sharded collection on this rank, and the order in which they expect features."""

    def __init__(self, sharded: Any, shardings: Iterable[Any]) -> None:
        (self._grouped,), (sharding,) = sharded._lookups, shardings
        self._features = sharding.feature_names()
        self._names, self._dims = sharding.embedding_names(), sharding.embedding_dims()
        self._keys: list[str] = []  # of the batches
        self._places: list[int] = []  # of the kernels' features among these keys
        self._places_there = torch.empty(0)  # the same on the device

    def _in_order(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys = ids.keys()
        if keys == self._features:
            return ids
        if keys != self._keys:  # once, since the host waits for a copy to a GPU
            self._keys, self._places = keys, [keys.index(name) for name in self._features]
            self._places_there = torch.tensor(self._places, dtype=torch.int, device=ids.device())
        with torch.no_grad():
            return ids.permute(self._places, self._places_there)


class LocalLookupById(_KernelLookup):
    """The lookup of a sharded torchrec collection with a vector for each id, without its exchanges.

    Args:
        sharded: the collection, of one sharding type and one dimension, on a single rank.
    """

    def __init__(self, sharded: Any) -> None:
        super().__init__(sharded, sharded._sharding_type_to_sharding.values())

    def __call__(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the vectors of each feature's ids, [ids, dim], with the lengths of its lists."""
        ids = self._in_order(ids)
        vectors = self._grouped(ids).view(-1, self._dims[0]).split(ids.length_per_key())
        lengths = ids.lengths().view(len(self._names), -1)
        parts = zip(self._names, vectors, lengths, strict=True)
        return {name: JaggedTensor(values, lengths=of_lists) for name, values, of_lists in parts}


class LocalLookup(_KernelLookup):
    """The lookup of a sharded torchrec collection on a single rank, without its exchanges.

    The collection splits ids by rank, plans exchanges and waits for them even on a single rank: half a millisecond a
    step, which is 6 to 8 % of a step of 2048 rows.

    Args:
        sharded: the collection, of one sharding type. gate: where gradients of the looked-up vectors wait.
    """

    def __init__(self, sharded: Any, gate: UpdateGate) -> None:
        super().__init__(sharded, sharded._embedding_shardings)
        self._kernels, self._gate = self._grouped._emb_modules, gate

    def __call__(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        """Return the sums of the rows of each list, by feature."""
        return KeyedTensor(self._names, self._dims, self._lookup(self._in_order(ids)))

    def _lookup(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Return vectors, [rows, sum of dims]; a single kernel is called without torchrec's split and join."""
        vectors: torch.Tensor = self._grouped(ids) if len(self._kernels) != 1 else self._gate.cut(self._kernels[0](ids))
        return vectors


class ExchangingLookup(LocalLookup):
    """The lookup of a sharded torchrec collection whose tables each lie on one of several ranks, with fewer messages.

    The collection sends sizes, then the lengths of lists, then ids. While no list has more than one id, one message is
    enough: a header that says how many ids the lists have, and an id for each row, `_NO_ID` for an empty list. Once any
    rank has a longer list, all ranks know it from the headers, and leave this and later batches to the collection.

    Args:
        sharded, gate: see LocalLookup.
    """

    def __init__(self, sharded: Any, gate: UpdateGate) -> None:
        super().__init__(sharded, gate)
        self._sharded, self._has_lists = sharded, False
        (sharding,) = sharded._embedding_shardings
        features = sharding.feature_names_per_rank()
        self._sent, self._own = list(map(len, features)), features[dist.get_rank()]
        self._widths: list[int] = sharding._dim_sum_per_rank()

    def __call__(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        """Return the sums of the rows of each list, by feature; collective, for batches of equal size on all ranks."""
        received = None if self._has_lists else self._exchanged(self._in_order(ids))
        if received is None:
            self._has_lists = True
            sums: KeyedTensor = self._sharded(ids).wait()
            return sums
        vectors = SendBack.apply(self._lookup(received), ids.stride(), self._widths, self._gate)
        return KeyedTensor(self._names, self._dims, vectors)

    @torch.no_grad()
    def _exchanged(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor | None:
        """Return the ids of this rank's features from all ranks, in rank order; None if a list has several ids."""
        list_sizes, by_feature = _one_id_each(ids)
        num_rows, num_ranks = ids.stride(), len(self._sent)
        header = by_feature.new_full((1,), list_sizes)
        parts = by_feature.split([number * num_rows for number in self._sent])
        message = torch.cat([tensor for part in parts for tensor in (header, part)])
        sizes = [1 + number * num_rows for number in self._sent]
        received = message.new_empty(num_ranks, 1 + len(self._own) * num_rows)
        dist.all_to_all_single(received.view(-1), message, [received.shape[1]] * num_ranks, sizes)
        if (most := int(received[:, 0].max())) == _LISTS:
            return None
        values = received[:, 1:].unflatten(1, (len(self._own), num_rows)).transpose(0, 1).flatten()
        if most == _ONE_EACH:
            return KeyedJaggedTensor(self._own, values, **_ones(len(values)))
        has_id = values != _NO_ID
        return KeyedJaggedTensor(self._own, values[has_id], lengths=has_id.int())


class SendBack(torch.autograd.Function):
    """Sends vectors to the ranks that asked for them; backward returns their gradients, divided by the rank count."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, num_rows: int, widths: list[int], gate: UpdateGate) -> torch.Tensor:
        """Return the vectors of this rank's rows from all ranks, [num_rows, sum of widths]; collective.

        Args:
            vectors: those of the rows of all ranks in order, [ranks * num_rows, width]; of any shape if width is 0.
            widths: by rank, of its vectors. gate: waits for the exchange of the backward pass.
        """
        ctx.shape, ctx.widths, ctx.gate = vectors.shape, widths, gate
        received = vectors.new_empty(num_rows * sum(widths))
        ctx.sizes = [num_rows * width for width in widths]
        ctx.own_sizes = [vectors.numel() // len(widths)] * len(widths)
        dist.all_to_all_single(received, vectors.flatten(), ctx.sizes, ctx.own_sizes)
        return torch.cat([part.view(num_rows, -1) for part in received.split(ctx.sizes) if len(part)], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradient of `vectors`; its exchange is still running, and the gate waits for it."""
        by_rank = gradients[0].split(ctx.widths, dim=1)
        message = torch.cat([part.flatten() for part in by_rank]).div_(len(by_rank))
        received = message.new_empty(ctx.shape)
        sent = dist.all_to_all_single(received.view(-1), message, ctx.own_sizes, ctx.sizes, async_op=True)
        ctx.gate.wait_for(sent)
        return received, None, None, None


def _one_id_each(ids: KeyedJaggedTensor) -> tuple[int, torch.Tensor]:
    """Return how many ids lists have, and by feature an id for each row, which is undefined for `_LISTS`."""
    values, lengths = ids.values(), ids.lengths()
    most, least = (int(lengths.max()), int(lengths.min())) if len(lengths) else (1, 1)
    if most == least == 1:
        return _ONE_EACH, values
    by_feature = values.new_full(lengths.shape, _NO_ID)
    if most > 1:
        return _LISTS, by_feature
    by_feature[lengths.bool()] = values
    return _AT_MOST_ONE, by_feature


@lru_cache(maxsize=4)
def _ones(number: int) -> dict[str, torch.Tensor]:
    return {"lengths": torch.ones(number, dtype=torch.int32), "offsets": torch.arange(number + 1, dtype=torch.int32)}


def is_local(config: Config, sharding_types: Mapping[str, str], world_size: int, on_gpu: bool) -> bool:
    """Return whether ids are looked up without torchrec's exchanges: all on a single rank, pooled ones on several CPUs.

    Each of these tables must lie on one rank. Several ranks leave to torchrec weighted ids, whose weights are sent too,
    and vectors that are sent in a type other than FP32.

    Args:
        sharding_types: by table.
    """
    if world_size == 1:
        return set(sharding_types.values()) <= {ShardingChoice.table_wise.value}
    by_id, wires = config.unpooled_tables(), {config.precision.forward_wire, config.precision.backward_wire}
    kinds = {kind for table, kind in sharding_types.items() if table not in by_id}
    is_weighted = has_weighted_ids(config)
    return kinds <= {ShardingChoice.table_wise.value} and wires == {FloatType.FP32} and not (is_weighted or on_gpu)


def local_lookups(
    pooled: Any, by_id: Iterable[Any], config: Config, world: World, gate: UpdateGate
) -> tuple[LocalLookup | None, list[LocalLookupById]]:
    """Return what replaces torchrec's sharded collections in lookups if `is_local` holds; otherwise None and []."""
    collections = [*([] if pooled is None else [pooled]), *by_id]
    plans = [plan for sharded in collections for plan in sharded.module_sharding_plan.items()]
    sharding_types = {config_name(name): sharding.sharding_type for name, sharding in plans}
    if not is_local(config, sharding_types, world.world_size, world.device.type == "cuda"):
        return None, []
    if world.world_size > 1:
        return None if pooled is None else ExchangingLookup(pooled, gate), []
    return None if pooled is None else LocalLookup(pooled, gate), list(map(LocalLookupById, by_id))
