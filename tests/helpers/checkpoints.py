"""Reads tensors from checkpoints."""

from pathlib import Path

import torch

from recsys.checkpoint import Marker
from recsys.checkpoint.tensor_files import LocalTensor, read_tensors


def load_tables(checkpoint: Path, prefix: str = "tables/") -> dict[str, torch.Tensor]:
    """Return tensors of a checkpoint, or of a run's last one, as whole tensors: those whose names begin with `prefix`,
    by the rest of the name."""
    checkpoint = max((checkpoint / "checkpoints").glob("step-*"), default=checkpoint)
    entries = {name: entry for name, entry in Marker.read(checkpoint).tensors.items() if name.startswith(prefix)}
    found = {name: entry.empty() for name, entry in entries.items()}
    read_tensors(checkpoint, entries, {name: LocalTensor.of(tensor) for name, tensor in found.items()})
    return {name.removeprefix(prefix): value for name, value in found.items()}
