"""Checkpoints: written aside, checked, then named; loaded on any number of ranks and any plan."""

from recsys.checkpoint.load import Loaded, load_tensors
from recsys.checkpoint.parquet import TableRows, export_table, import_table
from recsys.checkpoint.save import Checkpoints
from recsys.checkpoint.state import Marker, TrainState, check_whole, find_checkpoint
from recsys.checkpoint.tensors import Tensors

__all__ = [
    "Checkpoints",
    "Loaded",
    "Marker",
    "TableRows",
    "Tensors",
    "TrainState",
    "check_whole",
    "export_table",
    "find_checkpoint",
    "import_table",
    "load_tensors",
]
