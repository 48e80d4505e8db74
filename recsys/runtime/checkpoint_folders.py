"""The folders of checkpoints in a run directory, found without importing the libraries that read checkpoints."""

from pathlib import Path

from recsys.errors import UserError

MARKER = "checkpoint.json"  # written last; without it a folder is not a checkpoint


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoint folders, valid or not, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "" and path.is_dir())


def checkpoints_of(path: str | Path, key: str) -> list[Path]:
    """Return the checkpoints at a path, oldest first: the path itself, or all checkpoints of a run directory.

    Args:
        key: what messages call the path.

    Raises:
        UserError: there is none.
    """
    path = Path(path)
    if (path / MARKER).is_file():
        return [path]
    checkpoints = list_checkpoints(path / "checkpoints")
    if not checkpoints:
        what = "holds no checkpoint" if path.exists() else "does not exist"
        raise UserError(f"{key}: '{path}' {what}; name a run directory or one of its checkpoints/step-*")
    return checkpoints
