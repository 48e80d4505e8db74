"""Distillation within `recsys compress`: a smaller student of a finished run."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from recsys.config import Config, DistillConfig, IdMappingType, as_value, config_text, load_config
from recsys.config.choices import UNPOOLED, RowCode
from recsys.config.compression_checks import takes_code
from recsys.config.experts import deciding_tables
from recsys.config.initial import InitConfig
from recsys.config.model import find_model
from recsys.errors import UserError
from recsys.runtime.command import run_command
from recsys.runtime.files import replace_file
from recsys.runtime.logs import logger
from recsys.serving.compressed_run import narrow_tables
from recsys.training.taught import scored_path

_PRUNED = "rows that prune keeps"  # instead of the file of kept rows, which does not exist yet


def check_student(teacher: Path, changes: Sequence[str], steps: Sequence[str]) -> None:
    """Refuse changes that make no valid config of a student, whatever earlier steps accept, before anything is written.

    Args:
        teacher: checkpoint of the run. changes: `key=value` over its config. steps: of the compression, in their order.

    Raises:
        UserError: a mistake in the changes.
    """
    trained = load_config(teacher / "config.yaml")
    last = max(place for place, step in enumerate(steps) if step == "distill")
    for accepted, keys in [("", []), *_acceptable(trained, steps[:last])]:
        try:
            student = load_config(teacher / "config.yaml", [*keys, *changes])
            if student.model.needs().labels:
                scored_path(student)
                find_model(student.model.name).check_teacher(student.train.distill or DistillConfig())
            _check_rows(trained, student)
        except UserError as error:
            raise UserError(f"--student{accepted}: {error}") from error


def _acceptable(trained: Config, steps: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the changes that steps may accept, in words, and as `key=value` over the config."""
    if "quantize" in steps:
        for code in RowCode:
            tables = [name for name, table in trained.tables.items() if takes_code(table, code)]
            plans = [f"{n}.sharding_type=auto" for n in tables if trained.tables[n].sharding_type not in UNPOOLED]
            plans += [f"{n}.l2_all_rows=0" for n in tables if trained.tables[n].l2_all_rows]
            keys = [*plans, *(f"{name}.quantize={code.name}" for name in tables)]
            yield f", where quantize accepts {code.name} before", [f"tables.{key}" for key in keys]
    if "prune" in steps:
        by_number = [name for name, table in trained.tables.items() if table.mapping is not IdMappingType.vocabulary]
        pruned = [name for name in by_number if name not in deciding_tables(trained)]
        yield ", where prune takes rows before", [f"tables.{name}.kept_rows={_PRUNED}" for name in pruned]


def _check_rows(trained: Config, student: Config) -> None:
    """Refuse another num_embeddings for a table that may have been pruned: its kept rows are known by number."""
    for name, table in student.tables.items():
        rows = trained.tables[name].num_embeddings if name in trained.tables else None
        if table.kept_rows == _PRUNED and table.num_embeddings != rows:
            raise UserError(
                f"config key 'tables.{name}.num_embeddings' is {table.num_embeddings}, but the kept rows were chosen "
                f"out of {rows}; leave it, or start with all ids by tables.{name}.kept_rows=null"
            )


def train_student(teacher: Path, start: Path, folder: Path, changes: Sequence[str]) -> tuple[Path, str]:
    """Train a student: the run in `start` with some changes, distilled from a teacher's scores if it learns labels.

    It starts from the weights of `start` if `changes` leave tables, features and model as they are. Tables may also
    have a smaller embedding_dim, with the old one as projected_dim; they start from low-rank factors.

    Args:
        teacher: checkpoint of the run that scores. start: a run directory.
        folder: gets the scores, a folder of Parquet files, and the student's run directory.
        changes: `key=value` over the config of `start`.

    Returns:
        The student's run directory, and words on what it started from.

    Raises:
        UserError: a mistake in the changes, or scoring or training failed.
    """
    now = load_config(start / "config.yaml")
    student = load_config(start / "config.yaml", changes)
    began, narrow, settings = "from the beginning", _narrowed(now, student), list[str]()
    if student.train.init_from != now.train.init_from:
        began = f"from {student.train.init_from}"
    elif narrow is not None:
        began = "from low-rank factors" if narrow else "from the weights so far"
        settings += ["train.init.optimizers=none"] if narrow else []
        settings += [f"train.init_from={as_value(start)}"]
        _start_anew(start, student, narrow)
    if student.model.needs().labels:
        scores = folder / "scores"
        settings += [f"train.distill.teacher={as_value(teacher)}", f"train.distill.scores={as_value(scores)}"]
    run = folder / "student"
    # Followers of the publications of the run must get its own model, not the student.
    words = ["train", str(start / "config.yaml"), "run.resume=false", "train.publish.dir=null"]
    words += [*settings, *changes, f"run.dir={as_value(run)}"]
    logger.info("recsys %s", shlex.join(words))
    if (problem := run_command(*words)) is not None:
        raise problem.within("--steps: distill: recsys train failed")
    return run, began


def _start_anew(start: Path, student: Config, narrow: Mapping[str, int]) -> None:
    """Make `start` a run to initialise a student from, with low-rank factors of the tables in `narrow`.

    Its config gets the default train.init; otherwise files of vectors that the run started from would replace the
    weights.
    """
    student = replace(student, train=replace(student.train, init=InitConfig()))
    replace_file(start / "config.yaml", config_text(student))
    if narrow:
        narrow_tables(start, student, narrow)


def _narrowed(now: Config, student: Config) -> dict[str, int] | None:
    """Return the embedding_dim of the tables that become low-rank factors; None if other shapes differ too."""
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
