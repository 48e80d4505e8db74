"""Models: the dense part over pooled embeddings, and the task that joins it to a loss."""

from recsys.models.ranker import DLRM, RankingTask, forget_constants
from recsys.models.step import DenseHalf, TrainStep
from recsys.models.task import Task, checkpoint_mlps
from recsys.models.two_tower import RetrievalTask, TwoTower

__all__ = [
    "DLRM",
    "DenseHalf",
    "RankingTask",
    "RetrievalTask",
    "Task",
    "TrainStep",
    "TwoTower",
    "checkpoint_mlps",
    "forget_constants",
]
