"""Two ranks on one device, disguised as two machines, because NCCL refuses two ranks of one machine on a GPU.

Each case trains the sample on one rank and on two, and its losses are compared. Writes JSON after each.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launcher import write  # noqa: E402

from recsys.runtime.versions import exit_unless_installed, installed_versions  # noqa: E402

exit_unless_installed()

CONFIG = "configs/dlrm_sample.yaml"
TABLES = ("user", "item", "category", "device", "hour")
CASES = {
    "row-wise": [f"tables.{table}.sharding_type=row_wise" for table in TABLES],
    "table-wise": [f"tables.{table}.sharding_type=table_wise" for table in TABLES],
    "BF16 wires": ["precision.forward_wire=BF16", "precision.backward_wire=BF16"],
    "FP16 wires": ["precision.forward_wire=FP16", "precision.backward_wire=FP16"],
    "shared dense optimizer": ["train.dense_sharding=optimizer"],
}
# Settings for ranks of two machines, whose messages go over the loopback interface.
_ALONE = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def train(run_dir: Path, num_ranks: int, overrides: list[str], seconds: float) -> dict[str, Any]:
    """Train on `num_ranks` ranks; return losses, speed and peaks of the ranks, or their errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "train.py", CONFIG, f"run.dir={run_dir}", "train.log_every_steps=1", *overrides]
    ranks = []
    for rank in range(num_ranks):
        of_rank = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        of_rank |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NCCL_HOSTID": f"machine-{rank}"}
        env = os.environ | _ALONE | {name: str(value) for name, value in of_rank.items()}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes))  # type: ignore[call-overload]
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in ranks]
    except subprocess.TimeoutExpired:
        errors = [f"not done in {seconds:g} s"]
    finally:
        for process in ranks:
            process.kill()
    if any(process.wait() for process in ranks):
        return {"error": [error[-2000:] for error in errors]}
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    reports = [json.loads((run_dir / f"memory/rank_{rank}.json").read_text()) for rank in range(num_ranks)]
    return {
        "losses": [record["loss"] for record in records if record["kind"] == "train"],
        "samples_per_s": json.loads((run_dir / "result.json").read_text())["samples_per_s"],
        "peaks": [report["peak"]["measured_bytes"] for report in reports],
    }


def main() -> None:
    """Measure each case; the first one shows whether two ranks are possible."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=60, help="for a run")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    common = ["train.max_steps=20", "data.valid=null", "data.test=null", *arguments.overrides]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        one = train(Path(folder) / "one", 1, common, arguments.seconds)
        for name in arguments.cases:
            results[name] = two = train(Path(folder) / name, 2, [*common, *CASES[name]], arguments.seconds)
            pairs = list(zip(one.get("losses", []), two.get("losses", []), strict=False))
            results[name]["losses_apart"] = max((abs(a - b) for a, b in pairs), default=None)
            print(f"{name}: {two.get('error') or two['losses_apart']}", flush=True)
            measured = {"overrides": arguments.overrides, "one_rank": one, "two_ranks": results}
            write(arguments.out, {**measured, "versions": installed_versions()})
            if "error" in two:
                sys.exit(1)


if __name__ == "__main__":
    main()
