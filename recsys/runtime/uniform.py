"""Uniform random numbers as tensors, by the generator of `counter_random`."""

import torch

from recsys.runtime.counter_random import COLUMN_BITS, INCREMENT, MIXING, at_least, uniform_numbers


def uniform(key: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return `uniform_numbers` on the device of `rows`, exact on every device.

    Args:
        key: of the stream. rows: [n] int64. columns: [m] int64, below 2**20.

    Returns:
        [n, m] float32.
    """
    if rows.device.type == "cpu":
        return _on_cpu(_signed(key), rows, columns)
    x = ((rows[:, None] << COLUMN_BITS) + columns) * _signed(INCREMENT) + _signed(key)
    for shift, factor in MIXING:
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return _shift_right(x, 40).float() * 2.0**-24


def kept(key: int, rows: torch.Tensor, columns: torch.Tensor, share: float) -> torch.Tensor:
    """Return which elements dropout of a share keeps, bool [n, m]: those whose `uniform` number is at least `share`."""
    if rows.device.type == "cpu":
        return _kept_on_cpu(_signed(key), rows, columns, share)
    return uniform(key, rows, columns) >= share


# These are custom operators because on CPUs, blocks in the cache take a quarter of the time of torch's passes over
# memory, and so that fake tensors and torch.compile know the result's shape.
@torch.library.custom_op("recsys::uniform", mutates_args=(), device_types="cpu")
def _on_cpu(key: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(uniform_numbers(key % (1 << 64), rows.numpy(), columns.numpy()))


@_on_cpu.register_fake
def _(key: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(len(rows), len(columns), dtype=torch.float32)


@torch.library.custom_op("recsys::kept", mutates_args=(), device_types="cpu")
def _kept_on_cpu(key: int, rows: torch.Tensor, columns: torch.Tensor, share: float) -> torch.Tensor:
    return torch.from_numpy(at_least(share, key % (1 << 64), rows.numpy(), columns.numpy()))


@_kept_on_cpu.register_fake
def _(key: int, rows: torch.Tensor, columns: torch.Tensor, share: float) -> torch.Tensor:
    return rows.new_empty(len(rows), len(columns), dtype=torch.bool)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask makes the shift logical.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
