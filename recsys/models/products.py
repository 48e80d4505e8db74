"""Products of matrices on a CPU whose sums do not depend on the number of threads, nor on the number of processes."""

from functools import partial

import torch
import torch.nn.functional as F

_ELEMENTS_AT_ONCE = 1 << 18  # elements of a weight whose gradients by halves are in memory at the same time
_MOST_BLOCKS = 256  # of a weight, at most: each costs some operators, and so many keep the memory small
_COLUMNS_AT_ONCE = 1 << 10  # columns that are multiplied with one column at a time
_LONG = 512  # products: longer sums may be split over threads
_FEW_ROWS = 16  # rows: with fewer, some processors multiply differently on two threads
_MOST_ROWS = 768  # rows: MKL splits longer sums over threads
_CHUNKED_ELEMENTS = 1 << 22  # elements of the products of chunks of rows that are in memory at the same time


def product_over_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return first.T @ second, [p, q], of [rows, p] and [rows, q]; the same on one thread of a CPU and on two."""
    if first.device.type != "cpu" or len(first) <= _MOST_ROWS:
        return first.T @ second
    end = len(first) // _MOST_ROWS * _MOST_ROWS
    result = first[end:].T @ second[end:]
    at_once = max(1, _CHUNKED_ELEMENTS // max(1, result.numel()))
    chunks = (matrix[:end].reshape(-1, _MOST_ROWS, matrix.shape[1]).split(at_once) for matrix in (first, second))
    for first_chunks, second_chunks in zip(*chunks, strict=True):
        result += torch.bmm(first_chunks.mT, second_chunks).sum(0)
    return result


def add_products(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Add first @ second, of [rows, n] and [n, width], to `total` and return it; the same on one thread and on two."""
    at_once = _LONG if first.device.type == "cpu" else max(1, len(second))
    for columns, rows in zip(first.split(at_once, dim=1), second.split(at_once), strict=True):
        total.addmm_(columns, rows)
    return total


def times(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, num_parts: int) -> torch.Tensor:
    """Return x times a matrix, plus a bias, with sums that are the same on one thread and on two.

    Args:
        x: [rows, width], with rows in `num_parts` parts of equal length. matrix: [width, outputs]. bias: [outputs].
    """
    width, outputs = matrix.shape
    if num_parts == 1 or width < _LONG or outputs == 1:
        if len(x) >= _FEW_ROWS:
            return F.linear(x, matrix.T, bias)
        return F.linear(F.pad(x, (0, 0, 0, _FEW_ROWS - len(x))), matrix.T, bias)[: len(x)].clone()
    parts, matrices = x.reshape(num_parts, -1, width), matrix.expand(num_parts, width, outputs)
    multiply = torch.bmm if bias is None else partial(torch.baddbmm, bias)
    if torch.is_grad_enabled():  # in a backward pass that is differentiated too; autograd refuses `out`
        return multiply(parts, matrices).view(len(x), outputs)
    result = x.new_empty(len(x), outputs)  # not a view of another, since what follows may change it in place
    multiply(parts, matrices, out=result.view(num_parts, -1, outputs))
    return result


def gradients_by_parameters(
    gradient: torch.Tensor, x: torch.Tensor, num_parts: int, of_weight: bool, of_bias: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of a linear layer's weight and bias, or None, each summed part by part.

    Args:
        gradient: that of the layer's output, [rows, outputs]. x: the layer's input, [rows, inputs]; rows are in
            `num_parts` parts of equal length.
    """
    gradients, inputs = (matrix.reshape(num_parts, -1, matrix.shape[-1]) for matrix in (gradient, x))
    return _of_weight(gradients, inputs) if of_weight else None, gradients.sum(1).sum(0) if of_bias else None


def _of_weight(gradients: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weight, [outputs, inputs], from parts of the rows, [parts, rows, outputs or inputs]."""
    outputs, width = gradients.shape[2], inputs.shape[2]
    if outputs == 1 or width == 1:  # two products with a vector are summed in another order than one
        wide, narrow = (gradients, inputs) if width == 1 else (inputs, gradients)
        sums = [(columns * narrow).sum(1).sum(0) for columns in wide.split(_COLUMNS_AT_ONCE, dim=2)]
        return torch.cat(sums).view(outputs, width)
    num_blocks = max(1, min(-(-outputs * width // _ELEMENTS_AT_ONCE), outputs // 2, _MOST_BLOCKS))
    blocks = gradients.tensor_split(num_blocks, dim=2)
    if torch.is_grad_enabled():  # as in `times`
        return torch.cat([_sum_of_products(block, inputs) for block in blocks])
    result = gradients.new_empty(outputs, width)
    for rows, block in zip(result.tensor_split(num_blocks), blocks, strict=True):
        _sum_of_products(block, inputs, rows)
    return result


def _sum_of_products(gradients: torch.Tensor, inputs: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum over parts of gradients.mT @ inputs, [outputs, inputs].

    A single product is split over threads, and so is a long sum; of two products in a batch, each thread computes one.
    But products are summed in another order if their result begins between multiples of 16 bytes.
    """
    outputs, width = gradients.shape[2], inputs.shape[2]
    if outputs * width % 4 == 0:
        return torch.sum(torch.bmm(gradients.mT, inputs), 0, out=out)
    products = torch.bmm(F.pad(gradients, (0, -outputs % 4)).mT, inputs)
    return torch.sum(products[:, :outputs], 0, out=out)
