"""Distillation within `recsys compress`: a smaller student of a finished run."""

from collections.abc import Sequence
from pathlib import Path

from recsys.config import Config, load_config
from recsys.errors import UserError
from recsys.runtime.command import run_command
from recsys.runtime.logs import logger
from recsys.serving.compressed_run import narrow_tables
from recsys.training.taught import scored_path


def check_student(teacher: Path, changes: Sequence[str]) -> None:
    """Refuse changes that make no config of a student, before anything is written.

    Args:
        teacher: checkpoint of the run. changes: `key=value` over its config.

    Raises:
        UserError: a mistake in the changes.
    """
    try:
        student = load_config(teacher / "config.yaml", changes)
        if student.model.needs().labels:
            scored_path(student)
    except UserError as error:
        raise UserError(f"--student: {error}") from error


def train_student(teacher: Path, start: Path, folder: Path, changes: Sequence[str]) -> tuple[Path, str]:
    """Train the run that `start` holds once more, beside a teacher's scores where the model learns labels.

    It begins with the weights of `start` where `changes` leave tables, features and model as they are, but for a
    smaller embedding_dim and a projected_dim of what it was, where it begins with low-rank factors of a table.

    Args:
        teacher: checkpoint of the run that scores. start: a run directory.
        folder: gets the scores, a folder of Parquet files, and the student's run directory.
        changes: `key=value` over the config of `start`.

    Returns:
        The student's run directory, and what it began with.

    Raises:
        UserError: a mistake in the changes, or a scoring or training that has failed.
    """
    now = load_config(start / "config.yaml")
    student = load_config(start / "config.yaml", changes)
    words = list(changes)
    if student.model.needs().labels:
        words = [f"train.distill.teacher={teacher}", f"train.distill.scores={folder}/scores", *words]
    began, narrow = "from the beginning", _narrowed(now, student)
    if student.train.init_from != now.train.init_from:
        began = f"from {student.train.init_from}"
    elif narrow is not None:
        began = "from low-rank factors" if narrow else "from the weights so far"
        words = [f"train.init_from={start}", *words]
        if narrow:
            narrow_tables(start, student, narrow)
            words.insert(0, "train.init.optimizers=none")
    run = folder / "student"
    # What followers of the run's publications read is the run's own model.
    words = ["run.resume=false", "train.publish.dir=null", *words, f"run.dir={run}"]
    words = ["train", str(start / "config.yaml"), *words]
    logger.info("recsys %s", " ".join(words))
    if (problem := run_command(*words)) is not None:
        raise UserError(f"--steps: distill: recsys train failed: {problem}")
    return run, began


def _narrowed(now: Config, student: Config) -> dict[str, int] | None:
    """Return the embedding_dim of the tables that the student has as low-rank factors; None: it has other shapes."""
    shapes = [
        (
            {name: (table.model_dim, table.mapping, table.num_embeddings) for name, table in config.tables.items()},
            *(config.features, config.model),
        )
        for config in (now, student)
    ]
    widths = {name: table.embedding_dim for name, table in student.tables.items()}
    if shapes[0] != shapes[1] or any(widths[name] > table.embedding_dim for name, table in now.tables.items()):
        return None
    return {name: widths[name] for name, table in now.tables.items() if widths[name] < table.embedding_dim}
