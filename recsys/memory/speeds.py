"""Speeds of a kind of device, in the file that `recsys calibrate` writes and predictions of step time use."""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from recsys.errors import UserError, why
from recsys.runtime.files import replace_file

SCHEMA_VERSION = 2  # 2 added `sharding` and `routed` to the amounts of a step
KINDS = ("plain", "costly", "indexed", "drawn")  # of operators other than matrix products
MATMUL_SIDES = (1, 4, 16, 64, 256, 1024, 4096, 16384)  # rows, inner and outer columns of the products that are measured
BATCHED_SIDES = (4, 8, 16, 32, 64, 128)  # of the square matrices of a batch
MOST_MATMUL_FLOPS = 1 << 30  # of one product; larger ones are no faster
# Amounts that the time to make a batch, and the time of a step without operators and exchanges, are proportional to.
DATA_AMOUNTS = ("step", "feature", "id", "row", "float")
STEP_AMOUNTS = ("step", "feature", "id", "element", "sharding", "routed", "row", "operator", "parameter")

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Speeds:
    """Speeds measured on ranks that computed at the same time.

    Attributes:
        device: its name, from torch or the system; device_type: "cpu" or "cuda".
        ranks: how many; local_ranks: how many of them on one machine; threads: those that compute, of a rank on CPU.
        matmul: by type ("float32", "bfloat16") and "ROWS INNER COLUMNS" the FLOPs a second of a product of matrices.
        batched: by type, pairs of the FLOPs of one product in a batch, and FLOPs a second.
        moved: by kind of operator, pairs of bytes that it reads and writes, and seconds beyond those of a tiny one.
        exchanged: by collective, pairs of bytes that a rank sends, and seconds; empty for one rank.
        data: seconds that the training thread waits for a batch, per unit of each of `DATA_AMOUNTS`.
        step: all other seconds of a step except its operators' work and exchanges, per unit of each of `STEP_AMOUNTS`.
        fits: the trainings from which `data` and `step` were fitted, with seconds a step, measured and fitted.
        versions: versions of the libraries.
    """

    device: str
    device_type: str
    ranks: int
    local_ranks: int
    threads: int
    matmul: Mapping[str, Mapping[str, float]]
    batched: Mapping[str, Curve]
    moved: Mapping[str, Curve]
    exchanged: Mapping[str, Curve]
    data: Mapping[str, float]
    step: Mapping[str, float]
    fits: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]

    def matmul_seconds(self, dtype: str, rows: int, inner: int, columns: int) -> float:
        """Return the time of a product of [rows, inner] and [inner, columns], interpolated between measured sizes."""
        rates = self._rates.get(dtype) or self._rates["float32"]
        sides = [math.log2(side) for side in MATMUL_SIDES]
        places = [_between(sides, math.log2(max(1, side))) for side in (rows, inner, columns)]
        rate = 0.0
        for corner in product((0, 1), repeat=3):
            weight = math.prod(share if end else 1 - share for end, (_, share) in zip(corner, places, strict=True))
            if weight:
                at = tuple(MATMUL_SIDES[first + end] for end, (first, _) in zip(corner, places, strict=True))
                rate += weight * math.log(rates[at])
        return 2 * rows * inner * columns / math.exp(rate)

    @cached_property
    def _rates(self) -> dict[str, dict[tuple[int, ...], float]]:
        """The FLOPs a second at all corners; a product too large to measure has those of the next smaller one."""
        rates_by_dtype: dict[str, dict[tuple[int, ...], float]] = {}
        for dtype, measured in self.matmul.items():
            rates = rates_by_dtype[dtype] = {}
            for sides in product(MATMUL_SIDES, repeat=3):
                smaller = list(sides)
                while (key := " ".join(map(str, smaller))) not in measured and max(smaller) > 1:
                    smaller[smaller.index(max(smaller))] //= 4
                rates[sides] = measured[key]
        return rates_by_dtype

    def batched_seconds(self, dtype: str, flops: float, count: int) -> float:
        """Return the time of a batch of `count` products of `flops` each."""
        return flops * count / max(1.0, interpolate(self.batched.get(dtype) or self.batched["float32"], flops))

    def moved_seconds(self, kind: str, num_bytes: float) -> float:
        """Return the time that an operator of a kind needs to move its bytes."""
        return interpolate(self.moved[kind], num_bytes)

    def exchange_seconds(self, collective: str, num_bytes: float) -> float:
        """Return the time of a collective in which a rank sends `num_bytes`."""
        return interpolate(self.exchanged[collective], num_bytes) if self.exchanged else 0.0

    def save(self, path: Path) -> None:
        """Write the file."""
        replace_file(path, json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Speeds":
        """Return the speeds in a file.

        Raises:
            UserError: the file is missing, or was not written by `recsys calibrate`.
        """
        try:
            content = json.loads(path.read_text())
            if content.pop("schema_version") != SCHEMA_VERSION:
                raise ValueError("it has another schema_version")
            speeds = cls(**content)
            speeds.matmul_seconds("float32", 1, 1, 1)
            _check(speeds)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = why(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"config key 'topology.speeds': cannot read '{path}' ({reason}); it is a file that "
                f"`recsys calibrate FILE` writes"
            ) from error
        return speeds


def _check(speeds: Speeds) -> None:
    """Raise an error if something is missing or is not a number, before a prediction uses it."""
    curves = [speeds.batched["float32"], *speeds.batched.values(), *speeds.exchanged.values()]
    curves += [speeds.moved[kind] for kind in KINDS]
    numbers = [
        speeds.ranks,
        speeds.local_ranks,
        speeds.threads,
        *(value for curve in curves for x in curve for value in x),
    ]
    numbers += [speeds.data[name] for name in DATA_AMOUNTS] + [speeds.step[name] for name in STEP_AMOUNTS]
    if not all(curves) or not all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers):
        raise ValueError("it has a curve without points, or something that is no number from 0 on")


def interpolate(curve: Curve, at: float) -> float:
    """Return a curve's value at `at` > 0: a power law between points and beyond the last, constant before the first."""
    if len(curve) == 1 or at <= curve[0][0]:
        return curve[0][1]
    logs = [(math.log(x), math.log(max(y, 1e-12))) for x, y in curve]
    first = min(bisect_right([x for x, _ in logs], math.log(at)) - 1, len(logs) - 2)
    (x0, y0), (x1, y1) = logs[first : first + 2]
    return math.exp(y0 + (y1 - y0) * (math.log(at) - x0) / (x1 - x0))


def _between(places: Sequence[float], at: float) -> tuple[int, float]:
    """Return the index of the place before `at`, and the share of the way to the next place, from 0 to 1."""
    first = min(max(0, bisect_right(places, at) - 1), len(places) - 2)
    return first, min(1.0, max(0.0, (at - places[first]) / (places[first + 1] - places[first])))
