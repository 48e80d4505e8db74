"""What publishing costs a training: CPU seconds of publishing, relative to those of the whole run.

    recsys prepare synthetic --out data/publishing --rows 400000 --users 100000 --items 30000
    python benchmarks/publishing_cost.py configs/dlrm_sample.yaml data.train=data/publishing/train \\
        --every-seconds 5 --out benchmarks/publishing_cost.json

The time of publishing includes all threads of the process while it publishes (even those of the loader, which continue
meanwhile), the processes that it starts and waits for, and the marking of rows in each lookup.
"""

import argparse
import functools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.runtime.environment import prepare_environment  # noqa: E402

prepare_environment()  # before pyarrow is imported

from launcher import write  # noqa: E402

import recsys.tables.touched as touched  # noqa: E402
import recsys.training.run as training  # noqa: E402
from recsys.config import load_config  # noqa: E402
from recsys.runtime.versions import git_commit, installed_versions  # noqa: E402
from recsys.serving.publish import Publisher  # noqa: E402


def used(who: int = resource.RUSAGE_SELF) -> float:
    """Return the CPU seconds of all threads of this process, or of its child processes that have ended."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def used_by_all() -> float:
    """Return the CPU seconds of this process and its child processes."""
    return used() + used(resource.RUSAGE_CHILDREN)


def timed(owner: Any, name: str, clock: Callable[[], float], calls: list[float]) -> None:
    """Replace a function by one that appends to `calls` how long each call takes by a clock."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def noting(*arguments: Any, **options: Any) -> Any:
        start = clock()
        try:
            return call(*arguments, **options)
        finally:
            calls.append(clock() - start)

    setattr(owner, name, noting)


def kinds(published: Path) -> dict[str, Any]:
    """Return the bytes of the publications that still exist, and for deltas the ratio to the bytes of their rows."""
    publications: dict[str, Any] = {}
    strides: dict[str, int] = {}
    for folder in sorted(published.iterdir(), key=lambda path: path.name.partition("-")[2]):
        manifest = json.loads((folder / "manifest.json").read_text())
        publications[folder.name] = {"bytes": sum(file["bytes"] for file in manifest["files"].values())}
        strides |= {name: table["vectors"]["stride"] for name, table in manifest.get("tables", {}).items()}
        if strides and folder.name.startswith("delta-"):
            sizes = {name: (folder / f"tables/{name}.bin").stat().st_size for name in strides}
            rows = sum(size // (strides[name] + 8) * strides[name] for name, size in sizes.items())
            publications[folder.name]["over_touched_rows"] = sum(sizes.values()) / rows if rows else None
    return publications


def main() -> None:
    """Parse the command line, train, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--every-seconds", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    words = parser.parse_args()
    publications: list[float] = []
    marks: list[float] = []
    timed(Publisher, "publish", used_by_all, publications)
    timed(touched._Lookups, "__call__", time.thread_time, marks)
    with tempfile.TemporaryDirectory() as folder:
        publish = f"train.publish={{dir: {folder}/published, every_seconds: {words.every_seconds}}}"
        config = load_config(words.config, [*words.overrides, f"run.dir={folder}/run", publish])
        start = time.monotonic()
        training.run(config, Publisher)
        seconds, total = time.monotonic() - start, used_by_all()
        bytes_of = kinds(Path(folder) / "published")
    result = {
        "config": words.config,
        "overrides": words.overrides,
        "every_seconds": words.every_seconds,
        "seconds": seconds,
        "cpu_seconds": {"run": total, "publications": publications, "marks": sum(marks)},
        "share": (sum(publications) + sum(marks)) / total,
        "share_after_the_first_base": (sum(publications[1:]) + sum(marks)) / total,
        "publications": bytes_of,
        "git_commit": git_commit(),
        "versions": installed_versions(),
    }
    write(words.out, result)
    print(json.dumps({key: result[key] for key in ("seconds", "cpu_seconds", "share", "share_after_the_first_base")}))


if __name__ == "__main__":
    main()
