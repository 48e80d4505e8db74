"""Predicted and measured peaks of memory of runs of random configs and data; see `benchmark.py random --help`."""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import random_runs
from benchmark_peaks import MIB, is_near, train
from launcher import earlier, write

from recsys.runtime.versions import installed_versions


def measure(seed: int, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train the run of a seed in a folder; return for each rank the bytes of its phases, and of its peak, as `peak`.

    Raises:
        RuntimeError: the run fails; the message has the end of its output.
    """
    run = random_runs.make(seed)
    reports = train(run.write(folder), folder / "run", run.nproc, *overrides)
    return [
        {
            "peak": {key: report["peak"][key] for key in ("phase", "measured_bytes", "predicted_bytes")},
            **{
                phase: {key: sizes[key] for key in ("measured_bytes", "predicted_bytes")}
                for phase, sizes in report["phases"].items()
                if sizes["measured_bytes"] is not None and sizes["predicted_bytes"] is not None
            },
            "by_kind_predicted": report["peak"]["by_kind_predicted"],
        }
        for report in reports
    ]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py random`; seeds that are in the output file are not run again."""
    result = {"ranks": {}, "missed": [], **earlier(arguments.out, {"overrides": arguments.overrides})}
    ranks, missed = result["ranks"], result["missed"]
    for seed in [each for each in arguments.seeds if str(each) not in ranks]:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            ranks[str(seed)] = measure(seed, Path(folder), *arguments.overrides)
        for rank, phases in enumerate(ranks[str(seed)]):
            near = {phase for phase, sizes in phases.items() if "phase" not in phase and _is_near(sizes)}
            if "peak" not in near:
                missed.append((seed, rank))
            shown = (f"{phase} {_shown(sizes)}{'' if phase in near else ' !'}" for phase, sizes in phases.items())
            print(f"seed {seed}, rank {rank}: {', '.join(list(shown)[:-1])}", flush=True)
        print(f"seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
        write(arguments.out, result | {"versions": installed_versions()})
    total = sum(map(len, ranks.values()))
    print(f"{total - len(missed)} of {total} peaks within 5 % or 32 MiB; not those of (seed, rank): {missed}")
    return result | {"versions": installed_versions()}


def _is_near(sizes: dict[str, int]) -> bool:
    return "measured_bytes" in sizes and is_near(sizes["predicted_bytes"], sizes["measured_bytes"])


def _shown(sizes: dict[str, Any]) -> str:
    return "/".join(f"{sizes.get(key, 0) / MIB:,.0f}" for key in ("measured_bytes", "predicted_bytes"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py random`."""
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*random_runs.AFTER], help="see random_runs.py")
    parser.add_argument("--out", type=Path, help="JSON file to write")
