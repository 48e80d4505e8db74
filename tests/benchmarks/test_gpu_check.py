"""What a check of a GPU does before and beside the GPU's own work: its parts, their settings and what they keep."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_matrix
import benchmark_peaks
import pytest
import step_trace
import throughput
import torch
import two_ranks
from launch import ROOT
from torch.autograd import DeviceType

from recsys.config import load_config


def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts/gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_part_that_hangs_is_stopped_and_those_behind_it_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = script()

    def part(seconds: int, code: str) -> Any:
        return check.Part(seconds, ("-c", code), writes=False)

    deaf = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('begun', flush=True); time.sleep(99)"
    )
    parts = {
        "hangs": part(3, f"{deaf}; time.sleep(99)"),
        "fails": part(9, "raise SystemExit(3)"),
        "works": part(9, "print('{device}')"),
    }
    monkeypatch.setattr(check, "_PARTS", parts)
    monkeypatch.setattr(check, "_GRACE_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path), "--device", "cpu", "--parts", *parts])
    assert check.main() == 1
    found = json.loads((tmp_path / "parts.json").read_text())["parts"]
    assert [found[name]["status"] for name in parts] == ["stopped after 3 s", 3, 0]
    assert (tmp_path / "hangs.log").read_text() == "begun\n" and (tmp_path / "works.log").read_text() == "cpu\n"
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--seconds", "0"])
    assert check.main() == 1
    assert {each["status"] for each in json.loads((tmp_path / "parts.json").read_text())["parts"].values()} == {
        "no time was left"
    }


@pytest.mark.slow
def test_the_settings_of_all_cases_are_a_configs() -> None:
    for overrides in benchmark_matrix.cases().values():
        load_config(benchmark_matrix.CONFIG, overrides)
    for overrides in two_ranks.CASES.values():
        load_config(two_ranks.CONFIG, overrides)
    sizes = SimpleNamespace(max_rows=10_000_000, dim=128, batch_size=65536)
    for shape in throughput.MODELS:
        for overrides in throughput.VARIANTS.values():
            throughput.config_of(shape, Path("data"), sizes, overrides)


def test_products_are_in_tf32_where_throughput_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Begun(Exception):
        pass

    def begin(*_: object) -> None:
        seen.append(torch.get_float32_matmul_precision())
        raise Begun

    monkeypatch.setattr(throughput, "open_world", begin)
    sizes = SimpleNamespace(max_rows=100, dim=8, batch_size=64, overrides=[])
    for variant in ("tf32", "fp32"):
        with pytest.raises(Begun):
            throughput.measure("criteo", variant, Path("data"), sizes)
    assert seen == ["high", "highest"]


def test_the_idle_share_of_a_gpu_is_of_its_kernels_alone() -> None:
    def event(start: int, end: int, name: str = "kernel", kind: Any = DeviceType.CUDA, marked: bool = False) -> Any:
        return SimpleNamespace(
            time_range=SimpleNamespace(start=start, end=end), device_type=kind, is_user_annotation=marked, name=name
        )

    kernels = [event(0, 10), event(5, 20), event(90, 100)]
    others = [event(0, 100, marked=True), event(0, 100, "## forward 3 ##"), event(0, 100, kind=DeviceType.CPU)]
    share = step_trace.idle_share(SimpleNamespace(events=lambda: [*others, *kernels]))
    assert share == pytest.approx(0.7)
    assert step_trace.idle_share(SimpleNamespace(events=lambda: others)) is None  # a machine that allows no tracing


def test_what_the_host_does_is_of_the_thread_that_trains_and_adds_up_to_its_time() -> None:
    def event(thread: int, name: str, ms: float, kind: Any = DeviceType.CPU) -> Any:
        return SimpleNamespace(thread=thread, name=name, self_cpu_time_total=1000 * ms, device_type=kind)

    loader = [event(1, "cudaHostAlloc", 900)]
    backward = [event(3, name, 10) for name in ("aten::mm", "aten::add")]
    trains = [event(2, "aten::mm", 20), event(2, "cudaStreamSynchronize", 30), event(2, "aten::mm", 5)]
    trains.append(event(2, "aten::cat", 10))
    kernels = [event(2, "a kernel", 70, DeviceType.CUDA)]
    times = step_trace.host_times(SimpleNamespace(events=lambda: [*loader, *backward, *trains, *kernels]), seconds=0.1)
    own, others = times  # ms a step, of five
    assert own == {"python": 7, "cudaStreamSynchronize": 6, "aten::mm": 5, "aten::cat": 2}
    assert others == {"python": 16, "aten::mm": 2, "aten::add": 2}


def test_a_peak_that_cannot_be_measured_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = {"measured_bytes": 9, "predicted_bytes": 9, "unexplained_bytes": 0, "error": 0.0}
    peak |= {"phase": "step", "predicted_phase": "step"}

    def measure(case: Any, *_: object) -> list[dict[str, Any]]:
        if case is benchmark_peaks.CASES["tables"]:
            raise RuntimeError("the run has failed")
        return [peak]

    written = []
    monkeypatch.setattr(benchmark_peaks, "measure", measure)
    monkeypatch.setattr(benchmark_peaks, "write", lambda _, result: written.append(len(result["peaks"])))
    options = SimpleNamespace(only=["small", "tables", "lists"], ranks=1, overrides=[], at_once=2, out=tmp_path)
    found = benchmark_peaks.run(options)
    assert found["peaks"] == {"small": [peak], "tables": {"error": "the run has failed"}, "lists": [peak]}
    assert written == [1, 2, 3]
