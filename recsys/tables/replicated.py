"""Replicated tables: every rank holds them whole, and updates them from gradients that are summed over all ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys.tables.torch_update import TorchTable, gradient_by_id


class ReplicatedTables:
    """Updates replicated tables from the gradients of their pooled embeddings.

    torchrec leaves such tables to the optimizer of the dense part, with gradients of the weights' own type, so results
    would depend on the plan. Here gradients are summed in FP32 over all ranks, and only rows that some rank has looked
    up are updated, as in sharded tables; in a table with a penalty on all rows, every row is updated.

    Args:
        num_parts: parts of a batch whose gradients are summed separately and then added, like those of so many ranks.
    """

    def __init__(self, tables: Iterable[TorchTable], num_parts: int = 1) -> None:
        self.tables, self._num_parts = list(tables), num_parts

    def update(self, ids: KeyedJaggedTensor, gradients: dict[str, torch.Tensor]) -> None:
        """Train the tables on one batch; collective.

        Args:
            ids: this rank's table rows.
            gradients: of the mean loss with respect to this rank's pooled embeddings, [rows, embedding_dim] by feature.
        """
        if not self.tables:
            return
        size = sum(table.weights.numel() + len(table.weights) for table in self.tables)
        messages = torch.zeros(self._num_parts, size, device=self.tables[0].weights.device)
        by_part = [self._by_table(message) for message in messages]
        for table, *parts in zip(self.tables, *by_part, strict=True):
            for feature in table.features:
                jagged = ids[feature]
                self._add([gradient for gradient, _ in parts], jagged, gradients[feature])
                parts[0][1].index_fill_(0, jagged.values().long(), 1)
        for other in messages[1:]:
            messages[0].add_(other)
        dist.all_reduce(messages[0])
        for table, (gradient, marks) in zip(self.tables, by_part[0], strict=True):
            if table.l2_all_rows:
                table.add_penalty(gradient)
                marks.fill_(1)
            table.update_looked_up(gradient, marks)

    def _by_table(self, message: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of a message by table: its gradient, [rows, columns], and marks of looked-up rows, [rows]."""
        shapes = [table.weights.shape for table in self.tables]
        flat = message.split([size for shape in shapes for size in (shape.numel(), shape[0])])
        gradients = [part.view(shape) for part, shape in zip(flat[::2], shapes, strict=True)]
        return list(zip(gradients, flat[1::2], strict=True))

    def _add(self, sums: list[torch.Tensor], jagged: JaggedTensor, gradient: torch.Tensor) -> None:
        """Add a feature's gradients by table row to the sums of the batch's parts, [rows, columns] each."""
        rows, weights, lengths = jagged.values(), jagged.weights_or_none(), jagged.lengths()
        counts = [len(rows)]
        if len(sums) > 1:
            counts = [int(part.sum()) for part in lengths.tensor_split(len(sums))]
        by_id = gradient_by_id(gradient, lengths, weights, len(rows)).split(counts)
        for sum_of_part, rows_of_part, summands in zip(sums, rows.split(counts), by_id, strict=True):
            sum_of_part.index_add_(0, rows_of_part, summands)
