"""Evaluation of a model on datasets, through the same sharded tables."""

from collections.abc import Callable, Iterator
from contextlib import closing

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys.data.inputs import Inputs
from recsys.data.order import Position
from recsys.models.metrics import Evaluator
from recsys.step.output import StepOutput
from recsys.step.pipeline import build_pipeline


class EvaluationStopped(Exception):
    """A signal ended an evaluation before its last batch."""


class Evaluation:
    """Evaluates a model on datasets."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self._config, self._world = inputs, inputs.config, inputs.world
        self._stop_requested: Callable[[], bool] = lambda: False

    def run(self, model: DistributedModelParallel, role: str, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Return the metrics of a dataset over all ranks.

        The model must be its own: a training pipeline that rewrote it is detached before.

        Raises:
            EvaluationStopped: on every rank, soon after `stop_requested` says so on any.
        """
        self._stop_requested = stop_requested
        model.eval()
        try:
            with torch.no_grad():
                evaluator = self._evaluator(model)
                for output in self._outputs(model, role):
                    evaluator.update(output.outputs, output.batch)
                return evaluator.compute(self._world)
        finally:
            model.train()

    def _evaluator(self, model: DistributedModelParallel) -> Evaluator:
        is_retrieval = self._config.model.needs().item_id is not None
        return model.module.dense.model.evaluator(self._item_vectors(model) if is_retrieval else None)

    def _item_vectors(self, model: DistributedModelParallel) -> torch.Tensor:
        """Return the vectors of the whole corpus, [items, vector_dim], on every rank."""
        assert self._inputs.corpus is not None
        vectors = torch.zeros(len(self._inputs.corpus), self._config.model.needs().vector_dim)
        for output in self._outputs(model, "items"):
            positions = output.batch.lists["position"]  # type: ignore[index]
            real = positions.lengths() > 0  # the fill of the last batch has none
            vectors[positions.values().cpu()] = output.outputs[1][real].float().cpu()
        return self._world.sum(vectors).to(self._world.device)

    def _outputs(self, model: DistributedModelParallel, role: str) -> Iterator[StepOutput]:
        loader = self._inputs.loader(role)
        # The pipeline asks for an optimizer, and leaves it alone in eval mode.
        optimizer = torch.optim.SGD([torch.zeros(1)])
        pipeline = build_pipeline(model, optimizer, self._world.device, self._config.debug)
        with closing(loader.batches()) as batches:
            for _ in range(loader.steps_left(Position(), 1)):
                self._stop_if_requested()
                yield pipeline.progress(batches)
        pipeline.detach()

    def _stop_if_requested(self) -> None:
        # Evaluation may outlast the time between a signal and the kill that follows it.
        if self._world.sum(torch.tensor(float(self._stop_requested()))) > 0:
            raise EvaluationStopped
