"""Update rules of table optimizers in torch, for tables that FBGEMM does not update itself.

A rule has the name of its optimizer. It gets the rows that a batch touched, changes their state in place, and returns
the updated rows, FP32. If FBGEMM has the optimizer too, the rule is FBGEMM's (fbgemm_gpu/docs, `OptimType`).
"""

from dataclasses import dataclass

import torch

from recsys.config import SparsityConfig, TableOptimizerConfig


@dataclass(frozen=True)
class Touched:
    """Rows of a table that a batch touched.

    Attributes:
        weights: [rows, columns] in the table's type. gradient: of the mean loss with respect to them, FP32.
        state: FP32, [rows] or [rows, columns] each.
        rate: learning rate; num_updates: number of updates of the table, including this one.
    """

    weights: torch.Tensor
    gradient: torch.Tensor
    state: list[torch.Tensor]
    settings: TableOptimizerConfig
    rate: float
    num_updates: int


def sgd(rows: Touched) -> torch.Tensor:
    """Go down the gradient."""
    return rows.weights.float() - rows.gradient * rows.rate


def adagrad(rows: Touched) -> torch.Tensor:
    """Divide by the root of the sum of squares, element by element."""
    (squares,) = rows.state
    squares += rows.gradient.square()
    step = rows.gradient * rows.rate / squares.sqrt().add_(rows.settings.eps)
    # FBGEMM's kernel for CPUs rounds the step before it subtracts it.
    return rows.weights.float() - (step.to(rows.weights.dtype) if step.device.type == "cpu" else step)


def rowwise_adagrad(rows: Touched) -> torch.Tensor:
    """Divide by the root of the sum of mean squares, row by row."""
    (squares,) = rows.state
    squares += rows.gradient.square().mean(dim=1)
    return rows.weights.float() - rows.gradient * rows.rate / squares.sqrt().add_(rows.settings.eps)[:, None]


def adam(rows: Touched) -> torch.Tensor:
    """Divide a moving average by the root of that of the squares (Kingma & Ba 2015, arXiv:1412.6980).

    Both averages stay as they are in steps that do not touch a row; their correction counts all updates of the table.
    """
    (mean, squares), settings = rows.state, rows.settings
    mean.mul_(settings.beta1).add_(rows.gradient, alpha=1 - settings.beta1)
    squares.mul_(settings.beta2).addcmul_(rows.gradient, rows.gradient, value=1 - settings.beta2)
    root = (squares / (1 - settings.beta2**rows.num_updates)).sqrt_().add_(settings.eps)
    return rows.weights.float() - rows.rate / (1 - settings.beta1**rows.num_updates) * mean / root


def ftrl(rows: Touched) -> torch.Tensor:
    """Follow the regularised leader: FTRL-Proximal (McMahan et al. 2013, "Ad click prediction").

    `linear` is the paper's z times the learning rate, so a schedule scales gradients, not weights. It does not scale
    `l1`: if that threshold fell too, elements would leave 0, and none would be 0 at the end of a schedule.
    Without `l1` this is adagrad; with it, elements whose gradients do not add up to enough are exactly 0.
    """
    (linear, squares), weights = rows.state, rows.weights.float()
    before = squares.sqrt()
    squares += rows.gradient.square()
    root = squares.sqrt()
    # The paper begins with weights of 0; here the first update starts from the initial weight, eps included.
    pull = root - before + rows.settings.eps * (before == 0)
    linear += torch.where(root > 0, rows.gradient * rows.rate - pull * weights, 0)
    threshold = rows.settings.learning_rate * rows.settings.l1
    trained = (linear.clamp(-threshold, threshold) - linear) / (root + rows.settings.eps)
    return torch.where(root > 0, trained, weights)


def shrunk(rows: torch.Tensor, sparsity: SparsityConfig, rate: float) -> torch.Tensor:
    """Return rows, [rows, columns] FP32, after the proximal step of their penalties, which makes elements exactly 0."""
    rows = rows.sign() * (rows.abs() - rate * sparsity.l1).clamp(min=0)
    if not sparsity.group_lasso:
        return rows
    lengths = rows.norm(dim=1, keepdim=True)
    return rows * (1 - rate * sparsity.group_lasso / lengths.clamp(min=torch.finfo(rows.dtype).tiny)).clamp(min=0)
