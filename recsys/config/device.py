"""Checks of a config against its device and the number of ranks.

A setting for which the device has no kernel is replaced, or refused if the replacement would learn something else.
"""

import math

from recsys.config.choices import ELEMENTWISE, ComputeKernel, DataType, DenseSharding, FloatType
from recsys.config.schema import Config, TableOptimizerConfig
from recsys.config.table_optimizers import optimizer_names
from recsys.errors import UserError


def check_device(config: Config, on_gpu: bool, world_size: int = 1) -> list[str]:
    """Return a sentence for each setting for which the device has no kernel, saying what replaces it.

    Raises:
        UserError: the replacement of a setting would learn something else, a batch has fewer rows than ranks, or
            vectors cannot be sent between ranks in the types of the config.
    """
    check_ranks(config, world_size)
    if world_size > 1:
        _check_wires(config, on_gpu)
    instead = _check_dense_sharding(config, world_size) + _unused_wires(config, world_size)
    if on_gpu:
        for name in config.tables:
            check_table_on_gpu(config, name)
        return instead
    if config.train.activation_offload:
        raise UserError(
            "config key 'train.activation_offload': on CPU activations are in host memory already; set it to false, "
            "and use train.micro_batch_size or train.activation_checkpointing to have fewer of them"
        )
    for name, table in config.tables.items():
        key = f"tables.{name}"
        _check_optimizer(config.table_optimizer(name), config.table_optimizer_key(name))
        if table.data_type is DataType.FP8:
            raise UserError(f"config key '{key}.data_type': FBGEMM trains FP8 on GPUs only; use FP16")
        if table.stochastic_rounding:
            raise UserError(
                f"config key '{key}.stochastic_rounding': FBGEMM's CPU kernels always round to nearest; set it "
                f"to false, or {key}.data_type=FP32"
            )
        if table.compute_kernel is not ComputeKernel.fused:
            instead.append(f"{key}.compute_kernel={table.compute_kernel.name} is fused, in host memory, on CPU")
    if config.precision.output_dtype is FloatType.BF16:
        instead.append("precision.output_dtype=BF16 is FP32 on CPU")
    if config.precision.tf32:
        instead.append("precision.tf32=true changes nothing on CPU")
    return instead


def check_table_on_gpu(config: Config, name: str) -> None:
    """Refuse a table that neither FBGEMM's GPU kernel of its optimizer nor the rule in torch can train.

    Raises:
        UserError: a table that is not in FP32 is in host memory, or has weight decay.
    """
    optimizer, key = config.table_optimizer(name), config.table_optimizer_key(name)
    rule, table = optimizer.name.value, config.tables[name]
    if rule.path is None or rule.in_fbgemm(True, table.data_type):
        return
    only, data_type = f"FBGEMM's {optimizer.name.name} trains tables in FP32 alone on GPUs", table.data_type.name
    instead = f"use tables.{name}.data_type=FP32, or {key}.name={rule.row_wise}"
    if table.compute_kernel is not ComputeKernel.fused:
        raise UserError(
            f"config key 'tables.{name}.compute_kernel': {only}, and a rule in torch those in device memory, found "
            f"{data_type} and {table.compute_kernel.name}; {instead}, or fused"
        )
    if optimizer.weight_decay:
        raise UserError(
            f"config key '{key}.weight_decay': {only}, and a rule in torch others without it, found {data_type} and "
            f"{optimizer.weight_decay}; {instead}, or weight_decay=0"
        )


def _check_dense_sharding(config: Config, world_size: int) -> list[str]:
    sharding, optimizer = config.train.dense_sharding, config.optimizer.dense.name
    if sharding is DenseSharding.none:
        return []
    if optimizer not in ELEMENTWISE:
        raise UserError(
            f"config key 'train.dense_sharding': {optimizer.name} needs the norms of whole parameters, but ranks "
            f"would have only parts of them, found {sharding.name}; use none, or optimizer.dense.name="
            f"{' or '.join(elementwise.name for elementwise in ELEMENTWISE)}"
        )
    return [f"train.dense_sharding={sharding.name} changes nothing on one rank"] if world_size == 1 else []


def _check_wires(config: Config, on_gpu: bool) -> None:
    """Refuse wire types in which FBGEMM's codecs, made for FP32 vectors, cannot send vectors of a narrower type.

    Forward, the codec of FP32 accepts no narrower vectors, and that of BF16 no FP16; FP16 and BF16 both arrive as FP32.
    """
    precision = config.precision
    output, forward, backward = precision.output_dtype, precision.forward_wire, precision.backward_wire
    if output is FloatType.BF16 and not on_gpu:
        output = FloatType.FP32
    if output is FloatType.FP32 or (forward, backward) == (FloatType.FP32, FloatType.FP32):
        return
    allowed = [FloatType.FP16] if output is FloatType.FP16 else [FloatType.BF16, FloatType.FP16]
    if forward not in allowed:
        raise UserError(
            f"config key 'precision.forward_wire': vectors of precision.output_dtype={output.name} are sent between "
            f"ranks as {' or '.join(wire.name for wire in allowed)}, or with both wires FP32, found {forward.name} and "
            f"backward_wire={backward.name}; set it to {output.name}, or both to FP32"
        )


def _unused_wires(config: Config, world_size: int) -> list[str]:
    """Return a sentence for each wire type that is set though one rank sends no vectors."""
    wires = {key: getattr(config.precision, key) for key in ("forward_wire", "backward_wire")}
    is_changed = {key: wire for key, wire in wires.items() if world_size == 1 and wire is not FloatType.FP32}
    return [f"precision.{key}={wire.name} changes nothing on one rank" for key, wire in is_changed.items()]


def _check_optimizer(settings: TableOptimizerConfig, key: str) -> None:
    if not settings.name.value.trains_on_cpu:
        raise UserError(
            f"config key '{key}.name': tables are trained on CPU by {optimizer_names('trains_on_cpu')} only, found "
            f"{settings.name.name}; the nearest is {key}.name={settings.name.nearest_on_cpu.name}"
        )
    if settings.weight_decay:
        raise UserError(
            f"config key '{key}.weight_decay': FBGEMM's CPU kernels ignore it, found "
            f"{settings.weight_decay}; set it to 0"
        )


def check_ranks(config: Config, world_size: int) -> None:
    """Raise a UserError if a global batch has fewer rows than there are ranks."""
    for key in ("global_batch_size", "eval_batch_size"):
        size = getattr(config.train, key)
        if size is not None and size < world_size:
            raise UserError(
                f"config key 'train.{key}' is {size}, so that {world_size - size} of {world_size} ranks would have no "
                f"row of a step; use at least {world_size}, or start at most {size} ranks"
            )


def repeated_decoding(config: Config, world_size: int) -> str | None:
    """Return a sentence if several ranks decode the same stream of data.train, otherwise None."""
    streams = config.data.num_streams
    if streams % world_size == 0:
        return None
    # The borders of streams and ranks cut an epoch into streams + ranks - gcd intervals, each of which costs the
    # decoding of its stream.
    times = (streams + world_size - math.gcd(streams, world_size)) / streams
    better = world_size * min(-(-streams // world_size), config.train.global_batch_size // world_size)
    return (
        f"data.num_streams={streams} is not a multiple of {world_size} ranks, so streams are shared, and rows are "
        f"decoded {times:.3g} times; for a new run, data.num_streams={better} avoids that "
        f"(rows then come in another order)"
    )
