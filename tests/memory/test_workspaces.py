"""What operators use besides, and the peaks that an H100 has shown, predicted without one."""

import json
from pathlib import Path

import benchmark_peaks as peaks
import pytest
import torch
import yaml
from launch import ROOT

from recsys.config import load_config
from recsys.memory.dry_run import rehearse_run
from recsys.memory.workspaces import workspace_bytes

MEASURED = json.loads((ROOT / "benchmarks/peaks_gpu.json").read_text())["peaks"]
NOT_TENSORS = ("allocator_reserve", "context")


@pytest.mark.parametrize(
    ("rows", "width", "mib"),
    [
        (4096, 1024, 32),  # the first three as seen on an H100 in the allocator's history
        (4096, 4096, 128),
        (32768, 512, 128),
        (65536, 1024, 132),  # no more blocks than there is place for
        (512, 1024, 0),  # too few rows to share out
    ],
)
def test_sums_over_rows(rows: int, width: int, mib: int) -> None:
    gradient = torch.empty(rows, width, device="meta")
    assert workspace_bytes(torch.ops.aten.sum.dim_IntList, (gradient, [0])) == mib << 20
    assert workspace_bytes(torch.ops.aten.sum.dim_IntList, (gradient.view(2, -1, width), [0, -2])) == mib << 20
    for dims in ([1], [0, 1], None):
        assert workspace_bytes(torch.ops.aten.sum.dim_IntList, (gradient, dims)) == 0
    assert workspace_bytes(torch.ops.aten.add.Tensor, (gradient, gradient)) == 0


FAST = ("lists",)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MEASURED if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_peaks_of_an_h100_are_predicted_without_one(name: str, tmp_path: Path) -> None:
    case, (measured,) = peaks.CASES[name], MEASURED[name]
    peaks.write_rows(case, tmp_path / "data")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(case.settings(tmp_path / "data")))
    there = ("topology.device=cuda", "topology.device_memory=80GiB")
    (rank,) = rehearse_run(load_config(tmp_path / "config.yaml", [*case.overrides, *there])).prediction.ranks
    taken = [
        sum(size for kind, size in kinds["device"].items() if kind not in NOT_TENSORS) for kinds in rank.phases.values()
    ]
    assert max(taken) == pytest.approx(measured["measured_bytes"], rel=0.03)


@pytest.mark.parametrize(("name", "multiplies"), [("dlrm", True), ("logistic_regression", False)])
def test_products_of_matrices_keep_memory(name: str, multiplies: bool, tmp_path: Path) -> None:
    case = peaks.Case(500, ids=2, num_embeddings=100, dim=8, model={"name": name})
    peaks.write_rows(case, tmp_path / "data")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(case.settings(tmp_path / "data")))
    (rank,) = rehearse_run(load_config(tmp_path / "config.yaml", case.overrides)).prediction.ranks
    assert ("blas_workspaces" in rank.phases["step"]["host"]) == multiplies
