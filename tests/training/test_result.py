"""The lines that a run ends with."""

import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from recsys.config import load_config
from recsys.training.result import closing_lines, how_to_go_on

MIB = 1 << 20
OWN = ["train.py", "configs/dlrm_sample.yaml", "run.dir=a", "run.overwrite=true", "train.epochs=3"]
HERE: Any = SimpleNamespace(world_size=2, local_world_size=2)


@pytest.mark.parametrize(
    ("parent", "shown"),
    [
        (["bash"], "python -u train.py configs/dlrm_sample.yaml train.epochs=3"),
        (["/py", "/no/torchrun", "--nproc_per_node", "2", *OWN], "/py /no/torchrun --nproc_per_node 2"),
        (["/py", "-m", "torch.distributed.run", "-n", "a b", *OWN], "/py -m torch.distributed.run -n 'a b'"),
        (["/py", "/no/torchrun", "-m", "recsys", *OWN[1:]], "/py /no/torchrun -m recsys"),
    ],
)
def test_the_command_that_goes_on(parent: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", OWN)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", *OWN])
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: parent if self.pid == os.getppid() else OWN)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = load_config("configs/dlrm_sample.yaml", ["run.stop_file=stop"])
    said = how_to_go_on(config, Path("runs/it s"), HERE)
    assert said.startswith(shown + " ") and said.endswith(" train.epochs=3 run.dir='runs/it s' run.resume=true")
    assert said.count("run.dir=") == 1 and "overwrite" not in said
    machines: Any = SimpleNamespace(world_size=4, local_world_size=2)
    assert how_to_go_on(config, Path("a"), machines).startswith("the same command on every machine, and run.dir=a ")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "the same sbatch and run.dir=a" in how_to_go_on(config, Path("a"), machines)


@pytest.mark.parametrize("name", ["it s", "a #1", "a: b", "[a]", "1e3", "null", "'a", '"a" b', "- a", "a\\b", "é$HOME"])
def test_the_command_that_goes_on_names_any_run_directory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell splits the line, and the config reads its words."""
    monkeypatch.setattr(sys, "argv", OWN)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    *_, place, _ = shlex.split(how_to_go_on(load_config("configs/dlrm_sample.yaml"), Path(name), HERE))
    assert load_config("configs/dlrm_sample.yaml", [place]).run.dir == name


def test_a_run_ends_in_five_lines() -> None:
    reports = [
        {
            "identity": {"rank": rank},
            "peak": {"phase": "step", "step": 9, "measured_bytes": peak * MIB, "predicted_bytes": 300 * MIB},
            "host": {"baseline_bytes": 400 * MIB},
        }
        for rank, peak in enumerate([100, 250])
    ]
    metrics = {"valid": {"auc": 0.75, "rows": 9.0}, "test": {"auc": 0.7}}
    result = {"status": "done", "metrics": metrics, "device": "cpu", "steps": 20, "best_step": 10}
    lines = closing_lines(result, reports, Path("runs/a"), "train.py")
    assert lines == [
        "valid: auc 0.7500",
        "test: auc 0.7000",
        "peak memory: 250 MiB above the 400 MiB of libraries, 300 MiB predicted (step 9, rank 1): runs/a/report.html",
        "done at step 20, the best is step 10: runs/a/result.json",
    ]
    lines = closing_lines(result | {"status": "stopped", "metrics": {}}, reports[:1], Path("runs/a"), "train.py")
    assert lines[1:] == ["stopped at step 20: runs/a/result.json", "go on with: train.py"]
