"""Importance of table rows and of neurons: the change of the loss without them, to first order, over data.train."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from recsys.data.batch import Batch
from recsys.data.inputs import Inputs
from recsys.data.order import Position
from recsys.models.dropout import RowDropout
from recsys.serving.neurons import HiddenLayer
from recsys.step.micro_batches import Lookup, MicroBatches, StepLoss, task_weights


def importances(inputs: Inputs, step: Any) -> dict[str, np.ndarray]:
    """Return, by table, sums of |gradient × weight| over the ids of all ranks' rows, float32 [rows]; collective.

    Args:
        step: a `TrainStep` in eval mode, whose tables are all looked up id by id; it is not changed.
    """
    config = inputs.config
    totals = {name: torch.zeros(table.num_embeddings) for name, table in config.tables.items()}
    for batch, by_id, gradients in _passes(inputs, step):
        for (name, vectors), gradient in zip(by_id.items(), gradients, strict=True):
            change = (gradient * vectors.values().float()).sum(1).abs().cpu()
            rows = batch.ids[name].values().long().cpu()
            totals[config.features[name].table or ""].index_add_(0, rows, change)
    return {name: inputs.world.sum(total).numpy() for name, total in totals.items()}


def neuron_importances(inputs: Inputs, step: Any, layers: Mapping[str, HiddenLayer]) -> dict[str, np.ndarray]:
    """Return, by layer, sums of |activation × gradient| of its neurons over all ranks' rows, float32 [width].

    Collective; `step` as of `importances` (Molchanov et al. 2017, arXiv:1611.06440, without the mean over a batch).
    """
    totals = {name: torch.zeros(layer.following.in_features) for name, layer in layers.items()}

    def watch(total: torch.Tensor, _: Any, inputs_of_layer: tuple[torch.Tensor, ...]) -> None:
        """Add the products of a layer's inputs, the activations of the layer before, when their gradient is known."""
        (x,) = inputs_of_layer
        if x.requires_grad:
            x.register_hook(lambda gradient: add(total, x.detach() * gradient))

    def add(total: torch.Tensor, products: torch.Tensor) -> None:
        total.add_(products.abs().sum(0).float().cpu())

    hooks = [layer.following.register_forward_pre_hook(partial(watch, totals[name])) for name, layer in layers.items()]
    for _ in _passes(inputs, step):
        pass
    for hook in hooks:
        hook.remove()
    return {name: inputs.world.sum(total).numpy() for name, total in totals.items()}


def _passes(inputs: Inputs, step: Any) -> Iterator[tuple[Batch, dict[str, Any], list[torch.Tensor]]]:
    """Yield the batches of data.train, the vectors of their ids by feature, and the loss gradients by the vectors."""
    dense, loader = step.dense, inputs.loader("train")
    with closing(loader.batches()) as batches, _training(dense):
        for _ in range(loader.steps_left(Position(), 1)):
            batch = next(batches).to(inputs.world.device)
            with torch.no_grad():  # so that no gradient reaches a table
                by_id = {
                    name: vectors
                    for looked_up in step.embeddings_by_id
                    for name, vectors in looked_up(batch.ids).items()
                }
                lookup = Lookup(batch.ids, None, by_id, dense.codes)
            passes = MicroBatches(dense, lookup, batch, StepLoss(dense.model, task_weights(dense.model.labels), batch))
            passes.run()
            yield batch, by_id, passes.gradients
    for parameter in dense.parameters():
        parameter.grad = None


@contextmanager
def _training(dense: Any) -> Iterator[None]:
    """Set a model to training mode, for the outputs that its losses need, but without dropout and FP16.

    In FP16, gradients overflow now and then; training then skips a step and halves the scale of the loss.
    """
    model, autocast = dense.model, dense.autocast
    if autocast is torch.float16:
        dense.autocast = None
    shares = {module: module.p for module in model.modules() if isinstance(module, RowDropout)}
    for module in shares:
        module.p = 0.0
    model.train()
    yield
    model.eval()
    dense.autocast = autocast
    for module, share in shares.items():
        module.p = share
