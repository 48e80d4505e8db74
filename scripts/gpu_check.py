"""Everything that needs a GPU, in one call: the tests marked gpu, then benchmarks, with JSON under a folder."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run tests and benchmarks; return 0 when all succeed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    out = parser.parse_args().out.resolve()
    if not torch.cuda.is_available():
        print("error: torch finds no GPU here, and this checks one", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    tests = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={out}/tests.xml"], cwd=ROOT)
    seeds = ["seeds", "configs/dlrm_sample.yaml", "run.device=cuda", "--seeds", "1", "2", "3"]
    loader = ["loader", "--ratios-only", "--folder", f"{out}/../loader-files"]
    statuses = [tests.returncode]
    for arguments, name in ((seeds, "dlrm_sample_gpu"), (loader, "loader_gpu")):
        command = [sys.executable, "scripts/benchmark.py", *arguments, "--out", f"{out}/{name}.json"]
        statuses.append(subprocess.run(command, cwd=ROOT).returncode)
    device = torch.cuda.get_device_properties(0)
    found = {"name": device.name, "memory_bytes": device.total_memory, "torch": torch.__version__}
    (out / "device.json").write_text(json.dumps(found, indent=1) + "\n")
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
