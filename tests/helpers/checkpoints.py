"""Reads what a run has saved."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def load_tables(checkpoint: Path, prefix: str = "tables/") -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint whose names begin with a prefix, whole and without it."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if name.startswith(prefix) and hasattr(entry, "size")
    }
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    return {name.removeprefix(prefix): value for name, value in found.items()}
