"""Checkpoints: written aside, checked, then named; loaded on any number of ranks and any plan."""

from recsys.checkpoint.load import Loaded, load_tensors
from recsys.checkpoint.parquet import TableRows, export_table, import_table
from recsys.checkpoint.save import Checkpoints
from recsys.checkpoint.source import FACTS, Source, check_facts, facts_of, find_source
from recsys.checkpoint.state import Marker, TrainState, check_whole, find_checkpoint
from recsys.checkpoint.tensors import Tensors

__all__ = [
    "FACTS",
    "Checkpoints",
    "Loaded",
    "Marker",
    "Source",
    "TableRows",
    "Tensors",
    "TrainState",
    "check_facts",
    "check_whole",
    "export_table",
    "facts_of",
    "find_checkpoint",
    "find_source",
    "import_table",
    "load_tensors",
]
