"""Vectors quantised row by row, by FBGEMM's kernels: the codes of a row, then its scale and bias."""

from functools import cache

import fbgemm_gpu  # noqa: F401  (its operators)
import torch

from recsys.config import TableConfig
from recsys.config.choices import RowCode
from recsys.tables.bytes import WEIGHT_BYTES

_BITS = {RowCode.INT4: 4, RowCode.INT2: 2}
_DECODE = "fbgemm::FusedNBitRowwiseQuantizedSBHalfToFloat"


@cache
def add_missing_shapes() -> None:
    """Tell torch the shape of decoded rows, which rehearsing a step needs; FBGEMM 1.6 does not."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_DECODE, "Meta"):
        torch.library.impl(_DECODE, "Meta")(_decoded_shape)


def _decoded_shape(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes.new_empty(len(codes), (codes.shape[1] - 4) * 8 // bits, dtype=torch.float32)


def encode_rows(rows: torch.Tensor, code: RowCode) -> torch.Tensor:
    """Return rows, [rows, columns] FP32, as bytes: uint8 [rows, row_bytes].

    A row of integers ends in its scale and bias, in FP32 for INT8 and in FP16 for the others; FP16 rows have none.
    """
    if code is RowCode.FP16:
        return rows.half().view(torch.uint8)
    if code is RowCode.INT8:
        return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    return torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, _BITS[code])


def decode_rows(codes: torch.Tensor, code: RowCode) -> torch.Tensor:
    """Return the rows of `encode_rows`, [rows, columns] FP32."""
    if code is RowCode.FP16:
        return codes.view(torch.half).float()
    if code is RowCode.INT8:
        return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(codes)
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, _BITS[code])


def quantize_rows(rows: torch.Tensor, code: RowCode) -> torch.Tensor:
    """Return rows, [rows, columns] FP32, as they are after encoding and decoding.

    With INT8, doing it again may change last digits: quantise trained rows, not the result of this function.
    """
    return decode_rows(encode_rows(rows.detach(), code), code)


def coded_row_bytes(columns: int, code: RowCode) -> int:
    """Return the bytes of a row in `encode_rows`."""
    return encode_rows(torch.zeros(1, columns), code).shape[1]


def row_bytes(table: TableConfig, code: RowCode | None) -> int:
    """Return the bytes of a table's row in a code, or as it is trained if `code` is None."""
    if code is None:
        return table.embedding_dim * WEIGHT_BYTES[table.data_type]
    return coded_row_bytes(table.embedding_dim, code)
