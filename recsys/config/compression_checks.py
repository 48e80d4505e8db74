"""Checks of what makes tables small enough to serve: quantised vectors, and rows that were pruned."""

from recsys.config.choices import UNPOOLED, IdMappingType, RowCode
from recsys.config.schema import TableConfig
from recsys.errors import UserError


def check_compression(name: str, table: TableConfig) -> None:
    """Raise a UserError where a table's vectors cannot be quantised as it says, or its rows not have been pruned."""
    key = f"config key 'tables.{name}"
    if table.quantize is not None and table.sharding_type not in UNPOOLED:
        raise UserError(
            f"{key}.sharding_type': quantize takes the vectors of single ids, which goes with "
            f"{', '.join(choice.name for choice in UNPOOLED)}, found {table.sharding_type.name}"
        )
    if table.quantize is RowCode.INT2 and table.embedding_dim % 8:
        raise UserError(
            f"{key}.quantize': INT2 takes an embedding_dim that is a multiple of 8, found {table.embedding_dim}; use "
            f"INT4"
        )
    if table.kept_rows is not None and table.mapping is IdMappingType.vocabulary:
        raise UserError(
            f"{key}.kept_rows' is for mappings without a vocabulary, which lists the ids that have rows; drop it, or "
            f"name a shorter tables.{name}.vocabulary"
        )
