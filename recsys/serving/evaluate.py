"""Evaluation of a finished run on other data, without a change to the run."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys.config import Config
from recsys.data.inputs import Given, Inputs
from recsys.data.loader import Loader
from recsys.data.permutation import Permutation
from recsys.data.wanted import role_features, row_filter
from recsys.errors import UserError
from recsys.models.metrics import Evaluator, is_higher_better
from recsys.runtime.files import replace_file, unused_folder
from recsys.runtime.logs import git_commit, logger, quiet_libraries, show_metrics, start_logging, to_json
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import open_world
from recsys.serving.finished import Finished, OpenRun
from recsys.serving.predict import KeptRows
from recsys.training.evaluation import outputs_of

_EVALUATED = ("valid", "test")
_MOST_SLICES = 1000
_ByName = dict[str, dict[str, float]]


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


def evaluate(run: Finished, roles: Sequence[str], by: str | None = None, repeats: int = 0) -> int:
    """Evaluate a run's model on some datasets; return the exit status, 0.

    Args:
        by: a column; the metrics of the rows of each of its values are told too.
        repeats: how often the values of each feature are permuted, to tell what the metrics lose by it.

    The metrics, with where they are from, are the last line of the output and evaluations/TIME/result.json of run.dir.
    data.train is not read: what is known of it is in the run.

    Raises:
        UserError: data that do not fit the model, or a checkpoint that is corrupt.
    """
    quiet_libraries()
    config, start = run.config, time.monotonic()
    with open_world(config.run.device, config.run.num_threads) as world:
        if by is not None:
            run = run.in_order(world.world_size)
        opened = OpenRun(run, world, ["items"], *(_given(config, role, by) for role in roles))
        folder = world.from_rank_zero(lambda: _new_folder(Path(config.run.dir or run.run_dir) / "evaluations"))
        start_logging(folder / "logs", world.rank)
        opened.introduce()
        found = {role: _evaluated(opened, role, by, repeats) for role in roles}
        metrics = {role: each[0] for role, each in found.items()}
        result = {
            "run": str(run.run_dir),
            "checkpoint": run.checkpoint.name,
            "metrics": metrics,
            "by": {} if by is None else {by: {role: each[1] for role, each in found.items()}},
            "importance": {role: each[2] for role, each in found.items()} if repeats else {},
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


def _given(config: Config, role: str, by: str | None) -> Given:
    paths, kept = getattr(config.data, role), () if by is None else (by,)
    return Given(role, paths, kept, row_filter(config, role), "--by", f"data.{role}", config.data.max_rows)


def _evaluated(opened: OpenRun, role: str, by: str | None, repeats: int) -> tuple[dict[str, float], _ByName, _ByName]:
    """Return the metrics of a dataset, by the values of a column, and what they lose by feature; collective."""
    metrics, slices = _metrics(opened, opened.inputs.loader(role), by)
    logger.info("%s: %s", role, show_metrics(metrics))
    for value, of_value in slices.items():
        logger.info("%s, %s %s: %s", role, by, value, show_metrics(of_value))
    return metrics, slices, importance(opened, role, metrics, repeats) if repeats else {}


@torch.no_grad()
def _metrics(opened: OpenRun, loader: Loader, by: str | None = None) -> tuple[dict[str, float], _ByName]:
    """Return the metrics of a loader's rows, and those by the values of a column, as texts; collective."""
    inputs = opened.inputs
    make = partial(opened.model.module.dense.model.evaluator, None if inputs.corpus is None else opened.items)
    kept, total, by_value = KeptRows(loader, [by] if by else []), make(), dict[str, Evaluator]()
    for output in outputs_of(inputs, opened.model, loader):
        batch = output.batch
        total.update(output.outputs, batch)
        if by is None:
            continue
        texts = ["null" if value is None else str(value) for value in kept.take(batch.num_rows)[by].to_pylist()]
        for value in set(texts):
            if value not in by_value:
                if len(by_value) == _MOST_SLICES:
                    raise UserError(f"--by: column '{by}' has more than {_MOST_SLICES} values; take a coarser one")
                by_value[value] = make()
            of_value = np.zeros(len(batch.weights), np.float32)
            of_value[: len(texts)] = np.array(texts, object) == value
            weights = batch.weights * torch.from_numpy(of_value).to(batch.weights.device)
            by_value[value].update(output.outputs, replace(batch, weights=weights))
    values = sorted({value for own in inputs.world.gather(list(by_value)) for value in own})
    slices = {value: by_value.get(value, make()).compute(inputs.world) for value in values}
    return total.compute(inputs.world), slices


def importance(opened: OpenRun, role: str, metrics: dict[str, float], repeats: int) -> _ByName:
    """Return by feature what each metric of a dataset loses when its values are permuted, in the mean; collective.

    Below 0 is a gain. Features come in the order of what the first metric loses (Breiman 2001,
    doi:10.1023/A:1010933404324).
    """
    inputs, losses, names = opened.inputs, {}, opened.run.config.model.metric_names(opened.run.config)
    signs = {name: 1 if is_higher_better(name) else -1 for name in names}
    for feature in role_features(inputs.config, role):
        permutations = [Permutation(feature, (inputs.config.seed, repeat)) for repeat in range(repeats)]
        found = [_metrics(opened, inputs.loader(role, None, each))[0] for each in permutations]
        losses[feature] = {
            name: float(np.mean([sign * (metrics[name] - each[name]) for each in found]))
            for name, sign in signs.items()
        }
        logger.info("%s, %s permuted: %s", role, feature, show_metrics(found[0]))
    order = sorted(losses, key=lambda feature: -np.nan_to_num(losses[feature][names[0]], nan=-np.inf))
    title = f"{role} loses by permuting"
    width = max(map(len, (*losses, title)))
    logger.info("%s", "  ".join([f"{title:<{width}}", *(f"{name:>9}" for name in names)]))
    for feature in order:
        figures = [f"{losses[feature][name]:>{max(9, len(name))}.5f}" for name in names]
        logger.info("%s", "  ".join([f"{feature:<{width}}", *figures]))
    return {feature: losses[feature] for feature in order}


def _new_folder(parent: Path) -> Path:
    try:
        return unused_folder(parent / time.strftime("%Y%m%d-%H%M%S"))
    except OSError as error:
        raise UserError(f"cannot write to '{parent}' ({error.strerror}); name another folder by run.dir") from error


def _described(inputs: Inputs, role: str) -> dict[str, Any]:
    dataset = inputs.datasets[role]
    paths = getattr(inputs.config.data, role)
    return {"paths": paths, "rows": dataset.num_rows, "files": dataset.num_files, "filter": dataset.filter}
