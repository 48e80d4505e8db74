"""Sequence models SASRec, eSASRec and HSTU: the next item of a user by attention over the items before it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.config.choices import SequenceLayer, SequenceLoss
from recsys.config.names import one_of
from recsys.data.batch import Batch
from recsys.errors import UserError
from recsys.models.base import WIDEST, DenseInputs, Vectors, row_of_each_id
from recsys.models.columns import take_rows
from recsys.models.dropout import RowDropout
from recsys.models.halves import PartByPart, sum_of_rows
from recsys.models.items import barred_scores
from recsys.models.jagged import Lists, PaddedLists, host_lengths, to_device
from recsys.models.products import add_products, product_over_rows
from recsys.models.retrieval import ListConfig, ListModel, pieces
from recsys.models.sequence_layers import HSTU, Block


@dataclass
class SASRecConfig(ListConfig):
    """SASRec (Kang & McAuley 2018, arXiv:1808.09781) with sampled softmax (arXiv:2508.06450), over one list of items.

    A row of data.train is the list of a user. All its items except the last are inputs, after each of which the next
    one is to be predicted. Negatives are drawn from data.items, the same for all positions of a global batch.
    """

    name: str = "sasrec"
    max_length: int = bounded(50, 1, 2**16)  # items that the model looks back at; max_length of `history` is one more
    num_blocks: int = bounded(2, 0, 1000)  # layers of attention
    num_heads: int = bounded(1, 1, WIDEST)  # attention heads of a layer
    layer: SequenceLayer = SequenceLayer.sasrec
    share_layers: bool = False  # use the weights of one block num_blocks times, as ALBERT does (arXiv:1909.11942)
    # Hidden width of the feed-forward layers. Default: dim, or 4 * dim for ligr; hstu has no such layers.
    feed_forward: int | None = bounded(None, 1, WIDEST)
    dropout: float = bounded(0.2, 0, below=1)  # dropout of the input, and of the output of each half of a layer
    # Dropout of elements of item vectors: those of lists, as inputs and as items to predict, and those of negatives.
    embedding_dropout: float = bounded(0.0, 0, below=1)
    loss: SequenceLoss = SequenceLoss.softmax
    calibration: float = bounded(0.75, 0, 1)  # `gbce`: 0 is plain binary cross-entropy
    # Do not compare a user with drawn items that are anywhere in their list. Set this if no user has an item twice and
    # evaluation masks seen items: there is then no use in learning to push these down.
    exclude_listed: bool = False
    num_items: int | None = bounded(None, 2)  # `gbce`: number of items in data.items

    free: ClassVar = (*ListConfig.free, "dropout", "embedding_dropout")
    shapes: ClassVar = ("dim", "max_length", "feed_forward")
    deciding: ClassVar = {"calibration": ("loss", ("gbce",)), "num_items": ("loss", ("gbce",))}

    def has_mlps(self) -> bool:
        return self.num_blocks > 0 and self.layer in (SequenceLayer.sasrec, SequenceLayer.original)

    def check(self, config: Config) -> None:
        super().check(config)
        for key in ("history", "item_id"):
            one_of(f"model.{key}", getattr(self, key), config.features, "feature")
        unused = set(config.features) - {self.history, self.item_id}
        if unused or self.history == self.item_id:
            raise UserError(
                f"model {self.name} reads two features, model.history and model.item_id, found {list(config.features)}"
            )
        self.check_lists(config)
        history = config.features[self.history]
        if history.max_length != self.max_length + 1:
            raise UserError(
                f"config key 'features.{self.history}.max_length' must be model.max_length + 1 = {self.max_length + 1},"
                f" since the last item of a list is only a target, found {history.max_length}"
            )
        dim = config.tables[history.table or ""].model_dim if history.table in config.tables else self.dim
        if dim != self.dim or self.dim % self.num_heads:
            raise UserError(
                f"config key 'model.dim' must be tables.{history.table}.embedding_dim={dim}, and a multiple of "
                f"model.num_heads={self.num_heads}, found {self.dim}"
            )
        if self.layer is SequenceLayer.hstu and self.feed_forward is not None:
            raise UserError("config key 'model.feed_forward': layer hstu has no feed-forward part; remove it")
        if self.loss is SequenceLoss.gbce and self.num_items is None:
            raise UserError("config key 'model.num_items' is not set, but gbce needs the number of items")
        if config.train.compile:
            raise UserError("config key 'train.compile': lists have another shape in each step; set it to false")


class SASRec(ListModel, PartByPart):
    """Attention over a user's items, trained to find the next one; a score is a dot product with an item's vector.

    Positions count from the end, so that the newest item is always at the same one.
    """

    Config = SASRecConfig

    def __init__(self, config: SASRecConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.config = config
        self.positions = nn.Parameter(torch.empty(config.max_length, config.dim))
        self.dropout = RowDropout(config.dropout)
        self.list_dropout, self.item_dropout = (RowDropout(config.embedding_dropout) for _ in range(2))
        self.has_kinks = config.layer in (SequenceLayer.sasrec, SequenceLayer.original)
        number = min(1, config.num_blocks) if config.share_layers else config.num_blocks
        self.blocks = nn.ModuleList(_block(config) for _ in range(number))
        self.norm = nn.LayerNorm(config.dim)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return vectors of users and of items, each [rows, dim].

        In training, return for each id of the lists the state after it and its vector, each [ids, dim], the vectors of
        items, [rows, dim], and in host memory the lengths of the lists, [rows], so that the loss does not ask a GPU.
        """
        history, items = vectors[self.config.history], vectors[self.config.item_id]
        lengths, values = history.lengths(), history.values()
        lists: Lists | PaddedLists
        if torch.compiler.is_exporting():
            lists = PaddedLists(lengths, values.shape[0], self.config.max_length + 1)
        else:
            on_host = host_lengths(lengths, values.shape[0])
            if self.training:
                parts = list(self._of_parts(values, on_host))
                if self.list_dropout.p:
                    values = _joined([vectors_of_part for vectors_of_part, _ in parts])
                states = _joined([states for _, states in parts])
                return states, values, self.item_dropout(items), torch.from_numpy(on_host)
            lists = Lists.of(on_host, items.device)
        states = self._states(values, lists)
        # The vector of an empty list is 0.
        ends = torch.where(lengths > 0, lengths.cumsum(0), 0)
        return torch.cat([states.new_zeros(1, states.shape[1]), states])[ends], items

    def _of_parts(self, values: torch.Tensor, lengths: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each part of the lists, the vectors of the ids and the states after them, each [ids, dim].

        Gradients are summed part by part, and lists padded with those of their part, as if it had its own process.

        Args:
            values: vectors of the ids. lengths: those of the lists, then those of drawn items, which are empty.
        """
        dropouts = [
            module
            for module in self.modules()
            if isinstance(module, RowDropout) and module.p > 0 and module is not self.item_dropout
        ]
        rows = dropouts[0].rows if dropouts else None
        part_lengths = np.array_split(
            lengths if self.num_parts == 1 else lengths[: -self.config.sampled_negatives], self.num_parts
        )
        first = 0
        for lengths_of_part, part_values in zip(
            part_lengths, values.split([int(lengths_of_part.sum()) for lengths_of_part in part_lengths]), strict=True
        ):
            lists = Lists.of(lengths_of_part, values.device)
            for module in dropouts:  # so that masks depend on the place of an id in its list too, not only on rows
                assert rows is not None
                module.rows = rows[first + lists.row] * (self.config.max_length + 1) + lists.from_end
            part_values = self.list_dropout(part_values)
            yield part_values, self._states(part_values, lists)
            first += len(lengths_of_part)

    def _states(self, values: torch.Tensor, lists: Lists | PaddedLists) -> torch.Tensor:
        # The last id of a list is not an input in training, and its state is not used.
        place = (lists.from_end - int(self.training)).clamp(0, self.config.max_length - 1)
        x = self.dropout(values + take_rows(self.positions, place))
        for number in range(self.config.num_blocks):
            x = self.blocks[0 if self.config.share_layers else number](x, lists)
        states: torch.Tensor = self.norm(x)
        return states

    def losses(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> dict[str, torch.Tensor]:
        states, vectors, items, length_of_list = outputs
        jagged, lengths = batch.ids[self.config.history], host_lengths(length_of_list, len(states))
        ends = np.cumsum(lengths)
        inputs = to_device(np.delete(np.arange(len(states)), ends[lengths > 0] - 1), states.device)
        rows = to_device(np.repeat(np.arange(len(lengths)), np.maximum(lengths - 1, 0)), states.device)
        start, *negatives = self.drawn(items, batch)
        positives = take_rows(vectors, inputs + 1), jagged.values()[inputs + 1]
        listed = None
        if self.config.exclude_listed:
            listed = barred_scores(negatives[1], jagged.values(), row_of_each_id(jagged), len(lengths))
        part_lengths = np.array_split(lengths if self.num_parts == 1 else lengths[:start], self.num_parts)
        counts = [int(np.maximum(part - 1, 0).sum()) for part in part_lengths]
        settings = counts, *self.pieces_of_loss(states.device), self._beta(), self.config.sampled_negatives
        loss = _LossOfDrawn.apply(
            take_rows(states, inputs), *positives, *negatives, batch.weights[rows], rows, listed, *settings
        )
        return {self.config.loss.name: loss}

    def denominator(self, batch: Batch) -> torch.Tensor:
        lengths = batch.ids[self.config.history].lengths()
        return sum_of_rows(batch.weights * (lengths - 1).clamp(min=0), self.num_parts)

    def _beta(self) -> float | None:
        """Return gBCE's factor of the cross-entropy of the next item; None for the softmax."""
        config = self.config
        if config.loss is SequenceLoss.softmax or config.num_items is None:
            return None
        share = min(1.0, config.sampled_negatives / (config.num_items - 1))
        return share * (config.calibration * (1 - 1 / share) + 1 / share)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # cat would copy a single part


def _block(config: SASRecConfig) -> nn.Module:
    if config.layer is SequenceLayer.hstu:
        return HSTU(config.dim, config.num_heads, config.max_length, config.dropout)
    return Block(config.layer, config.dim, config.num_heads, config.feed_forward, config.dropout)


class _LossOfDrawn(torch.autograd.Function):
    """Weighted sum of the losses of positions, whose next items are compared with the same negatives.

    Scores, [positions, negatives], take most memory. So they are computed for some positions at a time, and overwritten
    by their gradient, in the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        positives: torch.Tensor,
        keys: torch.Tensor,
        negatives: torch.Tensor,
        negatives_keys: torch.Tensor,
        weights: torch.Tensor,
        row: torch.Tensor,
        listed: torch.Tensor | None,
        counts: list[int],
        num_scores: int,
        most_pieces: int | None,
        beta: float | None,
        num_drawn: int,
    ) -> torch.Tensor:
        losses, of_states, of_positives = torch.empty_like(weights), torch.empty_like(states), torch.empty_like(states)
        of_parts = [torch.zeros_like(negatives) for _ in counts]
        at_once = max(1, num_scores // len(negatives))
        for part, rows in _pieces_of_parts(counts, at_once, most_pieces):
            queries, own, weight = states[rows], positives[rows], weights[rows]
            barred = (negatives_keys == -1)[None, :] | (negatives_keys[None, :] == keys[rows, None])
            if listed is not None:
                barred |= listed[row[rows]]
            scores, positive = (queries @ negatives.T).masked_fill_(barred, -torch.inf), (queries * own).sum(1)
            if beta is None:
                total = torch.logaddexp(positive, scores.logsumexp(1))
                losses[rows] = (total - positive) * weight
                by_positive, by_negatives = (positive - total).expm1(), scores.sub_(total[:, None]).exp_()
            else:
                number = 1 + num_drawn  # not len(negatives), since some may be fillers
                losses[rows] = (beta * F.softplus(-positive) + F.softplus(scores).sum(1)) * weight / number
                by_positive, by_negatives = -beta * (-positive).sigmoid() / number, scores.sigmoid_().div_(number)
            by_positive, by_negatives = (by_positive * weight)[:, None], by_negatives.mul_(weight[:, None])
            of_states[rows] = add_products(by_positive * own, by_negatives, negatives)
            of_positives[rows] = by_positive * queries
            of_parts[part] += product_over_rows(by_negatives, queries)
        ctx.save_for_backward(of_states, of_positives, *of_parts)
        sums = [chunk.sum() for chunk in losses.split(counts)]
        return sum(sums[1:], sums[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_states, of_positives, *of_parts = (saved * gradient for saved in ctx.saved_tensors)
        return of_states, of_positives, None, sum(of_parts[1:], of_parts[0]), *[None] * 9


def _pieces_of_parts(counts: list[int], step: int, most: int | None) -> Iterator[tuple[int, slice]]:
    """Yield pieces of `step` positions, at most `most` in each part, as the number of the part and a slice."""
    for part, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        for rows in pieces(count, step, most):
            yield part, slice(end - count + rows.start, min(end - count + rows.stop, end))
