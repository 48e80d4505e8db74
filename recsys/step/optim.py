"""Optimizer of the dense part, and the schedule of the learning rates."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from recsys.config import OptimizerConfig, Schedule
from recsys.config.choices import DenseOptimizer
from recsys.config.schema import ScheduleConfig

_ONE = torch.ones(())


class Adam(torch.optim.Adam):
    """Adam of FP32 parameters in host memory, by one call of PyTorch's fused kernel; AdamW has the same step.

    PyTorch's own step spends four times as long on preparing that call, for the parameters of an MLP, as on the kernel.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; arguments as for PyTorch's `step`, which runs the first one."""
        (group,) = self.param_groups
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        if closure is not None or hasattr(self, "found_inf") or not states or not all(states):
            return super().step(closure)
        first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        torch._foreach_add_(steps, _ONE, alpha=1.0)
        update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        beta1, beta2 = group["betas"]
        gradients = [parameter.grad for parameter in parameters]
        update(parameters, gradients, first, second, [], steps, beta1=beta1, beta2=beta2, **settings)
        return None


class AdamW(Adam, torch.optim.AdamW):
    """Adam whose weight decay does not go through the moments (Loshchilov and Hutter 2019, arXiv:1711.05101)."""


class SGD(torch.optim.SGD):
    """SGD whose momentum begins as zeros; the first step is the same.

    PyTorch's begins as uninitialised memory, and stays so if the first step is skipped on the device.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; arguments as for PyTorch's `step`, which is called."""
        for group in self.param_groups:
            if not group["momentum"]:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and self.state[parameter].get("momentum_buffer") is None:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
        return super().step(closure)


def build_dense_optimizer(parameters: Iterable[torch.Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the dense part, or of this rank's slices of it, which may be none."""
    groups, dense = [{"params": list(parameters)}], config.dense
    if dense.name is DenseOptimizer.adafactor:  # it divides by a parameter's size, which may be 0
        groups = [{"params": [parameter for parameter in groups[0]["params"] if parameter.numel()]}]
    settings: dict[str, Any] = {"lr": dense.learning_rate, "weight_decay": dense.weight_decay}
    if dense.name is DenseOptimizer.sgd:
        settings["momentum"] = dense.momentum
    if dense.name is DenseOptimizer.lamb:
        from pytorch_optimizer import Lamb  # imported here, because that takes a second

        return Lamb(groups, **settings, adam_debias=True)  # or the first step is 10 times as long as the paper's
    classes: dict[DenseOptimizer, type[torch.optim.Optimizer]] = {
        DenseOptimizer.adam: torch.optim.Adam,
        DenseOptimizer.adamw: torch.optim.AdamW,
        DenseOptimizer.adagrad: torch.optim.Adagrad,
        DenseOptimizer.sgd: SGD,
        DenseOptimizer.adafactor: torch.optim.Adafactor,
    }
    if all((parameter.device.type, parameter.dtype) == ("cpu", torch.float32) for parameter in groups[0]["params"]):
        classes |= {DenseOptimizer.adam: Adam, DenseOptimizer.adamw: AdamW}  # checkpoints hold these class names
    on_gpu = any(parameter.is_cuda for parameter in groups[0]["params"])
    lacks_fused = dense.name is DenseOptimizer.adagrad and on_gpu and torch.__version__ < "2.13"
    if dense.name is not DenseOptimizer.adafactor and not lacks_fused:
        settings["fused"] = True  # one kernel instead of ten
    return classes[dense.name](groups, **settings)


def schedule_factor(schedule: ScheduleConfig, num_steps: int, step: int) -> float:
    """Return the factor of the configured learning rates at a step.

    Args:
        num_steps: those of the whole run, over which linear and cosine schedules fall. step: counted from 0.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, num_steps - 1 - schedule.warmup_steps))
    if schedule.name is Schedule.linear:
        return 1.0 + (schedule.final_factor - 1.0) * progress
    if schedule.name is Schedule.cosine:
        return schedule.final_factor + (1 - schedule.final_factor) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0  # the training loop multiplies by the factor of a plateau


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
