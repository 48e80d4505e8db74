"""Optimizers of tables: one entry each, with all facts that the rest of the code reads."""

from dataclasses import dataclass
from enum import Enum

from recsys.config.choices import DataType


@dataclass(frozen=True)
class UpdateRule:
    """Facts of an optimizer of tables, which FBGEMM runs in the backward pass, or a rule in torch.

    Attributes:
        path: of the torchrec class for it; None: FBGEMM has no kernel for it.
        numbers: keys of TableOptimizerConfig that it reads besides the learning rate.
        row_state, element_state: how many numbers of state it keeps for a row, and for an element of a row.
        counts_updates: its step depends on the number of updates so far. norms_rows: on the norms of whole rows.
        on_cpu: FBGEMM has a kernel for CPUs.
        in_torch: `recsys.tables.rules` has it under its name. It then trains tables that every rank holds and, if it
            keeps no state of whole rows, all tables for which FBGEMM has no kernel.
        leaves_idle_rows: a row with a gradient of 0 stays as it is, whatever its state.
        reads_decay: its GPU kernels read weight decay. decay_has_modes: they ignore it unless a mode is set.
        bf16_state: state of elements may be BF16. fp32_on_gpu: its GPU kernel trains only tables in FP32.
        row_wise: name of the variant with less state, a number for a row instead of one for each element.
    """

    path: str | None
    numbers: tuple[str, ...] = ("eps",)
    row_state: int = 0
    element_state: int = 0
    counts_updates: bool = False
    norms_rows: bool = False
    on_cpu: bool = False
    in_torch: bool = False
    leaves_idle_rows: bool = False
    reads_decay: bool = True
    decay_has_modes: bool = False
    bf16_state: bool = False
    fp32_on_gpu: bool = False
    row_wise: str | None = None

    def in_fbgemm(self, on_gpu: bool, data_type: DataType) -> bool:
        """Return whether FBGEMM has a kernel for it, on a device and for a table's data type."""
        of_device = (data_type is DataType.FP32 or not self.fp32_on_gpu) if on_gpu else self.on_cpu
        return self.path is not None and of_device

    @property
    def trains_on_cpu(self) -> bool:
        """Whether it can train tables that are split over CPU ranks."""
        return self.on_cpu or (self.in_torch and not self.row_state)


_ADAM = ("eps", "beta1", "beta2")
_OPTIMIZERS = "torchrec.optim.optimizers"


class TableOptimizer(Enum):
    """Optimizer of the rows of a table, run in the backward pass."""

    rowwise_adagrad = UpdateRule(
        "torchrec.optim.rowwise_adagrad.RowWiseAdagrad",
        row_state=1,
        on_cpu=True,
        in_torch=True,
        leaves_idle_rows=True,
        decay_has_modes=True,
    )
    adagrad = UpdateRule(
        f"{_OPTIMIZERS}.Adagrad",
        element_state=1,
        on_cpu=True,
        in_torch=True,
        leaves_idle_rows=True,
        reads_decay=False,
        row_wise="rowwise_adagrad",
    )
    sgd = UpdateRule(f"{_OPTIMIZERS}.SGD", (), on_cpu=True, in_torch=True, leaves_idle_rows=True, reads_decay=False)
    adam = UpdateRule(
        f"{_OPTIMIZERS}.Adam",
        _ADAM,
        element_state=2,
        counts_updates=True,
        in_torch=True,
        fp32_on_gpu=True,  # FBGEMM 1.6.0, on an H100: "Expected tensor 'row_counter_dev' to have scalar type Float"
        row_wise="partial_rowwise_adam",
    )
    partial_rowwise_adam = UpdateRule(
        f"{_OPTIMIZERS}.PartialRowWiseAdam", _ADAM, row_state=1, element_state=1, counts_updates=True, bf16_state=True
    )
    lamb = UpdateRule(
        f"{_OPTIMIZERS}.LAMB",
        _ADAM,
        element_state=2,
        counts_updates=True,
        norms_rows=True,
        row_wise="partial_rowwise_lamb",
    )
    partial_rowwise_lamb = UpdateRule(
        f"{_OPTIMIZERS}.PartialRowWiseLAMB", _ADAM, row_state=1, element_state=1, counts_updates=True, norms_rows=True
    )
    ftrl = UpdateRule(None, ("eps", "l1"), element_state=2, in_torch=True, reads_decay=False)

    @property
    def is_row_wise(self) -> bool:
        """Whether its step depends on a number of the whole row, so that splits by columns change what is learned."""
        return self.value.row_state > 0 or self.value.norms_rows

    @property
    def nearest_on_cpu(self) -> "TableOptimizer":
        """The optimizer for CPUs that keeps state by row, by element or not at all, as this one does."""
        state_kinds = self.value.row_state > 0, self.value.element_state > 0 and not self.value.row_state
        rules = {optimizer: optimizer.value for optimizer in TableOptimizer if optimizer.value.trains_on_cpu}
        return next(o for o, rule in rules.items() if (rule.row_state > 0, rule.element_state > 0) == state_kinds)


def optimizer_names(attribute: str) -> str:
    """Return the names of the optimizers whose rule has a true attribute, for messages."""
    return ", ".join(optimizer.name for optimizer in TableOptimizer if getattr(optimizer.value, attribute))
