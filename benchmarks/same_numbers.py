"""Check that two source trees train the same numbers: losses of the first steps, and final metrics, of some configs.

    git worktree add ../before COMMIT
    python benchmarks/same_numbers.py ../before

Both trees run under this Python, one after the other. The data sets must be in this tree (recsys prepare).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from launcher import launch_command

from recsys.config import load_config

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ("dlrm_sample", "dlrm_movielens", "two_tower_movielens")


def main() -> int:
    """Compare; return 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout to compare with")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="changes to every config, such as train.epochs=1"
    )
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--steps", type=int, default=50, help="whose losses are compared")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative difference that is let pass")
    arguments = parser.parse_args()
    different = 0
    for config in arguments.configs:
        for nproc in arguments.ranks:
            before, after = (
                _numbers(tree.resolve(), config, nproc, arguments.steps, arguments.overrides)
                for tree in (arguments.before, ROOT)
            )
            worst = max((_difference(before.get(key), value), key) for key, value in {**before, **after}.items())
            same = before.keys() == after.keys() and worst[0] <= arguments.tolerance
            different += not same
            print(f"{config}, {nproc} ranks: {'same' if same else 'DIFFERENT'}, {len(after)} numbers, worst {worst}")
    return int(different > 0)


def _numbers(tree: Path, config: str, nproc: int, steps: int, overrides: list[str]) -> dict[str, float]:
    """Train; return by name the losses of the first steps and the final metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        options = [f"run.dir={run_dir}", "train.log_every_steps=1", *_data(config), *overrides]
        command = [*launch_command(nproc), "train.py", str(tree / "configs" / f"{config}.yaml"), *options]
        subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((run_dir / "result.json").read_text())
    losses = {f"loss {line['step']}": line["loss"] for line in lines if line.get("loss") is not None}
    first = {key: value for key, value in losses.items() if int(key.split()[1]) <= steps}
    metrics = {f"{role} {name}": value for role, found in result["metrics"].items() for name, value in found.items()}
    return {**first, **metrics}


def _data(config: str) -> list[str]:
    """Return overrides that name the data of this tree, for train.py in either tree."""
    data = load_config(ROOT / "configs" / f"{config}.yaml").data
    paths = {role: getattr(data, role) for role in ("train", "valid", "test", "items")}
    return [f"data.{role}={ROOT / path}" for role, path in paths.items() if path]


def _difference(before: float | None, after: float) -> float:
    if before is None:
        return float("inf")
    return 0.0 if before == after else abs(before - after) / max(abs(before), abs(after))


if __name__ == "__main__":
    sys.exit(main())
