"""Scores of a teacher on data.train, written before the run that learns from them begins."""

import shlex
import time
from dataclasses import replace
from pathlib import Path

from recsys.config import Config
from recsys.config.model import MODELS, find_model
from recsys.data.filters import parse_filter
from recsys.data.wanted import needed_columns, row_filter
from recsys.errors import UserError
from recsys.report.record import Record
from recsys.runtime.arguments import as_names
from recsys.runtime.command import run_command
from recsys.runtime.live import Task
from recsys.runtime.run_lock import OUTPUT_TAKEN, is_locked
from recsys.runtime.world import World

_KEY = "config key 'train.distill.teacher'"
_POLL_S = 1.0


def with_scores(config: Config, world: World) -> Config:
    """Return a config whose data.train has the scores of `train.distill.teacher`, if it names one; collective.

    Rank 0 makes them with `recsys predict`. Existing scores of the same rows and columns are used; if another run is
    writing them, this one waits.

    Raises:
        UserError: data.train is a list, the teacher cannot score it, or the model has no place for its scores.
    """
    distill = config.train.distill
    if distill is None or distill.teacher is None:
        return config
    find_model(config.model.name).check_teacher(distill)  # scoring may take hours
    teacher, scores = distill.teacher, distill.scores or str(Path(distill.teacher) / "scores")
    world.from_rank_zero(lambda: _score(config, teacher, scores))
    train = replace(config.train, distill=replace(distill, teacher=None, scores=None))
    return replace(config, data=replace(config.data, train=scores), train=train)


def _score(config: Config, teacher: str, scores: str) -> None:
    data = scored_path(config)
    taught, filter = set(config.taught_columns().values()), row_filter(config, "train")
    read = [*needed_columns(config, "train"), *(sorted(parse_filter(filter).columns()) if filter else ())]
    columns = [column for column in dict.fromkeys(read) if column not in taught]
    words = ["predict", teacher, data, scores, "--keep", as_names(columns)]
    model = Record(Path(teacher)).config.get("model.name") or config.model.name
    if model == config.model.name:
        words.append("--trust-code")  # this run imports the same class already
    elif model not in MODELS:
        command = shlex.join(["recsys", *words, "--trust-code"])
        raise UserError(
            f"{_KEY}: the run was trained with the class '{model}', whose code would be executed; if you trust it, run "
            f"`{command}` and train with data.train={scores} train.distill.teacher=null"
        )
    while True:
        with Task(f"{teacher} scores {data}, to {scores}"):
            problem = run_command(*words, shown=False)
        if problem is None:
            return
        if not problem.args[0].startswith(OUTPUT_TAKEN.format("OUT", Path(scores))):
            where = f"the folder of the scores is '{scores}'; config key 'train.distill.scores' names another"
            raise UserError(*problem.within(f"{_KEY}: recsys predict failed").args, where)
        with Task(f"waiting for another run, such as a trial of the same sweep, which writes to {scores}"):
            while is_locked(Path(scores)):
                time.sleep(_POLL_S)


def scored_path(config: Config) -> str:
    """Return the path of data.train, which a teacher is to score.

    Raises:
        UserError: it is a list.
    """
    if not isinstance(config.data.train, str):
        raise UserError(f"{_KEY}: data.train must be one path to be scored, found a list; name a folder or a glob")
    return config.data.train
