"""Exports: rows scored per second, time of a request with 100 candidates, and time of opening a large table.

    python benchmarks/benchmark_serving.py EXPORT ROWS.parquet --out benchmarks/serving.json

EXPORT is a folder of `recsys export`, ROWS are data for it to score; recsys and torch are not imported. For the large
table, EXPORT is copied, and one of its hashed tables gets `--gib` of vectors, all on disk and not in memory; the copy
is removed afterwards.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

CANDIDATES, REQUESTS, ROWS = 100, 500, 8192


def rates(score: dict[str, Any], folder: Path, data: Path) -> dict[str, float]:
    """Return rows scored per second in batches, and percentiles of the time of requests in milliseconds."""
    scorer = score["Scorer"](folder)
    table = pq.read_table(data).slice(0, 20 * ROWS)
    scorer.score(table.slice(0, ROWS))
    start = time.perf_counter()
    for first in range(0, len(table), ROWS):
        scorer.score(table.slice(first, ROWS))
    seconds = time.perf_counter() - start
    times, cpu = [], time.process_time()
    for number in range(REQUESTS):
        request = table.slice(number * CANDIDATES % (len(table) - CANDIDATES), CANDIDATES).combine_chunks()
        begin = time.perf_counter()
        scorer.score(request)
        times.append(1000 * (time.perf_counter() - begin))
    cpu_ms = 1000 * (time.process_time() - cpu) / REQUESTS
    p50, p99 = np.percentile(times, [50, 99])
    figures = {"rows_per_second": len(table) / seconds, "p50_ms": p50, "p99_ms": p99, "cpu_ms": cpu_ms}
    return {name: round(float(value), 2) for name, value in figures.items()}


def large_copy(score: dict[str, Any], folder: Path, to: Path, gib: float) -> int:
    """Copy an export, with more rows in its first hashed table; return the bytes of that table."""
    shutil.copytree(folder, to)
    manifest = json.loads((to / "manifest.json").read_text())
    table = next(each for each in manifest["tables"].values() if each["mapping"]["type"] == "hash")
    vectors, block = table["vectors"], np.random.default_rng(0).standard_normal(1 << 22, np.float32) / 100
    vectors["rows"] = table["mapping"]["rows"] = int(gib * 2**30) // vectors["stride"]
    size, path = vectors["rows"] * vectors["stride"], to / vectors["file"]
    with path.open("wb") as file:
        for start in range(0, size, block.nbytes):
            file.write(block.view(np.uint8)[: size - start])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    manifest["files"][vectors["file"]] |= {"bytes": size, "sha256": "of another"}
    manifest["sha256"] = score["checksum"](manifest)
    (to / "manifest.json").write_text(json.dumps(manifest))
    return size


OPEN = """
import resource, sys, time
start = time.perf_counter()
sys.path.insert(0, sys.argv[1])
import pyarrow.parquet as pq
from score import Scorer
rows = pq.read_table(sys.argv[2]).slice(0, 100)
imported = time.perf_counter()
scorer = Scorer(sys.argv[1])
opened = time.perf_counter()
scorer.score(rows)
first = time.perf_counter()
print(imported - start, opened - imported, first - opened, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def opening(folder: Path, data: Path) -> dict[str, float]:
    """Return how long a new process needs for imports, opening an export and its first request, and its memory."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder), str(data)], capture_output=True, text=True, check=True
    )
    names = ("import_seconds", "open_seconds", "first_request_seconds", "peak_mib")
    return {name: round(float(text), 3) for name, text in zip(names, done.stdout.split(), strict=True)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gib", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    score = runpy.run_path(str(words.export / "score.py"))
    figures: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "candidates": CANDIDATES}
    figures |= rates(score, words.export, words.rows) | {"opening": opening(words.export, words.rows)}
    with tempfile.TemporaryDirectory(dir=words.export.absolute().parent) as parent:
        figures["table_bytes"] = large_copy(score, words.export, Path(parent) / "large", words.gib)
        figures["opening_large"] = opening(Path(parent) / "large", words.rows)
        figures["large"] = rates(score, Path(parent) / "large", words.rows)
    text = json.dumps(figures, indent=1)
    print(text)
    if words.out:
        words.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
