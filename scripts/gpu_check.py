"""Everything that needs a GPU, in one call: tests marked gpu, and benchmarks, whose JSON goes to a folder.

The parts that show most for their time come first. Each has its own limit of time, and writes results as it goes, so
that little is lost if a part hangs or the call is cut off; `parts.json` says how each ended.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.runtime.versions import exit_unless_installed, installed_versions  # noqa: E402

exit_unless_installed()

import torch  # noqa: E402

_ON = ("run.device={device}", "run.num_threads=1")
# The shapes of the field, with tables of at most 10 M rows: 27 GiB.
_FIELD = ("--batch-size", "65536", "--dim", "128", "--max-rows", "10000000", "--rows", "524288")
_SPEED = ("--steps", "40", "--warm", "10", "--variants", "bf16_compiled", "bf16", "tf32", "fp32")
_FEEDS = ("--feeds", "device", "page_locked", "parquet", "bare", "--loader-threads", "1", "2", "4", "8", "12")
_TINY = (
    *("--batch-size", "256", "--dim", "8", "--max-rows", "1000", "--rows", "1024", "--steps", "2", "--warm", "1"),
    *("--held", "2", "--variants", "fp32", "--loader-threads", "1"),
)
_TESTS_AT_ONCE = "12"  # on the same GPUs, which they use for a short time compared with their start
_GRACE_S = 15  # for a part that is interrupted to report how far it has come


@dataclass(frozen=True)
class Part:
    """A program to run.

    Attributes:
        seconds: time that it may take. command: arguments for Python. quick: further options, which override earlier
            ones, for a run that only shows that it works. ranked: whether it has the option `--ranks`.
        writes: whether it has the option `--out`. env: its environment variables on GPUs.
    """

    seconds: int
    command: tuple[str, ...]
    quick: tuple[str, ...] = ()
    ranked: bool = False
    writes: bool = True
    env: dict[str, str] = field(default_factory=dict)


_BENCHMARK, _THROUGHPUT = "benchmarks/benchmark.py", "benchmarks/throughput.py"
# The tests of peaks, which are the longest, are replaced by a part of their own, which also keeps the figures.
_TESTS = ("-m", "pytest", "-m", "gpu", "-v", "--durations", "15", "-k", "not the_peak_of_the_allocator")
_SHORT = ("train.max_steps=20", "data.valid=null", "data.test=null", "run.overwrite=true")
_PARTS = {
    "matrix": Part(150, (_BENCHMARK, "matrix", "--device", "{device}"), ("--most", "3")),
    "tests": Part(270, (*_TESTS, "--junitxml", "{out}/tests.xml", "tests/test_gpu.py"), writes=False),
    "peaks": Part(180, (_BENCHMARK, "peaks", *_ON, "--at-once", "6"), ("--only", "small"), ranked=True),
    "throughput": Part(
        300, (_THROUGHPUT, *_ON, *_FIELD, *_SPEED, *_FEEDS, "--shapes", "multi_hot"), _TINY, ranked=True
    ),
    "criteo": Part(200, (_THROUGHPUT, *_ON, *_FIELD, *_SPEED, *_FEEDS, "--shapes", "criteo"), _TINY, ranked=True),
    "variants": Part(
        330,
        (
            *(_THROUGHPUT, *_ON, *_FIELD, "--max-rows", "1000000", "--shapes", "criteo", "--feeds", "device"),
            *("--steps", "40", "--warm", "10", "--loader-threads", "--variants", "fp32", "fp16_tables", "fp8_tables"),
            *("uvm_caching", "uvm", "bf16", "fp16", "bf16_vectors", "offload", "unread"),
        ),
        (*_TINY, "--variants", "fp32", "fp16_tables"),
        ranked=True,
    ),
    "threads": Part(
        90,
        (
            *(_THROUGHPUT, *_ON, *_FIELD, "--shapes", "multi_hot", "criteo", "texts", "--variants"),
            *("--loader-threads", "4", "8", "12"),
        ),
        (*_TINY, "--variants", "--shapes", "texts", "--loader-threads", "1", "3"),
    ),
    "feeds": Part(
        330,
        (
            *(_THROUGHPUT, *_ON, *_FIELD, "--steps", "40", "--warm", "10", "--shapes", "criteo", "multi_hot"),
            *("--feeds", "page_locked", "parquet", "--loader-threads", "--variants", "processes_12", "threads_12"),
        ),
        (*_TINY, "--variants", "threads_2"),
    ),
    "two_ranks": Part(120, ("benchmarks/two_ranks.py", *_ON), ("--cases", "row-wise")),
    "sanitizer": Part(
        90,
        ("train.py", "configs/dlrm_sample.yaml", *_ON, *_SHORT, "run.dir={out}/sanitizer"),
        writes=False,
        env={"TORCH_CUDA_SANITIZER": "1"},
    ),
    "step": Part(
        150,
        (_BENCHMARK, "step", *_ON, "--rows", "524288", "--repeats", "3"),
        ("--rows", "4096", "--batch-size", "256", "--threads", "1", "--repeats", "1"),
    ),
    "loader": Part(
        120,
        (_BENCHMARK, "loader", "--ratios-only", "--folder", "{out}/../loader-files"),
        ("--rows", "65536", "--repeats", "1"),
    ),
    "seeds": Part(
        90, (_BENCHMARK, "seeds", "configs/dlrm_sample.yaml", *_ON, "--seeds", "1", "2", "3"), ("--seeds", "1")
    ),
}


def main() -> int:
    """Run tests and benchmarks; return 0 if all succeed."""
    arguments = _parse()
    arguments.out = out = arguments.out.resolve()
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("error: torch finds no GPU here, and this checks one", file=sys.stderr)
        return 2
    num_gpus = torch.cuda.device_count() if on_gpu else 1
    if arguments.nproc is not None and not 1 <= arguments.nproc <= num_gpus:
        print(f"error: --nproc must be from 1 to the {num_gpus} GPUs that torch finds here", file=sys.stderr)
        return 2
    arguments.nproc = num_gpus = arguments.nproc or num_gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:num_gpus])  # for the processes started below
    out.mkdir(parents=True, exist_ok=True)
    device_facts: dict[str, Any] = {"name": arguments.device, "num_gpus": num_gpus, "versions": installed_versions()}
    if on_gpu:
        device = torch.cuda.get_device_properties(0)
        device_facts |= {"name": device.name, "memory_bytes": device.total_memory, "cuda": torch.version.cuda}
    if importlib.util.find_spec("onnxruntime"):
        import onnxruntime

        device_facts["onnxruntime"] = {onnxruntime.__version__: onnxruntime.get_available_providers()}
    deadline = time.monotonic() + arguments.seconds
    parts: dict[str, Any] = {}
    for name in arguments.parts:
        seconds = min(_PARTS[name].seconds, deadline - time.monotonic())
        parts[name] = _run(name, arguments, seconds) if seconds > 0 else {"status": "no time was left"}
        (out / "parts.json").write_text(json.dumps({**device_facts, "parts": parts}, indent=1) + "\n")
        print(f"{name}: {parts[name]}", flush=True)
    return int(any(each["status"] != 0 for each in parts.values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    parser.add_argument("--nproc", type=int, help="GPUs to use, one rank each (default: all there are)")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="default: all")
    parser.add_argument("--seconds", type=float, default=3600, help="for all parts; those behind are left out")
    parser.add_argument("--quick", action="store_true", help="as little of each as shows that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries this script itself")
    return parser.parse_args()


def _run(name: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a part for at most `seconds`, print the end of its output, and return how it ended."""
    part, out = _PARTS[name], arguments.out
    options = part.command + (part.quick if arguments.quick else ())
    command = [option.format(device=arguments.device, out=out) for option in options]
    if name == "tests" and arguments.device == "cuda" and importlib.util.find_spec("xdist"):
        command += ["-n", _TESTS_AT_ONCE]
    if part.writes:
        command += ["--out", f"{out}/{name}_{arguments.device.replace('cuda', 'gpu')}.json"]
    command += ["--ranks", str(arguments.nproc)] if part.ranked else []
    log, begin = out / f"{name}.log", time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | (part.env if arguments.device == "cuda" else {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its child processes can be stopped with it
        )
        status: int | str
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
            _stop(process)
    print(*log.read_text(errors="replace").splitlines()[-12:], sep="\n", flush=True)
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "command": ["python", *command]}


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt a process and its children, and kill those that do not end by themselves."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
