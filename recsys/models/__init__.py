"""Models: the dense part over pooled embeddings, and the task that joins it to a loss."""

from recsys.models.base import Task
from recsys.models.dlrm import DLRM, RankingTask, forget_constants
from recsys.models.two_tower import RetrievalTask, TwoTower

__all__ = ["DLRM", "RankingTask", "RetrievalTask", "Task", "TwoTower", "forget_constants"]
