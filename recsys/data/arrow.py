"""What Arrow types are, for who looks at columns without converting them."""

import pyarrow as pa


def is_list(kind: pa.DataType) -> bool:
    """Tell whether a type is lists."""
    return pa.types.is_list(kind)
