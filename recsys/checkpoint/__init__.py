"""Checkpoints: written aside, checked, then named; loaded on any number of ranks and any plan."""

from recsys.checkpoint.load import Loaded, load_tensors
from recsys.checkpoint.parquet import TableRows, export_table, import_table
from recsys.checkpoint.save import Checkpoints
from recsys.checkpoint.source import FACTS, FOOTERS, Source, check_facts, facts_of, find_source, footers_of
from recsys.checkpoint.state import Marker, TrainState, find_checkpoint, verify_checkpoint
from recsys.checkpoint.tensor_files import pick_rows
from recsys.checkpoint.tensors import Tensors
