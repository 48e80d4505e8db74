"""Checks of settings of optimizers: numbers that have no effect, and schedules without the metric they follow."""

from collections.abc import Iterator

from recsys.config.choices import Autocast, ComputeKernel, DenseOptimizer, Schedule, ShardingChoice, StateType
from recsys.config.schema import Config, TableConfig, TableOptimizerConfig
from recsys.config.table_optimizers import optimizer_names
from recsys.errors import UserError


def check_optimizers(config: Config) -> None:
    """Raise a UserError for a setting of an optimizer, or of the schedule, that would have no effect."""
    for name in config.tables:
        _check_table_optimizer(config.table_optimizer(name), config.table_optimizer_key(name))
    _check_plateau(config)
    if not config.train.check_every_step and (key := next(_needing_checks(config), None)):
        raise UserError(f"config key 'train.check_every_step' must be true with {key}")


def _check_table_optimizer(optimizer: TableOptimizerConfig, key: str) -> None:
    rule, name = optimizer.name.value, optimizer.name.name
    if optimizer.state_dtype is StateType.BF16 and not rule.bf16_state:
        raise UserError(
            f"config key '{key}.state_dtype': FBGEMM keeps BF16 state for {optimizer_names('bf16_state')} only, found "
            f"{key}.name={name}; use FP32, or that optimizer"
        )
    if optimizer.l1 and "l1" not in rule.numbers:
        raise UserError(f"config key '{key}.l1' is for {key}.name=ftrl, found {name}; set it to 0, or change the name")
    if optimizer.weight_decay and not rule.reads_decay:
        raise UserError(
            f"config key '{key}.weight_decay': {name} ignores it, found {optimizer.weight_decay}; "
            f"set it to 0, or use {key}.name=rowwise_adagrad"
        )


def check_replicated(config: Config, name: str, table: TableConfig) -> None:
    """Raise a UserError for settings that do not go with a table that every rank holds, for its plan or l2_all_rows."""
    optimizer, key = config.table_optimizer(name), config.table_optimizer_key(name)
    choice, remedy = table.sharding_type, f"tables.{name}.sharding_type to another"
    if table.l2_all_rows:
        remedy = f"tables.{name}.l2_all_rows to 0 (tables.{name}.l2 holds back the rows that a step looks up)"
        by_id = name in config.unpooled_tables()
        if by_id or choice not in (ShardingChoice.auto, ShardingChoice.data_parallel):
            found = "one that is looked up id by id" if by_id else f"sharding_type: {choice.name}"
            raise UserError(
                f"config key 'tables.{name}.l2_all_rows' is for replicated tables (sharding_type: data_parallel) "
                f"whose lists are summed or averaged, found {found}; set {remedy}"
            )
    if table.compute_kernel is not ComputeKernel.fused:
        raise UserError(
            f"config key 'tables.{name}.compute_kernel': a replicated table lies in device memory, found "
            f"{table.compute_kernel.name}; use fused, or set {remedy}"
        )
    if optimizer.weight_decay:
        raise UserError(
            f"config key '{key}.weight_decay': replicated tables are trained without it, found "
            f"{optimizer.weight_decay}; set it to 0, or {remedy}"
        )
    if not optimizer.name.value.in_torch:
        raise UserError(
            f"config key '{key}.name': replicated tables are trained by {optimizer_names('in_torch')}, "
            f"found {optimizer.name.name}; use one of these, or set {remedy}"
        )


def _needing_checks(config: Config) -> Iterator[str]:
    """Yield settings that need to know at each step whether it was finite."""
    dense = config.optimizer.dense.name
    if config.precision.autocast is Autocast.fp16:
        yield "precision.autocast=fp16, whose loss scale follows each step"
    if dense in (DenseOptimizer.adafactor, DenseOptimizer.lamb):
        yield f"optimizer.dense.name={dense.name}, which cannot leave out a step that it is given"
    if config.train.publish.dir is not None:
        yield "train.publish.dir, which asks all ranks in each step"
    for name, table in config.tables.items():
        optimizer, key = config.table_optimizer(name), config.table_optimizer_key(name)
        moving = {
            f"{key}.name={optimizer.name.name}": not optimizer.name.value.leaves_idle_rows,
            f"{key}.weight_decay={optimizer.weight_decay:g}": optimizer.weight_decay,
            f"tables.{name}.sparsity": table.sparsity is not None,
            f"tables.{name}.l2_all_rows={table.l2_all_rows:g}": table.l2_all_rows,
        }
        yield from (f"{setting}, which moves rows without a gradient too" for setting, moves in moving.items() if moves)


def _check_plateau(config: Config) -> None:
    schedule, stop = config.optimizer.schedule, config.train.early_stop
    if schedule.name is not Schedule.plateau:
        return
    if stop.metric is None:
        raise UserError(
            "config key 'optimizer.schedule.name': plateau follows train.early_stop.metric, which is not set; set it, "
            "or another schedule"
        )
    if stop.patience <= schedule.plateau_patience:
        raise UserError(
            f"config key 'optimizer.schedule.plateau_patience' must be less than train.early_stop.patience="
            f"{stop.patience}, with which the run ends, found {schedule.plateau_patience}"
        )
