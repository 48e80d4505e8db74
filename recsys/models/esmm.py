"""Entire space multi-task model: labels that can only follow each other, all learned from all rows."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from recsys.config import Config
from recsys.config.bounds import bounded
from recsys.config.choices import LabelLoss
from recsys.config.model import Needs
from recsys.errors import UserError
from recsys.models.base import WIDEST, DenseInputs, Vectors
from recsys.models.mmoe import TaskConfig, TaskModel


@dataclass
class ESMMConfig(TaskConfig):
    """ESMM (Ma et al. 2018, arXiv:1804.07931), over all features.

    Labels are in the order in which they happen, such as a click, then a purchase. A label can be positive only in rows
    in which the label before it is.
    """

    name: str = "esmm"
    tower_mlp: list[int] = bounded([64], 1, WIDEST)  # hidden widths of the tower of a label; the output has width 1

    def needs(self) -> Needs:
        return replace(super().needs(), ordered_labels=True)

    def check(self, config: Config) -> None:
        super().check(config)
        labels = config.labels()
        if len(labels) < 2 or any(label.loss is not LabelLoss.binary for label in labels.values()):
            raise UserError(
                f"model {self.name} learns two or more binary labels in the order in which they happen, such as click, "
                f"then purchase; config key 'data.labels' has {', '.join(labels) or 'none'}"
            )


class ESMM(TaskModel):
    """A tower for each label gives its probability given the label before; the product up to a label is its score."""

    Config = ESMMConfig

    def __init__(self, config: ESMMConfig, inputs: DenseInputs) -> None:
        super().__init__(config, inputs)
        self.towers = self.make_towers(self.width)

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        """Return the logits of the products, [rows, labels]."""
        x = self.read(vectors, floats)
        logits = [tower(x) for tower in self.towers]
        for i in range(1, len(logits)):
            logits[i] = joint_logit(logits[i - 1], logits[i])
        return torch.cat(logits, dim=1)

    def predictions(self, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Return also `score_B_after_A`, the probability of each label B given A, the label before it."""
        assert isinstance(outputs, torch.Tensor)
        logarithms = zip(self.labels, F.logsigmoid(outputs.float()).unbind(1), strict=True)
        after = {
            f"score_{name}_after_{before}": (own - of_before).exp()
            for (before, of_before), (name, own) in pairwise(logarithms)
        }
        return super().predictions(outputs) | after


def joint_logit(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the logit of the product of the probabilities of two logits, finite and exact however large they are.

    If p = 1 / ((1 + e^-a) (1 + e^-b)), then 1 / p - 1 = e^-a + e^-b + e^-(a + b).
    """
    return -torch.stack([-first, -second, -(first + second)]).logsumexp(0)
