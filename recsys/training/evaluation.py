"""Evaluation of a model on datasets, through the same sharded tables."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys.data.inputs import Inputs
from recsys.data.loader import Loader
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.models.items import ItemVectors
from recsys.models.label_metrics import LabelEvaluator
from recsys.models.metrics import Evaluator, RetrievalEvaluator
from recsys.runtime.environment import GiveBack
from recsys.runtime.live import Task
from recsys.runtime.world import World
from recsys.step.output import StepOutput
from recsys.step.pipeline import Pipeline, build_pipeline


class EvaluationStopped(Exception):
    """A signal ended an evaluation before its last batch."""


def evaluate_dataset(
    inputs: Inputs,
    model: DistributedModelParallel,
    role: str,
    stop_requested: Callable[[], bool] = lambda: False,
    pipeline: Pipeline | None = None,
) -> dict[str, float]:
    """Return the metrics of a dataset over all ranks; collective, arguments and errors as of `evaluator_of`."""
    return metrics_of(evaluator_of(inputs, model, role, stop_requested, pipeline), inputs.world)


def metrics_of(evaluator: Evaluator, world: World, needed: str | None = None) -> dict[str, float]:
    """Return the metrics of an evaluator over all ranks; collective.

    Args:
        needed: a metric that there must be.

    Raises:
        UserError: a value is no number, or `needed` is missing, as of an evaluator of the user's own.
    """
    metrics = {}
    for name, value in evaluator.compute(world).items():
        try:
            metrics[name] = float(value)  # also of NumPy's and torch's, which JSON does not take
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"config key 'model.name': the evaluator's compute gave {name}={value!r}; give a number for each metric"
            ) from error
    check_metric(needed, metrics)
    return metrics


def check_metric(needed: str | None, metrics: Collection[str]) -> None:
    """Raise a UserError if the model names a metric in `metric_names` that its evaluator does not give."""
    if needed is not None and needed not in metrics:
        raise UserError(
            f"config key 'model.name': metric_names of the model's Config names {needed}, but its evaluator's compute "
            f"gave {', '.join(metrics) or 'none'}; both must give the same names"
        )


def watched(metric: str, metrics: Mapping[str, float]) -> float:
    """Return the metric of data.valid that early stopping compares.

    Raises:
        UserError: it is none of those, or not a number.
    """
    check_metric(metric, metrics)
    if math.isnan(metrics[metric]):
        raise UserError(
            f"config key 'train.early_stop.metric': {metric} is not a number on data.valid, which may hold one class "
            f"only, or numbers so large that scores overflow; give data.valid other rows, or watch another metric, in "
            f"a new run that starts from the saved step by train.init_from"
        )
    return metrics[metric]


def evaluator_of(
    inputs: Inputs,
    model: DistributedModelParallel,
    role: str,
    stop_requested: Callable[[], bool] = lambda: False,
    pipeline: Pipeline | None = None,
    by_row: bool = False,
) -> Evaluator:
    """Return an evaluator that has been given the outputs for a dataset; collective.

    Args:
        model: with its own forward; a training pipeline that has replaced it must be detached before.
        role: of the dataset in `inputs.datasets`.
        stop_requested: called before every batch.
        pipeline: of the model, detached from it; default: a new one.
        by_row: make `influences` available, if the evaluator is one of this package.

    Raises:
        EvaluationStopped: on every rank, once `stop_requested` is true on any.
    """
    model.eval()
    try:
        with torch.no_grad():
            is_retrieval = inputs.config.model.needs().item_id is not None
            items = item_vectors(inputs, model, stop_requested, pipeline) if is_retrieval else None
            evaluator = model.module.dense.model.evaluator(items)
            loader, is_first = inputs.loader(role), inputs.world.rank == 0
            with Task(f"evaluating data.{role}", loader.steps_left(Position(), 1), "batches", is_first) as task:
                keeps = by_row and isinstance(evaluator, (LabelEvaluator, RetrievalEvaluator))
                for output in outputs_of(inputs, model, loader, stop_requested, pipeline):
                    units = (np.zeros(len(output.batch.weights), np.uint64),) if keeps else ()
                    evaluator.update(output.outputs, output.batch, *units)
                    task.done += 1
                    del output  # frees the memory of its batch before another is made
            return evaluator
    finally:
        model.train()


def item_vectors(
    inputs: Inputs,
    model: DistributedModelParallel,
    stop_requested: Callable[[], bool] = lambda: False,
    pipeline: Pipeline | None = None,
) -> ItemVectors:
    """Return the vectors of all items; each rank holds those of its rows; collective."""
    assert inputs.corpus is not None
    loader, count = inputs.loader("items"), 0
    vectors, positions = torch.zeros(0, inputs.config.model.needs().vector_dim), torch.zeros(0, dtype=torch.int64)
    for output in outputs_of(inputs, model, loader, stop_requested, pipeline):
        if not count:  # room for all rows: pages that are never written take no memory
            most = loader.steps_left(Position(), 1) * len(output.outputs[1])
            vectors, positions = vectors.new_empty(most, vectors.shape[1]), positions.new_empty(most)
        listed = output.batch.lists["position"]  # type: ignore[index]
        rows = slice(count, count + len(listed.values()))
        # Rows that fill up the last batch have no position.
        vectors[rows] = output.outputs[1][listed.lengths() > 0].float().cpu()
        positions[rows] = listed.values().cpu()
        count = rows.stop
        del output, listed
    return ItemVectors(vectors[:count], positions[:count], len(inputs.corpus), inputs.world)


def outputs_of(
    inputs: Inputs,
    model: DistributedModelParallel,
    loader: Loader,
    stop_requested: Callable[[], bool] = lambda: False,
    pipeline: Pipeline | None = None,
) -> Iterator[StepOutput]:
    """Yield the outputs of a model in eval mode for the batches of a loader; collective.

    Raises:
        EvaluationStopped: as `evaluator_of`.
    """
    world = inputs.world
    if pipeline is None:  # it requires an optimizer, which eval mode does not use
        pipeline = build_pipeline(model, torch.optim.SGD([torch.zeros(1)]), world.device, inputs.config.debug)
    give_back = GiveBack()
    with closing(loader.batches()) as batches:
        for _ in range(loader.steps_left(Position(), 1)):
            # Asked at each batch: an evaluation may take longer than the time between a signal and the kill after it.
            if world.sum(torch.tensor(float(stop_requested()))) > 0:
                raise EvaluationStopped
            yield pipeline.progress(batches)
            give_back()
    pipeline.detach()
