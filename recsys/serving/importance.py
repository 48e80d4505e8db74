"""Importance of table rows by a pass over data.train: how much the loss would change, to first order, without each."""

from contextlib import closing
from typing import Any

import torch

from recsys.config import Config
from recsys.data.inputs import Inputs
from recsys.data.order import Position
from recsys.step.micro_batches import Lookup, MicroBatches, StepLoss, task_weights


def importances(inputs: Inputs, step: Any, config: Config) -> dict[str, torch.Tensor]:
    """Return by table the sums of |gradient × weight| over the ids of this rank's rows, [rows] FP32; collective.

    Args:
        step: a `TrainStep` in eval mode, whose tables are all looked up id by id; nothing of it is changed.
    """
    dense, loader = step.dense, inputs.loader("train")
    totals = {name: torch.zeros(table.num_embeddings) for name, table in config.tables.items()}
    with closing(loader.batches()) as batches:
        for _ in range(loader.steps_left(Position(), 1)):
            batch = next(batches).to(inputs.world.device)
            with torch.no_grad():  # so that no gradient reaches a table
                by_id = {
                    name: each for looked_up in step.embeddings_by_id for name, each in looked_up(batch.ids).items()
                }
                lookup = Lookup(batch.ids, None, by_id, dense.codes)
            passes = MicroBatches(dense, lookup, batch, StepLoss(dense.model, task_weights(dense.model.labels), batch))
            passes.run()
            for (name, vectors), gradient in zip(by_id.items(), passes.gradients, strict=True):
                if gradient is not None:
                    change = (gradient * vectors.values().float()).sum(1).abs().cpu()
                    rows = batch.ids[name].values().long().cpu()
                    totals[config.features[name].table or ""].index_add_(0, rows, change)
    for parameter in dense.parameters():
        parameter.grad = None
    return totals
