"""Replicated tables: every rank holds them whole, and updates them from gradients that are summed over all ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.tables.torch_update import TorchTable, gradient_by_id


class ReplicatedTables:
    """Updates replicated tables from the gradients of their pooled embeddings.

    torchrec leaves such tables to the optimizer of the dense part, with gradients of the weights' own type, so that
    what is learned would depend on the plan. Here gradients are summed in FP32, over all ranks, and only rows that some
    rank has looked up are updated, as in tables that are split; of one with a penalty on all rows, these are.
    """

    def __init__(self, tables: Iterable[TorchTable]) -> None:
        self.tables = list(tables)

    def update(self, ids: KeyedJaggedTensor, gradients: dict[str, torch.Tensor]) -> None:
        """Train the tables on one batch; collective.

        Args:
            ids: this rank's table rows.
            gradients: of the mean loss by the pooled embeddings of this rank, [rows, embedding_dim] by feature.
        """
        if not self.tables:
            return
        # One message: the gradients by the tables, and for each of their rows whether it was looked up.
        sizes = [table.weights.numel() for table in self.tables] + [len(table.weights) for table in self.tables]
        message = torch.zeros(sum(sizes), device=self.tables[0].weights.device)
        summands, touched = message.split(sizes)[: len(self.tables)], message.split(sizes)[len(self.tables) :]
        sums = [flat.view(table.weights.shape) for flat, table in zip(summands, self.tables, strict=True)]
        for table, into, marks in zip(self.tables, sums, touched, strict=True):
            for feature in table.features:
                jagged = ids[feature]
                rows, weights = jagged.values(), jagged.weights_or_none()
                into.index_add_(0, rows, gradient_by_id(gradients[feature], jagged.lengths(), weights, len(rows)))
                marks.index_fill_(0, rows.long(), 1)
        dist.all_reduce(message)
        for table, gradient, marks in zip(self.tables, sums, touched, strict=True):
            if table.l2_all_rows:
                gradient.add_(table.weights, alpha=table.l2_all_rows)
                marks.fill_(1)
            table.update_looked_up(gradient, marks)
