"""Memory that GPU operators need besides their inputs and results, and free when they are done."""

import math
from typing import Any

import torch

# Constants of torch's sums (ATen/native/cuda/Reduce.cuh): threads of a block, a multiprocessor and a warp, the least
# and the most numbers that a thread adds up; and the multiprocessors of an H100.
_BLOCK, _PROCESSOR, _WARP, _LEAST, _MOST = 512, 2048, 32, 16, 256
_PROCESSORS = 132


def workspace_bytes(operator: Any, arguments: tuple[Any, ...]) -> int:
    """Return the bytes of an operator's workspace: up to 132 MiB for a sum over rows, such as a bias's gradient."""
    if operator is not torch.ops.aten.sum.dim_IntList or not arguments[1]:
        return 0
    tensor, dims = arguments[0], sorted(dim % arguments[0].dim() for dim in arguments[1])
    if dims != list(range(len(dims))) or len(dims) == tensor.dim() or not tensor.is_contiguous() or not tensor.numel():
        return 0  # sums along rows are another case, which needs little
    return _column_sums(math.prod(tensor.shape[: len(dims)]), math.prod(tensor.shape[len(dims) :]))


def _column_sums(rows: int, width: int) -> int:
    """Return the workspace of a sum of [rows, width] over the rows. Each block of threads has some of the rows; every
    thread writes its sums in FP32, and the last block adds them up."""
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
    """Return the greatest power of two up to `number`, but at most `most`."""
    return min(most, 1 << (number.bit_length() - 1))
