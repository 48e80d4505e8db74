"""Memory that grows over the steps is named with its kind and rate, and what only settles is not."""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import fork_train

from recsys.memory import Timeline, growth
from recsys.memory.growth import Growth, describe_growth
from recsys.memory.measure import heap

MIB = 1 << 20
KEPT_BYTES = 2 * MIB


def warm_up_fast() -> None:
    """Let growth be looked for after 30 steps."""
    growth._WARM_UP, growth._LEAST_SECONDS = 30, 0.0


def keep_a_tensor_each_step() -> None:
    """Let the model keep 2 MiB in every forward pass."""
    from recsys.models.dlrm import DLRM

    warm_up_fast()
    kept: list[torch.Tensor] = []
    forward = DLRM.forward

    def leaking(self: Any, *arguments: Any) -> Any:
        kept.append(torch.ones(KEPT_BYTES // 4))
        return forward(self, *arguments)

    DLRM.forward = leaking  # type: ignore[method-assign]


def run(folder: Path, *options: str, before: Callable[[], None]) -> tuple[str, str, dict[str, Any], str]:
    """Train; return both outputs, the report and its page."""
    steps = ("train.epochs=10", "train.global_batch_size=64", "train.log_every_steps=2", "data.test=null")
    done = fork_train("configs/dlrm_sample.yaml", f"run.dir={folder}", *steps, *options, before=before)
    report = json.loads((folder / "memory" / "rank_0.json").read_text())
    return done.stdout, done.stderr, report, (folder / "memory" / "report.md").read_text()


@pytest.mark.slow
def test_a_leak_is_named_before_it_ends_the_run(tmp_path: Path) -> None:
    out, error, report, page = run(tmp_path, "memory.budget=720MiB", before=keep_a_tensor_each_step)
    assert "memory.budget allows 720" in error and report["identity"]["status"] == "out of memory"
    end, grown = report["identity"]["step"], report["growth"]["bytes_per_1000_steps"]
    assert grown["process"] == pytest.approx(1000 * KEPT_BYTES, rel=0.2)
    assert grown["tensors and other blocks of malloc"] == pytest.approx(1000 * KEPT_BYTES, rel=0.2)
    (warning,) = [line for line in out.splitlines() if "memory grows by" in line]
    said = re.fullmatch(
        r"warning: step (\d+): memory grows by .* GiB in 1,000 steps \(([^:]*): .*by about step (\d+) of 470", warning
    )
    assert said is not None and said[2] == "tensors and other blocks of malloc", warning
    assert int(said[1]) < 0.85 * end and abs(int(said[3]) - end) < 0.2 * end
    assert "- Growth from step " in page and "tensors and other blocks of malloc" in page


@pytest.mark.slow
def test_a_run_that_does_not_leak_is_left_alone(tmp_path: Path) -> None:
    """With a budget just above what it takes, evaluations, saves and epochs of small windows."""
    often = ("train.eval_every_steps=30", "train.checkpoint_every_steps=40", "data.window_mib=1")
    out, error, report, page = run(tmp_path, "memory.budget=540MiB", "train.max_steps=150", *often, before=warm_up_fast)
    assert not error and "memory grows" not in out and report["growth"]["warning"] is None
    assert abs(report["growth"]["bytes_per_1000_steps"]["process"]) < 100 * MIB
    assert "- Growth from step " in page


def simulate(
    monkeypatch: pytest.MonkeyPatch, size: Callable[[int], float], limit: float, num_steps: int
) -> tuple[str | None, Growth]:
    """Take samples of a process of `size` MiB at each fiftieth step; return the warning, if any."""
    now = [0]
    monkeypatch.setattr(growth, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(growth, "_kinds", lambda *_: {"process": int(now[0] * MIB), "Arrow": 0})
    machine: Any = SimpleNamespace(host_share_bytes=int(limit * MIB), on_gpu=False)
    samples, warning = Growth(torch.device("cpu"), machine, num_steps), None
    for step in range(50, num_steps + 1, 50):
        now[0] = size(step)
        warning = samples.sample(step, {}) or warning
    return warning, samples


@pytest.mark.parametrize("seed", range(10))
def test_what_settles_is_no_growth(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(seed)
    high, taken, walk = 0.0, 0.0, 0.0

    def records(step: int) -> float:  # windows of later size, whose largest stays
        nonlocal high
        high = max(high, random_.gauss(60, 20))
        return high

    def evaluations(step: int) -> float:
        nonlocal taken
        taken = max(taken, random_.uniform(20, 60)) if step % 500 == 0 else taken
        return taken + random_.gauss(0, 2)

    def drift(step: int) -> float:
        nonlocal walk
        walk += random_.gauss(0, 0.5)
        return walk

    rate = random_.uniform(20, 150)
    sizes: dict[str, tuple[Callable[[int], float], float]] = {
        "settles": (lambda step: 300 * (1 - math.exp(-step / rate)) + random_.gauss(0, 1), 330),
        "slows": (lambda step: 20 * math.log(step), 20 * math.log(20_000) + 40),
        "wobbles": (lambda step: random_.gauss(0, 20), 100),
        "jumps": (lambda step: 60.0 * (step > 900) + 60.0 * (step > 4000), 200),
        "records": (records, 150),
        "evaluations": (evaluations, 90),
        "drifts": (drift, 300),
    }
    for name, (size, limit) in sizes.items():
        for num_steps in (1000, 20_000):
            warning, _ = simulate(monkeypatch, lambda step, size=size: 500 + size(step), 500 + limit, num_steps)  # type: ignore
            assert warning is None, (name, num_steps, warning)


@pytest.mark.parametrize("noise", [0, 1, 4])
@pytest.mark.parametrize("num_steps", [4000, 1_000_000])
def test_growth_is_measured_and_told(noise: int, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(0)
    rate = 200 / num_steps  # MiB a step

    def size(step: int) -> float:
        once = 80 * (step > num_steps / 3) + 100 * (1 - math.exp(-step / 150))
        return 500 + rate * step + once + random_.gauss(0, noise)

    warning, samples = simulate(monkeypatch, size, 820, num_steps)
    found = samples.report()
    assert found is not None and found["bytes_per_1000_steps"]["process"] == pytest.approx(1000 * rate * MIB, rel=0.2)
    assert (
        warning is not None
        and "Python's objects and all else" in warning
        and "its limit of 820 MiB by about step" in warning
    )
    assert len(samples._steps) < 512
    assert simulate(monkeypatch, size, 1000, num_steps)[0] is None  # the end comes first


def test_kinds_are_named_by_what_they_grow() -> None:
    sizes = {"process": 100 * MIB, "Arrow": 60 * MIB, "loader's window blocks": 35 * MIB, "what malloc keeps free": MIB}
    sizes |= {"GPU": 8 * MIB, "GPU tensors": 7 * MIB}
    assert describe_growth(sizes) == "100 MiB in 1,000 steps (Arrow: 60.0 MiB, loader's window blocks: 35.0 MiB)"
    assert describe_growth(sizes, "GPU") == "8.00 MiB in 1,000 steps (GPU tensors: 7.00 MiB)"


def test_malloc_tells_what_it_has_given_out() -> None:
    before = heap()
    if before is None:
        pytest.skip("a C library without mallinfo2")
    kept = [torch.ones(MIB // 4) for _ in range(40)] + [torch.ones(10 * MIB)]
    after = heap()
    assert after is not None and after[0] - before[0] == pytest.approx(80 * MIB, rel=0.05) and len(kept) == 41


def test_a_timeline_of_many_phases_stays_short() -> None:
    timeline = Timeline(torch.device("cpu"))
    for number in range(3000):
        with timeline.phase("save" if number % 7 else "evaluation"):
            timeline.step = number
            kept = torch.ones(16 * MIB) if number == 1234 else None
            del kept
    peaks, highest = timeline.peaks(), timeline.peak()
    timeline.close()
    assert len(timeline.spans) <= 610 and peaks["save"] == highest.peak_bytes and highest.step == 1234
