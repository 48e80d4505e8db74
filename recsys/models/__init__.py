"""Models, one a file: the dense part over looked-up vectors, with its config, its loss and its metrics."""

from recsys.models.attention import AttendedLists, AttentionConfig
from recsys.models.base import DenseInputs, Model, Vectors, mlp
from recsys.models.dropout import RowDropout
