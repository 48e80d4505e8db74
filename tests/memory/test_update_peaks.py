"""Peaks of steps in which updates take most."""

from pathlib import Path

import benchmark_peaks as peaks
import pytest

_LISTS = ("train.global_batch_size=16384", "train.max_steps=3", "data.prefetch_batches=0")
_WIDE = {"top_mlp": [4096, 4096]}


@pytest.mark.parametrize(
    ("nproc", "optimizer"),
    [
        (1, "tables.name=adam"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "tables.name=ftrl"), (1, "dense.name=lamb"))),
        pytest.param(1, "dense.name=adafactor", marks=pytest.mark.slow),
    ],
)
def test_what_updates_take_besides_is_predicted(nproc: int, optimizer: str, tmp_path: Path) -> None:
    """A gradient by each id of a pooled list, where rules in torch train tables; updates of the widest layer or all."""
    if optimizer.startswith("tables"):
        case = peaks.Case(40_000, ids=2, lists=2, length=25, num_embeddings=20_000, nproc=nproc, overrides=_LISTS)
    else:
        small = ("train.global_batch_size=64", "train.max_steps=2")
        case = peaks.Case(2000, ids=2, num_embeddings=100, dim=8, model=_WIDE, nproc=nproc, overrides=small)
    for peak in peaks.measure(case, tmp_path, f"optimizer.{optimizer}", "run.num_threads=1"):
        assert peak["by_kind_predicted"]["update_temporaries"] > 48 * peaks.MIB
        assert peaks.is_near(peak["predicted_bytes"], peak["measured_bytes"]), peak
