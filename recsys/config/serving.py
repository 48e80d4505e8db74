"""Sections of a config for models that are served: sparsity, distillation and publishing."""

from dataclasses import dataclass

from recsys.config.bounds import LARGE, bounded
from recsys.config.choices import TableEncoding


@dataclass
class SparsityConfig:
    """Section `tables.X.sparsity`: strengths of penalties that make rows exactly 0, so that they can be pruned.

    Whenever a batch touches a row, lengths shrink by strength times learning rate after the step of the optimizer, and
    shorter ones become 0: the proximal step (Parikh & Boyd 2014, doi:10.1561/2400000003).
    """

    l1: float = bounded(0.0, 0, LARGE)  # shrinks the size of each element
    group_lasso: float = bounded(0.0, 0, LARGE)  # shrinks the length of the whole row


@dataclass
class DistillConfig:
    """Section `train.distill`: learn the scores of a teacher, as `recsys predict` writes them, along with the labels.

    For a binary label, whose score is a probability, the loss is the cross-entropy of both logits divided by the
    temperature, times its square (Hinton et al. 2015, arXiv:1503.02531). For a number, it is the squared error.
    """

    column: str = "score"  # column of data.train with the scores; for several labels, COLUMN_LABEL
    teacher: str | None = None  # run or checkpoint to score data.train with before training; `null`: it has scores
    scores: str | None = None  # folder for data.train with its scores; default: TEACHER/scores
    weight: float = bounded(0.5, 0, 1)  # share of the teacher in the loss of each label; the label has the rest
    temperature: float = bounded(1.0, 0.01, 1000)  # above 1, more is learned from what the teacher is unsure of


@dataclass
class PublishConfig:
    """Publishing during training: a folder that scorers follow (docs/publishing.md)."""

    dir: str | None = None  # folder to publish to; `null`: nothing is published
    every_steps: int | None = bounded(None, 1)  # publish after every so many steps
    every_seconds: float | None = bounded(None, 0.1, 1e8)  # instead of every_steps: publish after so many seconds
    tables: TableEncoding = TableEncoding.fp32
