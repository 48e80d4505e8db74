"""Evaluation of a finished run on other data, which leaves the run unchanged."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recsys.config import Config
from recsys.config.features import with_experts
from recsys.data.dataset import Dataset
from recsys.data.fields import advice
from recsys.data.inputs import Given, Inputs
from recsys.data.label_checks import constant_labels
from recsys.data.loader import Loader
from recsys.data.permutation import Permutation
from recsys.data.wanted import read_features, row_filter
from recsys.errors import UserError, counted
from recsys.ids import hash_column, hash_integers
from recsys.models.bootstrap import Bootstrap
from recsys.models.label_metrics import LabelEvaluator
from recsys.models.metrics import Evaluator, RetrievalEvaluator, is_higher_better
from recsys.runtime.files import cannot_write, replace_file, unused_folder
from recsys.runtime.logs import logger, quiet_libraries, show_metrics, start_logging, to_json
from recsys.runtime.versions import git_commit, installed_versions
from recsys.runtime.watchdog import open_run_world
from recsys.runtime.world import World
from recsys.serving.finished import Finished, OpenRun
from recsys.serving.predict import NUMBER, KeptColumns
from recsys.serving.slices import Slices, in_order, slices_by
from recsys.training.evaluation import metrics_of, outputs_of

_EVALUATED = ("valid", "test")
_MOST_SLICES = 1000
_ByName = dict[str, dict[str, float]]


def roles_of(run: Finished) -> list[str]:
    """Return the datasets to evaluate: data.valid and data.test, or which of these the user names.

    Raises:
        UserError: there are none.
    """
    named = [role for role in _EVALUATED if f"data.{role}" in run.changed] or _EVALUATED
    roles = [role for role in named if getattr(run.config.data, role) is not None]
    if not roles:
        raise UserError("there is nothing to evaluate; set data.valid or data.test")
    return roles


@dataclass(frozen=True)
class Extras:
    """Results to compute besides the metrics of all rows.

    Attributes:
        by: a column; metrics are also computed for the rows, or the targets, of each of its values.
        cold: ascending; slice by how often a value occurs in data.train, by these bounds, not by values.
        group: a column, such as that of users; labels get grouped AUC by it too.
        bootstrap: draws of rows, or groups, for intervals of the metrics.
        importance: permutations of the values of each feature, to measure what the metrics lose.
    """

    by: str | None = None
    cold: tuple[int, ...] = ()
    group: str | None = None
    bootstrap: int = 0
    importance: int = 0

    def __post_init__(self) -> None:
        if self.cold and self.by is None:
            raise UserError("--cold splits the values of a column; name it with --by")

    def columns(self) -> dict[str, str]:
        """Return the columns to read of the rows, each with the option that needs it."""
        return {column: option for column, option in ((self.by, "--by"), (self.group, "--group")) if column}


def evaluate(run: Finished, roles: Sequence[str], extras: Extras = Extras()) -> int:
    """Evaluate a run's model on some datasets; return the exit status, 0.

    The metrics, with run and checkpoint, are the last line of the output and in evaluations/TIME/result.json of
    run.dir. data.train is read only for `Extras.cold`: its facts are in the run.

    Raises:
        UserError: the data do not fit the model, or the checkpoint is corrupt.
    """
    quiet_libraries()
    config, start = run.config, time.monotonic()
    with open_run_world(config.run) as (world, _):
        if extras.by or extras.group or extras.bootstrap:
            run = run.in_order(world.world_size)
        opened = OpenRun(run, world, ["items"], *(_given(config, role, extras) for role in roles))
        folder = world.from_rank_zero(lambda: _new_folder(Path(config.run.dir or run.run_dir) / "evaluations"))
        start_logging(folder / "logs", world.rank)
        opened.introduce()
        slices = None if extras.by is None else slices_by(opened, extras.by, extras.cold)
        datasets = {**opened.inputs.datasets, **({"train": slices.train} if slices and slices.train else {})}
        results = {role: _evaluated(opened, role, extras, slices) for role in roles}
        metrics = {role: of_role.metrics for role, of_role in results.items()}
        result = {
            "run": str(run.run_dir),
            "checkpoint": run.checkpoint.name,
            "metrics": metrics,
            **_extra_results(results, extras),
            "data": {role: _described(config, role, dataset) for role, dataset in datasets.items()},
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


def _extra_results(results: Mapping[str, "_Results"], extras: Extras) -> dict[str, dict[str, Any]]:
    """Return what result.json holds besides metrics, by dataset; empty where it was not asked for."""
    extra: dict[str, dict[str, Any]] = {"intervals": {}, "by": {}, "intervals_by": {}, "importance": {}}
    if extras.bootstrap:
        extra["intervals"] = {role: of_role.intervals for role, of_role in results.items()}
    if extras.by is not None:
        extra["by"] = {extras.by: {role: of_role.slices for role, of_role in results.items()}}
    if extras.by is not None and extras.bootstrap:
        extra["intervals_by"] = {extras.by: {role: of_role.slice_intervals for role, of_role in results.items()}}
    if extras.importance:
        extra["importance"] = {role: of_role.importance for role, of_role in results.items()}
    return extra


def _given(config: Config, role: str, extras: Extras) -> Given:
    paths, columns = getattr(config.data, role), extras.columns()
    asks = " or ".join(columns.values())
    return Given(role, paths, tuple(columns), row_filter(config, role), asks, f"data.{role}", config.data.max_rows)


@dataclass
class _Results:
    """Results of a dataset: metrics and their intervals, both also by slice, and losses by permuted feature."""

    metrics: dict[str, float]
    intervals: dict[str, list[float]]
    slices: _ByName
    slice_intervals: dict[str, dict[str, list[float]]]
    importance: _ByName


def _evaluated(opened: OpenRun, role: str, extras: Extras, slices: Slices | None) -> _Results:
    """Return the results of a dataset; collective."""
    dataset, spec = opened.inputs.datasets[role], opened.inputs.spec(role)
    for sentence in opened.world.from_rank_zero(lambda: constant_labels(dataset, spec)):
        logger.warning("%s", sentence)
    result = _metrics(opened, opened.inputs.loader(role), extras, slices)
    logger.info("%s: %s", role, show_metrics(result.metrics))
    for name, (low, high) in result.intervals.items():
        logger.info("%s, %s: 95 %% between %.4f and %.4f", role, name, low, high)
    for value, of_value in result.slices.items():
        logger.info("%s, %s %s%s: %s", role, extras.by, value, _sizes(of_value), show_metrics(of_value))
        bounds = [f"{name} {low:.4f} and {high:.4f}" for name, (low, high) in result.slice_intervals[value].items()]
        if bounds:
            logger.info("%s, %s %s: 95 %% between %s", role, extras.by, value, ", ".join(bounds))
    if extras.importance:
        result.importance = importance(opened, role, result.metrics, extras.importance)
    return result


def _sizes(metrics: Mapping[str, float]) -> str:
    """Return how many rows or users metrics are of: one number, unless labels are known of different rows."""
    sizes = {name: value for name, value in metrics.items() if name.split(".")[-1] in ("rows", "users")}
    if len({*sizes.values()}) == 1:
        sizes = {name.split(".")[-1]: value for name, value in sizes.items()}
    return "".join(f", {counted(int(value), name.removesuffix('s'))}" for name, value in sizes.items())


@torch.no_grad()
def _metrics(opened: OpenRun, loader: Loader, extras: Extras = Extras(), slices: Slices | None = None) -> _Results:
    """Return the metrics of a loader's rows, their intervals, and those by slice; collective."""
    inputs = opened.inputs
    make = partial(opened.model.module.dense.model.evaluator, None if inputs.corpus is None else opened.items)
    in_units = bool(extras.group or extras.bootstrap)
    columns = dict.fromkeys(column for column in (slices and slices.column, extras.group) if column)
    kept, total, by_slice = KeptColumns(loader, list(columns), numbered=in_units), make(), dict[str, Evaluator]()
    if in_units and not isinstance(total, (LabelEvaluator, RetrievalEvaluator)):
        raise UserError(f"--{'group' if extras.group else 'bootstrap'}: the model has its own metrics; leave it out")
    if extras.group and not extras.bootstrap and isinstance(total, RetrievalEvaluator):
        raise UserError("--group: retrieval metrics have no AUC by group; add --bootstrap N, or leave it out")
    for output in outputs_of(inputs, opened.model, loader):
        batch, rows = output.batch, kept.take(output.batch.num_rows)
        of_units = (_units(rows, extras.group, len(batch.weights)),) if in_units else ()
        total.update(output.outputs, batch, *of_units)
        for name, part in slices.split(batch, rows) if slices else ():
            if name not in by_slice:
                if len(by_slice) == _MOST_SLICES:
                    raise UserError(
                        f"--by: column '{extras.by}' has more than {_MOST_SLICES} values; use a coarser one, or --cold"
                    )
                by_slice[name] = make()
            by_slice[name].update(output.outputs, part, *of_units)
    names = in_order({name for own in inputs.world.gather(list(by_slice)) for name in own})
    slices_in_order = {name: by_slice.get(name, make()) for name in names}
    by_name = {name: _computed(evaluator, inputs.world, extras) for name, evaluator in slices_in_order.items()}
    intervals = partial(_intervals, inputs, extras)
    intervals_by_name = {name: intervals(evaluator) for name, evaluator in slices_in_order.items()}
    return _Results(_computed(total, inputs.world, extras), intervals(total), by_name, intervals_by_name, {})


def _intervals(inputs: Inputs, extras: Extras, evaluator: Evaluator) -> dict[str, list[float]]:
    if not (extras.bootstrap and isinstance(evaluator, (LabelEvaluator, RetrievalEvaluator))):
        return {}
    return evaluator.intervals(inputs.world, Bootstrap(extras.bootstrap, inputs.config.seed), extras.group is not None)


def _computed(evaluator: Evaluator, world: World, extras: Extras) -> dict[str, float]:
    metrics = metrics_of(evaluator, world)
    if extras.group is not None and isinstance(evaluator, LabelEvaluator):
        metrics |= evaluator.grouped(world)
    return metrics


def _units(rows: pa.Table, group: str | None, num_rows: int) -> np.ndarray:
    """Return the unit of each row, uint64 [num_rows]: its group, or a unit of its own if the group is null or None.

    Behind the rows there is fill, with unit 0.
    """
    numbers = rows[NUMBER].to_numpy()
    units = np.zeros(num_rows, np.uint64)
    units[: len(numbers)] = hash_integers(numbers, 1)
    if group is not None:
        column = rows[group].combine_chunks()
        if pa.types.is_nested(column.type):
            needed = f"a group needs one id a row{advice(group, column.type)}"
            raise UserError(f"--group: column '{group}' is {column.type}; {needed}")
        not_null = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        try:
            units[not_null] = hash_column(column.drop_null())
        except UserError as error:
            raise UserError(f"--group: column '{group}': {error}") from error
    return units


def importance(opened: OpenRun, role: str, metrics: dict[str, float], repeats: int) -> _ByName:
    """Return, by feature, the mean loss of each metric of a dataset when its values are permuted; collective.

    A loss below 0 is a gain. Features are sorted by the loss of the first metric, the largest first (Breiman 2001,
    doi:10.1023/A:1010933404324).
    """
    inputs, losses, names = opened.inputs, {}, opened.run.config.model.metric_names(opened.run.config)
    signs = {name: 1 if is_higher_better(name) else -1 for name in names}
    for feature in read_features(inputs.config, role):
        if inputs.config.features[feature].expert_of is not None:  # permuted with the first expert
            continue
        features = with_experts(inputs.config, [feature])
        permutations = [Permutation(features, (inputs.config.seed, repeat)) for repeat in range(repeats)]
        permuted = [_metrics(opened, inputs.loader(role, None, permutation)).metrics for permutation in permutations]
        losses[feature] = {
            name: float(np.mean([sign * (metrics[name] - losing[name]) for losing in permuted]))
            for name, sign in signs.items()
        }
        logger.info("%s, %s permuted: %s", role, feature, show_metrics(permuted[0]))
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
        raise cannot_write("run.dir", parent, error) from error


def _described(config: Config, role: str, dataset: Dataset) -> dict[str, Any]:
    paths = getattr(config.data, role)
    return {"paths": paths, "rows": dataset.num_rows, "files": dataset.num_files, "filter": dataset.filter}
