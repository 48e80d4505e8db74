"""Retrieval by a user's own vector and the mean of their items' vectors: matrix factorization and SimpleX."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torch import nn

from recsys.config import Config
from recsys.config.bounds import LARGE, bounded
from recsys.config.choices import RetrievalLoss
from recsys.config.names import one_of
from recsys.data.batch import Batch
from recsys.errors import UserError
from recsys.models.base import DenseInputs, Vectors, row_of_each_id, sum_by_row
from recsys.models.columns import take_rows
from recsys.models.dropout import RowDropout
from recsys.models.items import barred_scores
from recsys.models.retrieval import ListConfig, ListModel, pieces


@dataclass
class SimpleXConfig(ListConfig):
    """SimpleX (Mao et al. 2021, arXiv:2109.12613); with `history_share: 0` matrix factorization.

    A row of data.train is a user with the list of their items, each of which is to be predicted. Negatives are drawn
    from data.items, the same for all users of a global batch.
    """

    name: str = "simplex"
    user_id: str = MISSING  # feature with the own vector of a user
    history_share: float = bounded(0.5, 0, 1)  # share of the mean of items in a user's vector; the own one has the rest
    item_bias: bool = False  # add the last column of an item's vector to its cosines, in units of `temperature`
    leave_one_out: bool = False  # in training, leave the item to predict out of the mean that predicts it
    dropout: float = bounded(0.0, 0, below=1)  # dropout of the mean of items
    loss: RetrievalLoss = RetrievalLoss.softmax
    temperature: float = bounded(0.1, 1e-30, below=1e30)  # what scores are divided by, except with `contrastive`
    margin: float = bounded(0.9, -1, 1)  # `contrastive`: the score from which a negative counts
    negative_weight: float = bounded(1.0, 0, LARGE)  # `contrastive` and `binary`: factor of the mean loss of negatives

    free: ClassVar = (*ListConfig.free, "dropout")
    shapes: ClassVar = ("dim",)
    deciding: ClassVar = {
        "margin": ("loss", ("contrastive",)),
        "negative_weight": ("loss", ("contrastive", "binary")),
        "leave_one_out": ("history_share", ()),
        "dropout": ("history_share", ()),
    }

    def has_mlps(self) -> bool:
        return False

    def check(self, config: Config) -> None:
        super().check(config)
        check_user_items(self, config, {})


def check_user_items(section: Any, config: Config, lists: dict[str, str]) -> None:
    """Raise a UserError unless the features are a user, their items, an item, and those of `lists`, by key."""
    names = {key: getattr(section, key) for key in ("user_id", "history", "item_id")} | lists
    for key, name in names.items():
        one_of(f"model.{key}", name, config.features, "feature")
    if len(config.features) != len(names) or len(set(names.values())) != len(names):
        raise UserError(
            f"model {section.name} reads these distinct features: model.{', model.'.join(names)}; found "
            f"{list(config.features)}"
        )
    section.check_lists(config)
    for table in (config.features[name].table for name in (section.user_id, section.item_id)):
        dim = config.tables[table].model_dim if table in config.tables else section.dim
        if dim != section.dim:
            raise UserError(
                f"config key 'model.dim' must be {dim}, the width of tables.{table}' vectors, found {section.dim}"
            )


class SimpleX(ListModel):
    """A user's vector is their own plus a linear map of the mean of their items'; a score is its cosine with an item's.

    With `item_bias` a number of the item is added to the score: the last column of its vector, which then has no other
    use.

    In training the mean includes the item that is to be found, as in the paper. With `leave_one_out` it is the mean of
    the others, as when the model is used. Negatives are compared with the mean of all items in both cases.
    """

    Config = SimpleXConfig

    def __init__(self, config: SimpleXConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.config = config
        self.dropout = RowDropout(config.dropout)
        self.map = nn.Linear(config.dim, config.dim, bias=False)
        nn.init.eye_(self.map.weight)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return vectors whose dot products are scores: of users and items, [rows, dim]; in training also of the lists'
        items, and of their users as queries for each of these, [ids, dim]."""
        history, share = vectors[self.config.history], self.config.history_share
        own, total, lengths = vectors[self.config.user_id], sum_by_row(history), history.lengths()[:, None]
        users = (1 - share) * own + share * self.map(self.dropout(total / lengths.clamp(min=1)))
        users, items = self._user_vectors(users), self._item_vectors(vectors[self.config.item_id])
        if not self.training:
            return users, items
        positives, row = history.values(), row_of_each_id(history)
        if self.config.leave_one_out:
            # Without the mask, an only item would get two huge gradients of 0 / |0|. They cancel, but the gradient by
            # its negatives would be lost in their rounding.
            total_of_others = (take_rows(total, row) - positives).masked_fill((lengths == 1)[row], 0)
            mean = self.dropout(total_of_others / (lengths - 1).clamp(min=1)[row], row)
            queries = self._user_vectors((1 - share) * take_rows(own, row) + share * self.map(mean))
        else:
            queries = take_rows(users, row)
        return users, items, self._item_vectors(positives), queries

    def _user_vectors(self, users: torch.Tensor) -> torch.Tensor:
        if not self.config.item_bias:
            return F.normalize(users, dim=1)
        return F.pad(F.normalize(users[:, :-1], dim=1), (0, 1), value=1.0)

    def _item_vectors(self, items: torch.Tensor) -> torch.Tensor:
        if not self.config.item_bias:
            return F.normalize(items, dim=1)
        return torch.cat([F.normalize(items[:, :-1], dim=1), self.config.temperature * items[:, -1:]], dim=1)

    def losses(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> dict[str, torch.Tensor]:
        users, items, positives, queries = outputs
        start, negatives, keys = self.drawn(items, batch)
        history = batch.ids[self.config.history]
        row = row_of_each_id(history)
        barred = barred_scores(keys, history.values(), row, start)
        own, scores, weights = (queries * positives).sum(1), users[:start] @ negatives.T, batch.weights[row]
        if self.config.loss is RetrievalLoss.bpr:
            scores = (scores / self.config.temperature).masked_fill(barred, -torch.inf)
            own, of_pairs = own / self.config.temperature, weights / self.config.sampled_negatives
            loss = _LossOfPairs.apply(own, scores, row, of_pairs, *self.pieces_of_loss(own.device))
        else:
            loss = (self._losses(own, scores, barred, row) * weights).sum()
        return {self.config.loss.name: loss}

    def _losses(self, own: torch.Tensor, scores: torch.Tensor, barred: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Return the loss of each item of the lists, [ids].

        Args:
            own: scores of these items. scores: of users with negatives, [rows, negatives]. barred: those that do not
                count.
            row: the user of each item, [ids].
        """
        config = self.config
        if config.loss is RetrievalLoss.softmax:
            own, lowest = own / config.temperature, torch.finfo(scores.dtype).min
            others = take_rows((scores / config.temperature).masked_fill(barred, lowest).logsumexp(1), row)
            return torch.logaddexp(own, others) - own
        if config.loss is RetrievalLoss.contrastive:
            own, others = 1 - own, (scores - config.margin).relu()
        else:
            own, others = F.softplus(-own / config.temperature), F.softplus(scores / config.temperature)
        others = others.masked_fill(barred, 0).sum(1) / config.sampled_negatives  # not by columns: some may be fillers
        return own + config.negative_weight * take_rows(others, row)


class _LossOfPairs(torch.autograd.Function):
    """The weighted sum of softplus(negative - own) over all items of the lists, each with all negatives of its user.

    The differences are computed for some items at a time, and overwritten by their gradient, in the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        scores: torch.Tensor,
        row: torch.Tensor,
        weights: torch.Tensor,
        num_scores: int,
        most_pieces: int | None,
    ) -> torch.Tensor:
        total, of_own, of_scores = own.new_zeros(()), torch.zeros_like(own), torch.zeros_like(scores)
        for part in pieces(len(own), max(1, num_scores // scores.shape[1]), most_pieces):
            margins = scores[row[part]] - own[part, None]  # -inf for those that do not count
            total = total + F.softplus(margins).sum(1) @ weights[part]
            by_margins = margins.sigmoid_().mul_(weights[part, None])
            of_own[part] = -by_margins.sum(1)
            of_scores.index_add_(0, row[part], by_margins)
        ctx.save_for_backward(of_own, of_scores)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_own, of_scores = (saved * gradient for saved in ctx.saved_tensors)
        return of_own, of_scores, *[None] * 4
