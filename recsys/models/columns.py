"""Operations on tensors of [rows, width]: adjacent columns, outputs and losses by label, picked rows, dot products."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from recsys.errors import UserError

_ELEMENTS_AT_ONCE = 1 << 18  # of vectors, on CPUs: they and their products fit into a core's own cache
_LANES = 16  # columns that a CPU multiplies by in the time of one


def beside(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join tensors, [rows, width] each, that are adjacent in memory, as views without a copy; under no_grad."""
    if torch.compiler.is_compiling():
        return list(tensors)
    first: list[torch.Tensor] = []
    widths: list[int] = []
    before: tuple[Any, ...] | None = None
    end: int | torch.SymInt = 0
    for tensor in tensors:
        stride, offset, width = tensor.stride(), tensor.storage_offset(), tensor.shape[1]
        lies = tensor.untyped_storage()._cdata, stride, tensor.dtype
        if stride[1] == 1 and offset == end and lies == before:
            widths[-1] += width
        else:
            first.append(tensor)
            widths.append(width)
            before = lies
        end = offset + width
    return [
        tensor if width == tensor.shape[1] else tensor.as_strided((len(tensor), width), tensor.stride())
        for tensor, width in zip(first, widths, strict=True)
    ]


class Columns(torch.autograd.Function):
    """Split of a tensor into columns, whose gradients are joined without a copy if they are adjacent in memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, ...]:
        """Return views of a tensor, [rows, columns], with the given widths."""
        return tensor.split(widths, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        joined = beside(gradients)
        return joined[0] if len(joined) == 1 else torch.cat(joined, dim=1), None


def take_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `tensor[rows]`, [n, ...], for rows int64 [n], with gradients summed in the order of the rows.

    On a CPU the gradient of indexing is summed by several threads in an arbitrary order, and takes seven times as long.
    """
    return tensor.index_select(0, rows) if tensor.device.type == "cpu" else tensor[rows]


def by_label(
    outputs: torch.Tensor | tuple[torch.Tensor, ...], labels: Collection[str], num_rows: int
) -> tuple[torch.Tensor, ...]:
    """Return a model's outputs for each label, [rows] each.

    Args:
        outputs: [rows, labels], or [rows] for one label.

    Raises:
        UserError: they have another shape, as a user's own model may return.
    """
    shapes = [[num_rows], [num_rows, 1]] if len(labels) == 1 else [[num_rows, len(labels)]]
    if not isinstance(outputs, torch.Tensor) or list(outputs.shape) not in shapes:
        shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
        expected = "[rows]" if len(labels) == 1 else f"[rows, {len(labels)}]"
        raise UserError(
            f"config key 'model.name': for {num_rows} rows the model's forward gave {shape}, but data.labels needs a "
            f"number for each row and label, {expected}; return that, or give the model its own losses, evaluator "
            f"and predictions"
        )
    return outputs.view(num_rows, len(labels)).unbind(1)


def in_order_of_tasks(losses: Mapping[str, torch.Tensor], tasks: Sequence[str]) -> list[torch.Tensor]:
    """Return losses in the order of the tasks, which is that of the factors that multiply them.

    Args:
        losses: result of `Model.losses`. tasks: names; for a single task, whose loss may have any name, one or none.

    Raises:
        UserError: they are not a mapping, of other tasks, or not scalars, as a user's own model may return.
    """
    found = "a tensor" if isinstance(losses, torch.Tensor) else f"a {type(losses).__name__}"
    is_single = len(tasks) < 2
    if isinstance(losses, Mapping):
        are_sums = all(isinstance(loss, torch.Tensor) and loss.dim() == 0 for loss in losses.values())
        if are_sums and (len(losses) == 1 if is_single else set(losses) == set(tasks)):
            return [losses[name] for name in (losses if is_single else tasks)]
        shapes = (
            list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__ for loss in losses.values()
        )
        found = ", ".join(f"'{name}' of {shape}" for name, shape in zip(losses, shapes, strict=True)) or "none"
    wanted = "one name" if is_single else ", ".join(tasks)
    raise UserError(
        f"config key 'model.name': the model's losses gave {found}, but must give a mapping of {wanted} to a sum over "
        f"rows, a tensor of []; add up the terms of one loss"
    )


class PairwiseDots:
    """Computes the dot products of all pairs of a row's vectors, on CPUs one block of rows after another.

    Attributes:
        like: for fake tensors, the type of device to compute for, with only the first of several blocks; None: that of
            the vectors, with all blocks.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int, torch.device], _Pairs] = {}
        self.like: str | None = None

    def __call__(self, vectors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the products below the diagonal of a row's vectors with each other, [rows, pairs].

        Args:
            vectors: [rows, dim] each. dtype: type to multiply in; default: theirs.
        """
        number, (rows, dim), device = len(vectors), vectors[0].shape, vectors[0].device
        if torch.compiler.is_exporting():
            below, others = torch.tril_indices(number, number, offset=-1)
            stacked = torch.stack(list(vectors), dim=1)
            return torch.bmm(stacked, stacked.mT)[:, below, others]
        in_one_block = (self.like or device.type) != "cpu" or torch.compiler.is_compiling()
        key = number, number if in_one_block else -(-number // _LANES) * _LANES, device
        if key not in self._pairs:
            self._pairs[key] = _Pairs.of(*key)
        num_blocks = 1 if in_one_block else max(1, -(-rows * number * dim // _ELEMENTS_AT_ONCE))
        settings = -(-rows // num_blocks), dtype or vectors[-1].dtype, bool(self.like), in_one_block
        blocks = _Blocks(self._pairs[key].columns, *settings)
        products: torch.Tensor = _PairwiseDots.apply(self._pairs[key], blocks, *vectors)
        return products


@dataclass(frozen=True)
class _Pairs:
    """Places of the pairs of n vectors in the flattened matrix of their products, of n rows and `columns`.

    Attributes:
        below: the places below the diagonal, [pairs] int64.
        pair_of_place: the pair of each place of the n × n matrix, or the number of pairs on the diagonal, [n * n].
        but_first: the same without the first column, [n * (n - 1)].
    """

    columns: int
    below: torch.Tensor
    pair_of_place: torch.Tensor
    but_first: torch.Tensor

    @staticmethod
    def of(n: int, columns: int, device: torch.device) -> "_Pairs":
        """Return the places on a device."""
        rows, others = torch.tril_indices(n, n, offset=-1)
        pair_of_place = torch.full((n, n), len(rows))
        pair_of_place[rows, others] = pair_of_place[others, rows] = torch.arange(len(rows))
        below, but_first = rows * columns + others, pair_of_place[:, 1:]
        return _Pairs(columns, *(indices.flatten().to(device) for indices in (below, pair_of_place, but_first)))


@dataclass(frozen=True)
class _Blocks:
    """Blocks of stacked vectors: `at_once` rows of `places` vectors each, the last of them 0; `whole`: one block."""

    places: int
    at_once: int
    dtype: torch.dtype
    only_first: bool
    whole: bool

    def starts(self, rows: int) -> Sequence[int]:
        """Return the first rows of the blocks."""
        starts = range(0, rows, self.at_once) if self.at_once < rows else (0,)
        return starts[:1] if self.only_first else starts

    def but_first(self, vectors: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the rows of each block and their vectors without the first, [rows, vectors - 1, dim], as views.

        Vectors that are not adjacent in memory, or have another type, are copied, as in `of`.
        """
        n, (rows, dim), others = len(vectors), vectors[0].shape, beside(vectors[1:])
        if len(others) == 1 and others[0].stride(1) == 1 and all(tensor.dtype is self.dtype for tensor in vectors):
            for start in self.starts(rows):
                rows_of_block = slice(start, start + self.at_once)
                yield rows_of_block, others[0][rows_of_block].view(-1, n - 1, dim)
            return
        yield from ((block, stacked[:, 1:n]) for block, stacked in self.of(vectors))

    def of(self, vectors: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the rows of each block and their vectors, [rows, places, dim], which the next block overwrites."""
        tensors, (rows, dim) = beside(vectors), vectors[0].shape
        memory = vectors[0].new_empty(self.at_once, self.places * dim, dtype=self.dtype)
        memory[:, len(vectors) * dim :] = 0
        for start in self.starts(rows):
            block, column = memory[: rows - start], 0
            for tensor in tensors:
                block[:, column : column + tensor.shape[1]] = tensor[start : start + self.at_once]
                column += tensor.shape[1]
            yield slice(start, start + self.at_once), block.view(-1, self.places, dim)


class _PairwiseDots(torch.autograd.Function):
    """The dot products of all pairs of a row's vectors, below the diagonal.

    Autograd's own backward takes two batched products, although one is enough, since the products are symmetric. And
    all of its stacked and picked tensors go through memory, which takes a CPU longer than computing them.
    """

    @staticmethod
    def forward(ctx: Any, pairs: _Pairs, blocks: _Blocks, *vectors: torch.Tensor) -> torch.Tensor:
        """Return the products, [rows, pairs]."""
        ctx.pairs, ctx.blocks, n, result = pairs, blocks, len(vectors), None
        ctx.save_for_backward(*vectors)
        for rows, stacked in blocks.of(vectors):
            products = torch.bmm(stacked[:, :n], stacked.mT).flatten(1).index_select(1, pairs.below)
            result = products.new_empty(len(vectors[0]), len(pairs.below)) if result is None else result
            result[rows] = products
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        vectors, pairs, blocks = ctx.saved_tensors, ctx.pairs, ctx.blocks
        n, (rows, dim) = len(vectors), vectors[0].shape
        if n == 1:  # and no pairs
            return None, None, torch.zeros_like(vectors[0])
        if blocks.whole:
            ((_, stacked),) = blocks.of(vectors)
            padded = F.pad(gradient.to(blocks.dtype), (0, 1))  # a column of 0 for the diagonal
            by_vectors = torch.bmm(padded.index_select(1, pairs.pair_of_place).view(-1, n, n), stacked[:, :n])
            return None, None, *by_vectors.to(vectors[0].dtype).unbind(1)
        of_first, of_others = vectors[0].new_empty(rows, dim), vectors[-1].new_empty(rows, (n - 1) * dim)
        for some, others in blocks.but_first(vectors):
            padded = F.pad(gradient[some].to(blocks.dtype), (0, 1))
            factors = padded.index_select(1, pairs.but_first).view(-1, n, n - 1)
            block = torch.bmm(factors, others)
            of_first[some] = block[:, 0]
            # The first vector's term is added last, whether the others had to be copied or not, so that sums do not
            # depend on the layout of vectors, which the plan decides.
            by_first = factors[:, 0, :, None], vectors[0][some, None].to(blocks.dtype)
            torch.addcmul(block[:, 1:], *by_first, out=of_others[some].view(-1, n - 1, dim))
        return None, None, of_first, *of_others.split(dim, 1)
