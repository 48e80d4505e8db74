"""Everything that needs a GPU, in one call: the tests marked gpu, then benchmarks, with JSON under a folder."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.runtime.versions import exit_unless_installed  # noqa: E402

exit_unless_installed()

import torch  # noqa: E402

_ON = ["run.device={device}", "run.num_threads=1"]
_BENCHMARKS = {
    "peaks": ["benchmark.py", "peaks", *_ON],
    "seeds": ["benchmark.py", "seeds", "configs/dlrm_sample.yaml", *_ON, "--seeds", "1", "2", "3"],
    "step": ["benchmark.py", "step", *_ON],
    "loader": ["benchmark.py", "loader", "--ratios-only"],
    # The shapes of the field, with tables of at most 10 M rows: 27 GiB.
    "throughput": [
        *("throughput.py", "run.device={device}", "--batch-size", "65536", "--dim", "128", "--max-rows", "10000000"),
        *("--rows", "1048576", "--precisions", "fp32", "tf32", "bf16"),
    ],
}
_QUICK = {  # as little as shows that each runs; the last of an option counts
    "peaks": ["--only", "small"],
    "seeds": ["--seeds", "1"],
    "step": ["--rows", "4096", "--batch-size", "256", "--threads", "1", "--repeats", "1"],
    "loader": ["--rows", "65536", "--repeats", "1"],
    "throughput": [
        *("--batch-size", "256", "--dim", "8", "--max-rows", "1000", "--rows", "1024", "--steps", "2", "--warm", "1"),
        *("--held", "2", "--precisions", "fp32", "--loader-threads", "1"),
    ],
}
_PARTS = ("tests", *_BENCHMARKS)
_TESTS_AT_ONCE = "4"  # on the same GPUs: what they do there is short, and their start is not


def main() -> int:
    """Run tests and benchmarks; return 0 when all succeed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    parser.add_argument("--nproc", type=int, help="GPUs to use, one rank each (default: all there are)")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="as little of each as shows that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries this script itself")
    arguments = parser.parse_args()
    arguments.out = out = arguments.out.resolve()
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("error: torch finds no GPU here, and this checks one", file=sys.stderr)
        return 2
    num_gpus = torch.cuda.device_count() if on_gpu else 1
    if arguments.nproc is not None and not 1 <= arguments.nproc <= num_gpus:
        print(f"error: --nproc must be from 1 to the {num_gpus} GPUs that torch finds here", file=sys.stderr)
        return 2
    num_gpus = arguments.nproc or num_gpus
    arguments.nproc = num_gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:num_gpus])  # of what is started below
    out.mkdir(parents=True, exist_ok=True)
    found = {"name": arguments.device, "num_gpus": num_gpus, "torch": torch.__version__}
    if on_gpu:
        device = torch.cuda.get_device_properties(0)
        found |= {"name": device.name, "memory_bytes": device.total_memory}
    (out / "device.json").write_text(json.dumps(found, indent=1) + "\n")
    return max([_run(part, arguments) for part in arguments.parts])


def _run(part: str, arguments: argparse.Namespace) -> int:
    out = arguments.out
    if part == "tests":
        at_once = ["-n", _TESTS_AT_ONCE] if arguments.device == "cuda" and importlib.util.find_spec("xdist") else []
        command = ["-m", "pytest", "-m", "gpu", *at_once, f"--junitxml={out}/tests.xml"]
    else:
        script, *options = _BENCHMARKS[part] + (_QUICK[part] if arguments.quick else [])
        command = [f"benchmarks/{script}", *(option.format(device=arguments.device) for option in options)]
        command += ["--out", f"{out}/{part}_{arguments.device.replace('cuda', 'gpu')}.json"]
        command += ["--folder", f"{out}/../loader-files"] if part == "loader" else []
        command += ["--ranks", str(arguments.nproc)] if part in ("peaks", "throughput") else []
    return subprocess.run([sys.executable, *command], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
