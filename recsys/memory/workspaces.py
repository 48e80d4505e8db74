"""Memory that operators take on GPUs beside what they read and give, and give back when they are done."""

import math
from typing import Any

import torch

# Of torch's sums (ATen/native/cuda/Reduce.cuh): threads of a block and of a multiprocessor, how many numbers a thread
# is to add up, and multiprocessors, as an H100 has.
_BLOCK, _PROCESSOR, _WARP, _LEAST, _MOST = 512, 2048, 32, 16, 256
_PROCESSORS = 132


def workspace_bytes(operator: Any, arguments: tuple[Any, ...]) -> int:
    """Return what an operator takes besides: a sum over rows, such as the gradient of a bias is, up to 132 MiB."""
    if operator is not torch.ops.aten.sum.dim_IntList or not arguments[1]:
        return 0
    tensor, dims = arguments[0], sorted(dim % arguments[0].dim() for dim in arguments[1])
    if dims != list(range(len(dims))) or len(dims) == tensor.dim() or not tensor.is_contiguous() or not tensor.numel():
        return 0  # sums along rows are another case, which takes little
    return _column_sums(math.prod(tensor.shape[: len(dims)]), math.prod(tensor.shape[len(dims) :]))


def _column_sums(rows: int, width: int) -> int:
    """Return what sums of [rows, width] over the rows take: blocks of threads have some rows each, and every thread
    writes its sums, in FP32, which the last block adds up."""
    vector = next(size for size in (4, 2, 1) if width % size == 0)
    most, columns = _BLOCK // vector, width // vector
    across = min(_power(columns, most), _WARP)
    down = min(_power(rows, most), most // across)
    across = min(_power(columns, most), most // down)
    if rows < min(_LEAST * down, _MOST):
        return 0
    numbers, blocks = -(-rows // down), -(-columns // across)
    at_once = _PROCESSORS * (_PROCESSOR // (across * down))
    if numbers < _MOST or blocks > at_once:
        return 0
    shared = max(min(-(-at_once // blocks), -(-numbers // _LEAST)), -(-numbers // _MOST))
    return 4 * width * shared * across * vector if shared > 1 else 0


def _power(number: int, most: int) -> int:
    """Return the greatest power of two up to a number, or `most`."""
    return min(most, 1 << (number.bit_length() - 1))
