"""torchrec's training pipeline with the step's two halves for several GPUs; simpler pipelines for one and for CPUs."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch.profiler import record_function
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys.data.batch import Batch
from recsys.step.step import ignore_phase


class Pipeline(Protocol):
    """Runs one step a call; in eval mode of the model, forward only."""

    def progress(self, dataloader_iter: Iterator[Batch]) -> Any:
        """Return the step's output.

        Raises:
            StopIteration: there are no more batches.
        """

    def detach(self) -> Any:
        """Restore the model's own forward; to be called when there are no more batches."""


class GatedOptimizer:
    """An optimizer of the dense part that does nothing in steps that `DenseHalf.backward` has skipped.

    The check is here because versions of torchrec's pipeline call the optimizer in different ways.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dense_half: Any) -> None:
        self._optimizer, self._dense_half = optimizer, dense_half

    def zero_grad(self) -> None:
        """Drop the gradients of the dense part."""
        self._dense_half.zero_grad()

    def step(self) -> None:
        """Update the dense part, unless the step was skipped; collective if its optimizer is sharded."""
        if self._dense_half.skipped:
            return
        if self._dense_half.is_bad is not None:  # fused optimizers then skip the step on the device
            self._optimizer.found_inf = self._dense_half.is_bad.float()  # type: ignore[attr-defined]
        if self._dense_half.shards is None:
            self._optimizer.step()
        else:
            self._dense_half.shards.step(self._optimizer)


class OverlappedPipeline(TrainPipelineSparseDist[Batch, Any]):
    """Copies the batch after next and exchanges the next batch's ids while one is trained."""

    def __init__(self, model: DistributedModelParallel, optimizer: GatedOptimizer, device: torch.device) -> None:
        super().__init__(model, optimizer, device, execute_all_batches=True)
        self._dense_half = model.module.dense

    def _backward(self, losses: torch.Tensor) -> None:
        with record_function("## backward ##"):
            self._dense_half.backward()


class PlainPipeline:
    """One batch at a time, nothing in flight: for debuggers, and for CPUs.

    On CPUs nothing is copied, and the threads of an exchange compete for the cores that compute. There, three batches
    in flight gain nothing on two ranks, and cost one rank a tenth of its step of 2048 rows.
    """

    def __init__(self, model: DistributedModelParallel, optimizer: GatedOptimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def progress(self, dataloader_iter: Iterator[Batch]) -> Any:
        with record_function("## next_batch ##"):
            batch = next(dataloader_iter).to(self._device)
        return self._step(batch)

    def _step(self, batch: Batch, copy_next: Callable[[], None] | None = None) -> Any:
        """Return the output for a batch. `copy_next` is called while the device is still computing."""
        if self._model.training:
            self._optimizer.zero_grad()
        with record_function("## forward ##"):
            _, output = self._model(batch)
        if copy_next is not None:
            copy_next()
        if self._model.training:
            with record_function("## backward ##"):
                self._model.module.dense.backward()
            with record_function("## optimizer ##"):
                self._optimizer.step()
        return output

    def detach(self) -> Any:
        return self._model


class CopyingPipeline(PlainPipeline):
    """Copies the next batch while one is trained: for one GPU that looks ids up without exchanges."""

    def __init__(self, model: DistributedModelParallel, optimizer: GatedOptimizer, device: torch.device) -> None:
        super().__init__(model, optimizer, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: Batch | None = None

    def progress(self, dataloader_iter: Iterator[Batch]) -> Any:
        if self._copied is None:
            self._copied = self._copy(next(dataloader_iter))
        batch, self._copied = self._copied, None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            batch.record_stream(current)  # or its memory would be reused while the step reads it
        return self._step(batch, partial(self._copy_next, dataloader_iter))

    def _copy_next(self, dataloader_iter: Iterator[Batch]) -> None:
        with record_function("## next_batch ##"):
            batch = next(dataloader_iter, None)
        self._copied = None if batch is None else self._copy(batch)

    def _copy(self, batch: Batch) -> Batch:
        with record_function("## copy_batch_to_gpu ##"), torch.cuda.stream(self._stream):
            return batch.to(self._device, non_blocking=True)


def build_pipeline(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer, device: torch.device, debug: bool
) -> Pipeline:
    """Return the pipeline for training or, with the model in eval mode, for evaluation."""
    gated = GatedOptimizer(optimizer, model.module.dense)
    if debug or device.type == "cpu":
        return PlainPipeline(model, gated, device)
    return (OverlappedPipeline if model.module.exchanges else CopyingPipeline)(model, gated, device)


class TimedIterator(Iterator[Batch]):
    """Iterator of batches that adds up the seconds for which the training thread waits for them."""

    def __init__(self, batches: Iterator[Batch], enter_phase: Callable[..., None] = ignore_phase) -> None:
        self._batches, self._enter_phase = batches, enter_phase
        self.seconds = 0.0

    def __next__(self) -> Batch:
        start = time.monotonic()
        self._enter_phase("data loading")
        try:
            return next(self._batches)
        finally:
            self.seconds += time.monotonic() - start
            self._enter_phase("the exchange of ids")
