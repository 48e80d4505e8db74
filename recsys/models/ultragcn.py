"""UltraGCN: vectors of users and items, trained towards the limit of graph convolutions, without computing any."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import Config
from recsys.config.bounds import LARGE, bounded
from recsys.config.model import Needs
from recsys.data.batch import Batch
from recsys.errors import UserError
from recsys.models.base import DenseInputs, Vectors, row_of_each_id
from recsys.models.columns import take_rows
from recsys.models.items import barred_scores
from recsys.models.retrieval import ListConfig, ListModel
from recsys.models.simplex import check_user_items


@dataclass
class UltraGCNConfig(ListConfig):
    """UltraGCN (Mao et al. 2021, arXiv:2110.15114).

    A row of data.train is a user with the list of their items, each of which is to be predicted. With `neighbours`, it
    also has the neighbours of these items with a weight each, as `recsys prepare retrieval --neighbours` writes them.
    Negatives are drawn from data.items, the same for all users of a global batch.
    """

    name: str = "ultragcn"
    user_id: str = MISSING  # feature with the vector of a user
    # Feature with the items that often occur with those of the user, and their weights; `null`: no loss of neighbours.
    # Only data.train needs its column.
    neighbours: str | None = None
    # Weight of an item of the user in the loss: the first number, plus the second times
    # sqrt((n + 1) / (m + 1)) / n for a user with n items and an item that m users have.
    positive_weights: list[float] = bounded([1e-6, 1.0], 0, LARGE)
    negative_weights: list[float] = bounded([1e-6, 1.0], 0, LARGE)  # the same for an item that was drawn
    negative_weight: float = bounded(10.0, 0, LARGE)  # factor of the mean loss of the items that were drawn
    neighbour_weight: float = bounded(0.2, 0, LARGE)  # factor of the loss of neighbours
    item_bias: bool = False  # the last column of an item's vector is its bias: added to its scores, and not multiplied
    # Adds, for each item of a user, drawn_l2 / 2 times the mean squared length of the drawn items to the loss. This
    # holds back all items alike; `l2` of their table does so by how many users they have. Biases do not count.
    drawn_l2: float = bounded(0.0, 0, LARGE)

    shapes: ClassVar = ("dim",)
    deciding: ClassVar = {"neighbour_weight": ("neighbours", ())}

    def needs(self) -> Needs:
        training_features = () if self.neighbours is None else (self.neighbours,)
        lists = (self.history, *training_features)
        return replace(
            super().needs(), sequences=lists, log_shares_of=self.history, training_features=training_features
        )

    def has_mlps(self) -> bool:
        return False

    def check(self, config: Config) -> None:
        super().check(config)
        lists = {} if self.neighbours is None else {"neighbours": self.neighbours}
        check_user_items(self, config, lists)
        for key in ("positive_weights", "negative_weights"):
            if len(getattr(self, key)) != 2:
                raise UserError(
                    f"config key 'model.{key}' must be two numbers, one weight for all and one that depends on "
                    f"degrees, found {getattr(self, key)}"
                )
        if self.neighbours is None:
            return
        feature = config.features[self.neighbours]
        if feature.table != config.features[self.item_id].table or feature.weights is None:
            raise UserError(
                f"config key 'features.{self.neighbours}': neighbours are items of "
                f"tables.{config.features[self.item_id].table} with a weight each, found table {feature.table} and "
                f"weights {feature.weights}"
            )


class UltraGCN(ListModel):
    """A score is the dot product of a user's vector and an item's.

    The loss of a user's item i is w(u, i) · softplus(-s(u, i)), plus negative_weight times the mean over drawn items j,
    the user's own counted as 0, of w(u, j) · softplus(s(u, j)). The loss of a neighbour k is neighbour_weight times its
    weight times softplus(-s(u, k)).

    The logit s is the score minus log(negative_weight) if that weight is above 1: these are the prior log odds of an
    item. In the paper the logit is the score. Then all vectors have to learn these odds first, which takes more steps
    than a row gets that is trained once an epoch.
    """

    Config = UltraGCNConfig
    degrees: torch.Tensor

    def __init__(self, config: UltraGCNConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.config = config
        assert inputs.log_shares is not None
        self.register_buffer("degrees", inputs.log_shares.exp() * inputs.num_counted, persistent=False)
        self._logit_of_zero = -math.log(max(1.0, config.negative_weight))

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return vectors of users and of items, [rows, dim]; in training also of the lists' items, [ids, dim], and of
        their neighbours."""
        users, items = vectors[self.config.user_id], vectors[self.config.item_id]
        if self.config.item_bias:
            users = F.pad(users[:, :-1], (0, 1), value=1.0)
        if not self.training:
            return users, items
        neighbours = () if self.config.neighbours is None else (vectors[self.config.neighbours].values(),)
        return users, items, vectors[self.config.history].values(), *neighbours

    def losses(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], batch: Batch) -> dict[str, torch.Tensor]:
        config, (users, items, positives, *neighbours) = self.config, outputs
        start, negatives, keys = self.drawn(items, batch)
        users, history = users[:start], batch.ids[config.history]
        row, lengths = row_of_each_id(history), history.lengths()[:start].float()
        positive_losses = self._positive_losses(take_rows(users, row), positives) * self._weights(
            config.positive_weights, lengths[row], history.values()
        )
        negative_losses = F.softplus(users @ negatives.T + self._logit_of_zero) * self._weights(
            config.negative_weights, lengths[:, None], keys.clamp(min=0)
        )
        negative_losses = negative_losses.masked_fill(barred_scores(keys, history.values(), row, start), 0).sum(1)
        squares = negatives[:, : config.dim - config.item_bias].square().sum(1) @ (keys >= 0).float()
        negative_losses = (
            (config.negative_weight * negative_losses + config.drawn_l2 / 2 * squares)
            / config.sampled_negatives
            * lengths
        )
        by_row = negative_losses.index_add(0, row, positive_losses)
        if neighbours:
            by_row = by_row.index_add(0, *self._of_neighbours(users, neighbours[0], batch.ids[config.neighbours or ""]))
        return {"ultragcn": by_row @ batch.weights[:start]}

    def _weights(self, weights: list[float], lengths: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the weights of pairs in the loss, from the lengths of users' lists and the table rows of items."""
        by_degrees = ((lengths + 1) / (self.degrees[items] + 1)).sqrt() / lengths.clamp(min=1)
        return weights[0] + weights[1] * by_degrees

    def _of_neighbours(
        self, users: torch.Tensor, vectors: torch.Tensor, ids: JaggedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the neighbours, and their losses, both [ids]."""
        row = row_of_each_id(ids)
        losses = self._positive_losses(take_rows(users, row), vectors)
        return row, self.config.neighbour_weight * losses * ids.weights()

    def _positive_losses(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the losses of pairs of a user and a positive item, [pairs]."""
        return F.softplus(-((users * items).sum(1) + self._logit_of_zero))
