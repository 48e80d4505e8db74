"""Checks of settings that make models small enough to serve: quantised vectors, sparsity, pruned rows, INT8 layers."""

from recsys.config.choices import (
    COLUMN_SPLITS,
    UNPOOLED,
    ComputeKernel,
    DataType,
    IdMappingType,
    RowCode,
    TableEncoding,
)
from recsys.config.schema import Config, TableConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError


def check_publishing(config: Config) -> None:
    """Raise a UserError if the model has types that publications do not hold.

    Otherwise each publication would fail after its checkpoint and its export, and training would continue without any.
    """
    publish = config.train.publish
    if publish.dir is None:
        return
    if config.precision.dense_int8:
        raise UserError(
            "config key 'precision.dense_int8': train.publish writes FP32 layers; set it to false, or drop "
            "train.publish.dir"
        )
    for name, table in config.tables.items():
        if table.data_type is DataType.FP8:
            raise UserError(
                f"config key 'tables.{name}.data_type': train.publish writes tables of FP32 and FP16, found FP8; use "
                f"FP16, or drop train.publish.dir"
            )
        in_int2 = publish.tables is TableEncoding.int2 and table.quantize is None
        if in_int2 and not takes_code(table, RowCode.INT2):
            raise UserError(
                f"config key 'train.publish.tables': int2 needs an embedding_dim that is a multiple of 8, found "
                f"{table.embedding_dim} of tables.{name}; use int4"
            )


def takes_code(table: TableConfig, code: RowCode) -> bool:
    """Return whether the vectors of a table can be quantised by a code."""
    return code is not RowCode.INT2 or table.embedding_dim % 8 == 0


def check_compression(config: Config, name: str, table: TableConfig) -> None:
    """Raise a UserError if a table cannot have the quantised vectors, kept rows or sparsity that it asks for."""
    key = f"config key 'tables.{name}"
    if table.quantize is not None and table.sharding_type not in UNPOOLED:
        raise UserError(
            f"{key}.sharding_type': quantize needs the vectors of single ids, which works with "
            f"{', '.join(choice.name for choice in UNPOOLED)}, found {table.sharding_type.name}"
        )
    if table.quantize is not None and not takes_code(table, table.quantize):
        raise UserError(
            f"{key}.quantize': INT2 needs an embedding_dim that is a multiple of 8, found {table.embedding_dim}; use "
            f"INT4"
        )
    if table.model_dim < table.embedding_dim:
        raise UserError(
            f"{key}.projected_dim' is the width that vectors are widened to, and must be at least embedding_dim="
            f"{table.embedding_dim}, found {table.projected_dim}; make embedding_dim smaller, or drop it"
        )
    if table.kept_rows is not None and table.mapping is IdMappingType.vocabulary:
        raise UserError(
            f"{key}.kept_rows' is for mappings other than vocabulary, which itself lists the ids that have rows; drop "
            f"it, or name a shorter tables.{name}.vocabulary"
        )
    if table.sparsity is not None:
        _check_sparsity(config, name, table)


def _check_sparsity(config: Config, name: str, table: TableConfig) -> None:
    key, optimizer = f"config key 'tables.{name}", config.table_optimizer(name)
    assert table.sparsity is not None
    # The penalty is part of rules in torch. It needs one that goes on from the weights (ftrl computes them from its
    # state) and does the same on every plan.
    able = [
        candidate
        for candidate in TableOptimizer
        if candidate.value.in_torch and candidate.value.path and not candidate.value.row_state
    ]
    if not (table.sparsity.l1 or table.sparsity.group_lasso):
        raise UserError(f"{key}.sparsity' has no effect while l1 and group_lasso are 0; set one of them, or drop it")
    if optimizer.name not in able or optimizer.weight_decay or table.compute_kernel is not ComputeKernel.fused:
        names = ", ".join(candidate.name for candidate in able)
        raise UserError(
            f"{key}.sparsity' needs optimizer {names} without weight_decay, and compute_kernel: fused, found "
            f"{optimizer.name.name}, {optimizer.weight_decay} and {table.compute_kernel.name}"
        )
    if table.sparsity.group_lasso and table.sharding_type in COLUMN_SPLITS:
        raise UserError(
            f"{key}.sparsity.group_lasso' prunes whole rows, which {table.sharding_type.name} splits; use "
            f"row_wise, or l1"
        )
