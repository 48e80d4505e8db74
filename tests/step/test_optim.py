"""Optimizers as the config asks for them, and the learning rate by the step alone."""

import copy
import inspect
import math
from dataclasses import replace

import pytest
import pytorch_optimizer
import torch
import torchrec.optim.optimizers as table_optimizers
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys.config import Config, OptimizerConfig, Schedule, TableConfig, TableOptimizerConfig, load_config
from recsys.config.choices import ComputeKernel, DataType, DenseOptimizer, StateType
from recsys.config.device import check_device
from recsys.config.schema import DenseOptimizerConfig, ScheduleConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError
from recsys.step.optim import SGD, Adam, AdamW, build_dense_optimizer, schedule_factor, set_learning_rate
from recsys.tables.updates import attach_table_optimizers, in_fbgemm


def parameters(count: int = 1) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, 4)) for _ in range(count)]


def test_lamb_is_that_of_its_paper() -> None:
    """You et al. 2020, arXiv:1904.00962, with decay apart as of AdamW."""
    torch.manual_seed(0)
    (parameter,) = parameters()
    dense = DenseOptimizerConfig(DenseOptimizer.lamb, learning_rate=0.1, weight_decay=0.2)
    optimizer = build_dense_optimizer([parameter], OptimizerConfig(dense=dense))
    weights, mean, squares = parameter.detach().double(), 0.0, 0.0
    for step in range(1, 5):
        gradient = torch.randn(2, 4)
        parameter.grad = gradient.clone()
        optimizer.step()
        mean, squares = 0.9 * mean + 0.1 * gradient.double(), 0.999 * squares + 0.001 * gradient.double() ** 2
        ratio = mean / (1 - 0.9**step) / ((squares / (1 - 0.999**step)).sqrt() + 1e-6)
        weights = weights * (1 - 0.1 * 0.2)
        weights = weights - 0.1 * weights.norm() / ratio.norm() * ratio
        torch.testing.assert_close(parameter.detach().double(), weights, rtol=1e-4, atol=1e-4)


def factors(num_steps: int, count: int, **schedule) -> list[float]:
    return [schedule_factor(ScheduleConfig(**schedule), num_steps, step) for step in range(count)]


def test_constant():
    assert factors(10, 12) == [1] * 12
    assert factors(10, 6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear():
    expected = [1, 0.75, 0.5, 0.25, 0, 0]
    assert factors(5, 6, name=Schedule.linear) == pytest.approx(expected)
    expected = [0.5, 1, 1, 0.85, 0.7, 0.55, 0.4, 0.4]
    assert factors(7, 8, name=Schedule.linear, warmup_steps=2, final_factor=0.4) == pytest.approx(expected)


def test_cosine():
    half = math.sqrt(0.5)
    expected = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0]
    assert factors(5, 6, name=Schedule.cosine) == pytest.approx(expected)
    expected = [1 / 3, 2 / 3, 1, 1, 0.6, 0.2, 0.2]
    assert factors(6, 7, name=Schedule.cosine, warmup_steps=3, final_factor=0.2) == pytest.approx(expected)


@pytest.mark.parametrize("name", list(Schedule))
def test_short_runs(name):
    assert factors(1, 1, name=name) == [1]
    assert factors(3, 3, name=name, warmup_steps=10) == pytest.approx([0.1, 0.2, 0.3])
    assert factors(3, 3, name=name, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])


def test_the_rate_of_every_group_is_set():
    dense = torch.optim.Adam([{"params": [each]} for each in parameters(2)], lr=99.0)
    set_learning_rate(dense, 0.0075)
    assert [group["lr"] for group in dense.param_groups] == [0.0075, 0.0075]


ADAM = {"lr": 0.2, "eps": 1e-3, "beta1": 0.8, "beta2": 0.9}
TABLE_OPTIMIZERS = {
    TableOptimizer.rowwise_adagrad: (RowWiseAdagrad, {"lr": 0.2, "eps": 1e-3}),
    TableOptimizer.adagrad: (table_optimizers.Adagrad, {"lr": 0.2, "eps": 1e-3}),
    TableOptimizer.sgd: (table_optimizers.SGD, {"lr": 0.2}),
    TableOptimizer.adam: (table_optimizers.Adam, ADAM),
    TableOptimizer.partial_rowwise_adam: (table_optimizers.PartialRowWiseAdam, ADAM),
    TableOptimizer.lamb: (table_optimizers.LAMB, ADAM),
    TableOptimizer.partial_rowwise_lamb: (table_optimizers.PartialRowWiseLAMB, ADAM),
    TableOptimizer.ftrl: (table_optimizers.SGD, {"lr": 0.0}),  # FBGEMM gets no gradient of it
}


def config_of(common: TableOptimizerConfig, **tables: TableOptimizerConfig | None) -> Config:
    settings = {name: TableConfig(2, 4, optimizer=optimizer) for name, optimizer in tables.items()}
    return Config(tables=settings, optimizer=OptimizerConfig(tables=common))


@pytest.mark.parametrize("name", list(TableOptimizer))
def test_table_optimizer_of_each_table(name):
    settings = TableOptimizerConfig(name=name, learning_rate=0.2, eps=1e-3, beta1=0.8, beta2=0.9, weight_decay=0.5)
    one, other = parameters(2)
    config = config_of(settings, one=None, other=TableOptimizerConfig(TableOptimizer.sgd, 0.1))
    attach_table_optimizers({"one": one, "other": other}, config, on_gpu=True)
    # What torchrec reads when it shards the tables.
    kind, expected = TABLE_OPTIMIZERS[name]
    assert vars(one)["_optimizer_classes"] == [kind]
    decay = {} if name is TableOptimizer.ftrl else {"weight_decay": 0.5}
    if name is TableOptimizer.rowwise_adagrad:
        decay["weight_decay_mode"] = WeightDecayMode.DECOUPLE
    assert vars(one)["_optimizer_kwargs"] == [expected | decay]
    assert decay.keys() < inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters.keys()
    assert vars(other)["_optimizer_classes"] == [table_optimizers.SGD]
    assert vars(other)["_optimizer_kwargs"] == [{"lr": 0.1}]


def test_state_in_bf16_reaches_fbgemm_grouped_with_its_like():
    half = TableOptimizerConfig(TableOptimizer.partial_rowwise_adam, state_dtype=StateType.BF16)
    tables = dict(zip("abc", parameters(3), strict=True))
    config = config_of(half, a=None, b=None, c=TableOptimizerConfig(TableOptimizer.partial_rowwise_adam))
    attach_table_optimizers(tables, config, on_gpu=True)
    given = {name: vars(weight)["_optimizer_kwargs"][0] for name, weight in tables.items()}
    assert given["a"]["optimizer_state_dtypes"]["momentum1"].as_dtype() is torch.bfloat16
    keys = [tuple(sorted(given[name].items())) for name in "abc"]  # as torchrec's group_tables makes them
    assert len(set(keys)) == 2 and keys[0] == keys[1]


@pytest.mark.parametrize("kernel", list(ComputeKernel))
@pytest.mark.parametrize("data_type", list(DataType))
def test_adam_of_tables_that_are_not_in_fp32_is_a_rule_in_torch_on_gpus(data_type: DataType, kernel: ComputeKernel):
    """As an H100 has shown, FBGEMM's kernel takes FP32 alone; the rule is for tables in device memory."""
    for decay in (0.0, 0.1):
        config = config_of(TableOptimizerConfig(TableOptimizer.adam, weight_decay=decay), item=None)
        config.tables["item"] = replace(config.tables["item"], data_type=data_type, compute_kernel=kernel)
        assert in_fbgemm(config, "item", on_gpu=True) == (data_type is DataType.FP32)
        if data_type is DataType.FP32 or (kernel is ComputeKernel.fused and not decay):
            assert check_device(config, on_gpu=True) == []
            continue
        key = "tables.item.compute_kernel" if kernel is not ComputeKernel.fused else "optimizer.tables.weight_decay"
        with pytest.raises(UserError, match=rf"'{key}': FBGEMM's adam .* FP32 .*name=partial_rowwise_adam"):
            check_device(config, on_gpu=True)


def test_what_fbgemm_lacks_on_cpu_is_refused():
    for name in TableOptimizer:
        config = config_of(TableOptimizerConfig(), item=TableOptimizerConfig(name))
        assert check_device(config, on_gpu=True) == []
        if name.value.on_cpu or name in (TableOptimizer.adam, TableOptimizer.ftrl):
            assert check_device(config, on_gpu=False) == []
            continue
        with pytest.raises(UserError, match=rf"tables.item.optimizer.name.*{name.name}.*nearest is .*name="):
            check_device(config, on_gpu=False)
    with pytest.raises(UserError, match=r"'optimizer.tables.weight_decay'"):
        check_device(config_of(TableOptimizerConfig(weight_decay=0.1), item=None), on_gpu=False)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "optimizer.tables={name: sgd, weight_decay: 0.1}",
            "'optimizer.tables.weight_decay': sgd ignores it",
        ),
        (
            "tables.user.optimizer={name: adagrad, weight_decay: 0.1}",
            "'tables.user.optimizer.weight_decay': adagrad ignores",
        ),
        (
            "tables.user={sharding_type: data_parallel, optimizer: {weight_decay: 0.1}}",
            "'tables.user.optimizer.weight_decay': replicated tables are trained without it, found 0.1",
        ),
        ("optimizer.tables.l1=0.1", "'optimizer.tables.l1' is for .*ftrl, found rowwise_adagrad"),
        (
            "tables.user={compute_kernel: fused_uvm, optimizer: {name: ftrl}}",
            "'tables.user.compute_kernel': ftrl trains tables in device memory, found fused_uvm",
        ),
        ("optimizer.schedule.name=plateau", "'optimizer.schedule.name': plateau follows train.early_stop.metric"),
        ("optimizer.tables.name=lars_sgd", "'optimizer.tables.name' must be one of .*, found 'lars_sgd'"),
    ],
)
def test_weight_decay_that_nothing_reads_and_what_cannot_be_built_are_refused(setting, said):
    with pytest.raises(UserError, match=said):
        load_config("configs/dlrm_sample.yaml", [setting])


DENSE_OPTIMIZERS = {
    DenseOptimizer.adam: Adam,
    DenseOptimizer.adamw: AdamW,
    DenseOptimizer.adagrad: torch.optim.Adagrad,
    DenseOptimizer.sgd: SGD,
    DenseOptimizer.adafactor: torch.optim.Adafactor,
    DenseOptimizer.lamb: pytorch_optimizer.Lamb,
}


@pytest.mark.parametrize("name", list(DenseOptimizer))
def test_dense_optimizer(name):
    config = OptimizerConfig()
    config.dense.name, config.dense.learning_rate, config.dense.weight_decay = name, 0.2, 0.125
    model = torch.nn.Linear(3, 2)
    optimizer = build_dense_optimizer(model.parameters(), config)
    assert type(optimizer) is DENSE_OPTIMIZERS[name]
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.2, 0.125)
    assert [id(each) for each in group["params"]] == [id(each) for each in model.parameters()]
    if name is DenseOptimizer.sgd:
        config.dense.momentum = 0.25
        assert build_dense_optimizer(model.parameters(), config).param_groups[0]["momentum"] == 0.25


@pytest.mark.parametrize("name", list(DenseOptimizer))
def test_a_parameter_without_numbers_is_left_alone(name: DenseOptimizer) -> None:
    """As a factorisation machine without float features has one."""
    (parameter,), empty = parameters(), torch.nn.Parameter(torch.empty(0, 4))
    optimizer = build_dense_optimizer([empty, parameter], OptimizerConfig(dense=DenseOptimizerConfig(name)))
    for trained in (empty, parameter):
        trained.grad = torch.ones_like(trained)
    optimizer.step()
    assert empty.shape == (0, 4) and parameter.isfinite().all() and (parameter < 1).all()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_on_a_cpu_gives_what_torch_gives(kind):
    """Over steps with and without all gradients, a step that is left out, and a state that is loaded."""
    config = OptimizerConfig()
    config.dense.name, config.dense.weight_decay = DenseOptimizer[kind.__name__.lower()], 0.01
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    other = copy.deepcopy(model)
    own = build_dense_optimizer(model.parameters(), config)
    theirs = kind(other.parameters(), config.dense.learning_rate, weight_decay=0.01, fused=True)
    assert type(own).__name__ == kind.__name__  # which checkpoints say
    for step in range(12):
        for parameters, optimizer in ((model.parameters(), own), (other.parameters(), theirs)):
            torch.manual_seed(step)
            for number, parameter in enumerate(parameters):
                parameter.grad = None if step in (2, 7) and number == 1 else torch.randn(parameter.shape)
            set_learning_rate(optimizer, 0.1 / (step + 1))
            if step == 9:
                optimizer.found_inf = torch.ones(())
            optimizer.step()
            if step == 9:
                del optimizer.found_inf
            if step == 5:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another) and not torch.equal(one, torch.zeros_like(one))
        assert own.state[one].keys() == theirs.state[another].keys()
        for name, value in own.state[one].items():
            assert torch.equal(value, theirs.state[another][name])
    build_dense_optimizer([], config).step()  # of a dense part without parameters


@pytest.mark.parametrize("left_out", [0, 2])
def test_momentum_goes_on_from_a_step_that_the_device_leaves_out(left_out):
    """As if the step had not been, be it the first: what nobody has written is NaN here."""
    config = OptimizerConfig()
    config.dense.name, config.dense.momentum, config.dense.weight_decay = DenseOptimizer.sgd, 0.9, 0.01
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    other = copy.deepcopy(model)
    own = build_dense_optimizer(model.parameters(), config)
    theirs = torch.optim.SGD(other.parameters(), config.dense.learning_rate, 0.9, weight_decay=0.01, fused=True)
    assert type(own).__name__ == type(theirs).__name__  # which checkpoints say
    torch.use_deterministic_algorithms(True)
    try:
        for step in range(5):
            gradients = [torch.randn(parameter.shape) for parameter in model.parameters()]
            own.found_inf = torch.tensor(float(step == left_out))
            for optimizer in (own,) if step == left_out else (own, theirs):
                for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                    parameter.grad = gradient.clone()
                optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)
        assert own.state[one].keys() == theirs.state[another].keys() == {"momentum_buffer"}
        assert torch.equal(own.state[one]["momentum_buffer"], theirs.state[another]["momentum_buffer"])


@pytest.mark.parametrize("beta", ["beta1", "beta2"])
def test_averages_that_never_take_a_gradient_are_refused(beta: str) -> None:
    """The correction of Adam's averages divides by 1 - beta ** updates."""
    with pytest.raises(UserError, match=f"'optimizer.tables.{beta}' must be below 1, found 1.0"):
        load_config("configs/dlrm_sample.yaml", [f"optimizer.tables.{beta}=1"])
