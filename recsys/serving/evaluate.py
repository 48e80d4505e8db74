"""Evaluation of a finished run on other data, without a change to the run."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys.data.inputs import Given, Inputs
from recsys.data.wanted import row_filter
from recsys.errors import UserError
from recsys.models.metrics import Evaluator
from recsys.runtime.files import replace_file, unused_folder
from recsys.runtime.logs import git_commit, logger, quiet_libraries, show_metrics, start_logging, to_json
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import open_world
from recsys.serving.finished import Finished, OpenRun
from recsys.serving.predict import KeptRows
from recsys.training.evaluation import evaluate_dataset, evaluators_of, outputs_of

_EVALUATED = ("valid", "test")
_MOST_SLICES = 1000


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


def evaluate(run: Finished, roles: Sequence[str], by: str | None = None) -> int:
    """Evaluate a run's model on some datasets; return the exit status, 0.

    Args:
        by: a column; the metrics of the rows of each of its values are told too.

    The metrics, with where they are from, are the last line of the output and evaluations/TIME/result.json of run.dir.
    data.train is not read: what is known of it is in the run.

    Raises:
        UserError: data that do not fit the model, or a checkpoint that is corrupt.
    """
    quiet_libraries()
    config, start = run.config, time.monotonic()
    with open_world(config.run.device, config.run.num_threads) as world:
        opened = OpenRun(run if by is None else run.in_order(world.world_size), world, [*roles, "items"])
        folder = world.from_rank_zero(lambda: _new_folder(Path(config.run.dir or run.run_dir) / "evaluations"))
        start_logging(folder / "logs", world.rank)
        opened.introduce()
        metrics, slices = {}, {}
        for role in roles:
            metrics[role] = evaluate_dataset(opened.inputs, opened.model, role)
            logger.info("%s: %s", role, show_metrics(metrics[role]))
            slices[role] = {} if by is None else _by_value(opened, role, by)
            for value, found in slices[role].items():
                logger.info("%s, %s %s: %s", role, by, value, show_metrics(found))
        result = {
            "run": str(run.run_dir),
            "checkpoint": run.checkpoint.name,
            "metrics": metrics,
            "by": {} if by is None else {by: slices},
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


def _by_value(opened: OpenRun, role: str, column: str) -> dict[str, dict[str, float]]:
    """Return the metrics of a dataset by the values of a column, as texts; collective."""
    config, corpus = opened.inputs.config, opened.inputs.corpus
    given = Given(role, getattr(config.data, role), (column,), row_filter(config, role), asks="--by")
    inputs = opened.open([] if corpus is None else ["items"], given)
    opened.model.eval()
    with torch.no_grad():
        make, loader = evaluators_of(inputs, opened.model), inputs.loader(role)
        kept, evaluators = KeptRows(loader, [column]), dict[str, Evaluator]()
        for output in outputs_of(inputs, opened.model, loader):
            batch = output.batch
            found = kept.take(batch.num_rows).column(0).to_pylist()
            texts = np.array(["null" if value is None else str(value) for value in found], object)
            for value in set(texts):
                if value not in evaluators:
                    if len(evaluators) == _MOST_SLICES:
                        raise UserError(
                            f"--by: column '{column}' has more than {_MOST_SLICES} values; take a coarser one"
                        )
                    evaluators[value] = make()
                is_there = np.zeros(len(batch.weights), np.float32)
                is_there[: len(texts)] = texts == value
                weights = batch.weights * torch.from_numpy(is_there).to(batch.weights.device)
                evaluators[value].update(output.outputs, replace(batch, weights=weights))
    values = sorted({value for own in inputs.world.gather(list(evaluators)) for value in own})
    return {value: evaluators.get(value, make()).compute(inputs.world) for value in values}


def _new_folder(parent: Path) -> Path:
    try:
        return unused_folder(parent / time.strftime("%Y%m%d-%H%M%S"))
    except OSError as error:
        raise UserError(f"cannot write to '{parent}' ({error.strerror}); name another folder by run.dir") from error


def _described(inputs: Inputs, role: str) -> dict[str, Any]:
    dataset = inputs.datasets[role]
    paths = getattr(inputs.config.data, role)
    return {"paths": paths, "rows": dataset.num_rows, "files": dataset.num_files, "filter": dataset.filter}
