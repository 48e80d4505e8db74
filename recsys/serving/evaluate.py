"""Evaluation of a finished run on other data, without a change to the run."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recsys.data.inputs import Inputs
from recsys.errors import UserError
from recsys.runtime.files import replace_file, unused_folder
from recsys.runtime.logs import git_commit, logger, quiet_libraries, show_metrics, start_logging, to_json
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import open_world
from recsys.serving.finished import Finished, OpenRun
from recsys.training.evaluation import evaluate_dataset

_EVALUATED = ("valid", "test")


def roles_of(run: Finished) -> list[str]:
    """Return the datasets to evaluate: data.valid and data.test, or those of them that the user names.

    Raises:
        UserError: there are none.
    """
    named = [role for role in _EVALUATED if f"data.{role}" in run.changed] or _EVALUATED
    roles = [role for role in named if getattr(run.config.data, role) is not None]
    if not roles:
        raise UserError("there is nothing to evaluate; set data.valid or data.test")
    return roles


def evaluate(run: Finished, roles: Sequence[str]) -> int:
    """Evaluate a run's model on some datasets; return the exit status, 0.

    The metrics, with where they are from, are the last line of the output and evaluations/TIME/result.json of run.dir.
    data.train is not read: what is known of it is in the run.

    Raises:
        UserError: data that do not fit the model, or a checkpoint that is corrupt.
    """
    quiet_libraries()
    config, start = run.config, time.monotonic()
    with open_world(config.run.device, config.run.num_threads) as world:
        opened = OpenRun(run, world, [*roles, "items"])
        folder = world.from_rank_zero(lambda: _new_folder(Path(config.run.dir or run.run_dir) / "evaluations"))
        start_logging(folder / "logs", world.rank)
        opened.introduce()
        metrics = {}
        for role in roles:
            metrics[role] = evaluate_dataset(opened.inputs, opened.model, role)
            logger.info("%s: %s", role, show_metrics(metrics[role]))
        result = {
            "run": str(run.run_dir),
            "checkpoint": run.checkpoint.name,
            "metrics": metrics,
            "data": {role: _described(opened.inputs, role) for role in opened.inputs.datasets},
            "world_size": world.world_size,
            "device": world.device.type,
            "seconds": round(time.monotonic() - start, 2),
            "versions": installed_versions(),
            "git_commit": git_commit(),
        }
        if world.rank == 0:
            replace_file(folder / "result.json", to_json(result, indent=1) + "\n")
        logger.info("done: %s", folder / "result.json")
        logger.info("%s", to_json({"run": str(run.run_dir), "checkpoint": run.checkpoint.name, "metrics": metrics}))
        del opened  # its collectives end before the process group
    return 0


def _new_folder(parent: Path) -> Path:
    try:
        return unused_folder(parent / time.strftime("%Y%m%d-%H%M%S"))
    except OSError as error:
        raise UserError(f"cannot write to '{parent}' ({error.strerror}); name another folder by run.dir") from error


def _described(inputs: Inputs, role: str) -> dict[str, Any]:
    dataset = inputs.datasets[role]
    paths = getattr(inputs.config.data, role)
    return {"paths": paths, "rows": dataset.num_rows, "files": dataset.num_files, "filter": dataset.filter}
