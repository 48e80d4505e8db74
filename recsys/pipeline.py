"""torchrec's training pipeline with the step's two halves, and the same without overlap for debugging."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.profiler import record_function
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys.data.batch import Batch


class Pipeline(Protocol):
    """Runs one step a call; in eval mode of the model, forward only."""

    def progress(self, dataloader_iter: Iterator[Batch]) -> Any:
        """Return the step's output.

        Raises:
            StopIteration: the batches are used up.
        """

    def detach(self) -> Any:
        """Give the model its own forward back; to be called when the batches are used up."""


class OverlappedPipeline(TrainPipelineSparseDist[Batch, Any]):
    """Copies the batch after next and exchanges the next batch's ids while one is trained."""

    def __init__(self, model: DistributedModelParallel, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        super().__init__(model, optimizer, device, execute_all_batches=True)
        self._dense_half = model.module.dense

    def _backward(self, losses: torch.Tensor) -> None:
        with record_function("## backward ##"):
            self._dense_half.backward()

    def _optimizer_step(self) -> None:
        if not self._dense_half.skipped:
            super()._optimizer_step()


class PlainPipeline:
    """One batch at a time, nothing in flight: what the debugger shows is what runs."""

    def __init__(self, model: DistributedModelParallel, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def progress(self, dataloader_iter: Iterator[Batch]) -> Any:
        batch = next(dataloader_iter).to(self._device)
        if not self._model.training:
            return self._model(batch)[1]
        self._optimizer.zero_grad()
        _, output = self._model(batch)
        self._model.module.dense.backward()
        if not self._model.module.dense.skipped:
            self._optimizer.step()
        return output

    def detach(self) -> Any:
        return self._model


def build_pipeline(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer, device: torch.device, debug: bool
) -> Pipeline:
    """Return the pipeline for training or, with the model in eval mode, for evaluation."""
    return (PlainPipeline if debug else OverlappedPipeline)(model, optimizer, device)
