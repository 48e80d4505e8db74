"""Sections of a config for models that are served: sparsity, distillation and publishing."""

from dataclasses import dataclass

from recsys.config.bounds import LARGE, bounded
from recsys.config.choices import TableEncoding


@dataclass
class SparsityConfig:
    """Section `tables.X.sparsity`: strengths of penalties by which rows become exactly 0, so that they can be pruned.

    Each time that a batch touches a row, after its optimizer's step, lengths shrink by strength times learning rate,
    and shorter ones become 0: the proximal step (Parikh & Boyd 2014, doi:10.1561/2400000003).
    """

    l1: float = bounded(0.0, 0, LARGE)  # of each element
    group_lasso: float = bounded(0.0, 0, LARGE)  # of the row as a whole


@dataclass
class DistillConfig:
    """Section `train.distill`: a teacher's scores, as `recsys predict` writes them, are learned beside the labels.

    Of a binary label, whose score is a probability: the cross-entropy of both logits divided by the temperature, times
    its square (Hinton et al. 2015, arXiv:1503.02531). Of a number: the squared error.
    """

    column: str = "score"  # of data.train; of several labels, COLUMN_LABEL
    teacher: str | None = None  # run or checkpoint that scores data.train before training begins; null: it is scored
    scores: str | None = None  # folder for data.train with its scores; default: TEACHER/scores
    weight: float = bounded(0.5, 0, 1)  # of the teacher in each label's loss; the label itself has the rest
    temperature: float = bounded(1.0, 0.01, 1000)  # above 1 it tells more of what the teacher is unsure of


@dataclass
class PublishConfig:
    """Publishing while training goes on: a folder that scorers follow (docs/publishing.md)."""

    dir: str | None = None  # null: nothing is published
    every_steps: int | None = bounded(None, 1)  # publish after every so many steps
    every_seconds: float | None = bounded(None, 0.1, 1e8)  # in place of steps
    tables: TableEncoding = TableEncoding.fp32
