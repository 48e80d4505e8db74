"""Random numbers as a function of a key and a counter, the same on any device and any split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:  # keys are for converters too, which do without torch
    import torch

_COLUMN_BITS = 20  # of a counter made of a row and a column


def make_key(*names: int | str) -> int:
    """Return a 64-bit key for a stream of numbers named by integers and strings."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, names)).encode())


def uniform(key: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return numbers of [0, 1) with 24 random bits: the SplitMix64 generator at counter (row, column).

    Args:
        key: of the stream. rows: [n] int64; columns: [m] int64, below 2**20.

    Returns:
        [n, m] float32, exact on every device.
    """
    counter = (rows[:, None] << _COLUMN_BITS) + columns
    bits = _shift_right(_mix(counter * _signed(0x9E3779B97F4A7C15) + _signed(key)), 40)
    return bits.float() * 2.0**-24


def _mix(x: torch.Tensor) -> torch.Tensor:
    # The finalizer of SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2714064.2660195) in wrapping int64.
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask makes the shift logical.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
