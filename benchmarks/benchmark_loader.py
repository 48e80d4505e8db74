"""CPU time of the loader relative to bare decoding of the same columns; see `benchmark.py loader --help`."""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.config import DataConfig
from recsys.data.dataset import Dataset
from recsys.data.loader import Loader, LoaderOptions
from recsys.data.parquet import open_dataset
from recsys.data.spec import (
    BatchSpec,
    FloatColumn,
    IdColumn,
)
from recsys.ids import HashMapping
from recsys.memory import peak_rss
from recsys.runtime.versions import installed_versions

ROOT = Path(__file__).resolve().parent.parent
ROW_GROUP_ROWS = 131_072
IDS = [f"id_{i}" for i in range(26)]
FLOATS = [f"float_{i}" for i in range(13)]
LISTS = ["list_0", "list_1"]
ROW_GROUPS_IN_A_WINDOW = 4


class TimedMapping:
    """Passes ids on to a mapping, and adds up its CPU time over all threads."""

    def __init__(self, mapping: HashMapping) -> None:
        self._mapping = mapping
        self.rows_per_id, self.num_rows = mapping.rows_per_id, mapping.num_rows
        self.ns = self.num_ids = 0
        self._lock = threading.Lock()

    def map(self, ids: pa.Array, out: np.ndarray, statistics: Any = None) -> None:
        start = time.thread_time_ns()
        self._mapping.map(ids, out, statistics)
        elapsed = time.thread_time_ns() - start
        with self._lock:
            self.ns += elapsed
            self.num_ids += len(ids)


def write_files(folder: Path, num_rows: int) -> None:
    """Write 26 Zipf-distributed 64-bit ids, 13 floats and 2 lists of mean length 10, four row groups per file."""
    generator = np.random.default_rng(1)
    in_file = 4 * ROW_GROUP_ROWS
    for f, first in enumerate(range(0, num_rows, in_file)):
        rows = min(in_file, num_rows - first)
        columns: dict[str, Any] = {name: _ids(generator, rows, i) for i, name in enumerate(IDS)}
        columns |= {name: generator.random(rows, np.float32) for name in FLOATS}
        for i, name in enumerate(LISTS):
            offsets = np.concatenate([[0], np.cumsum(generator.poisson(10, rows))]).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(offsets, _ids(generator, int(offsets[-1]), 100 + i))
        table = pa.table(columns)
        _write(table, folder / f"part-{f:05d}.parquet")


def _write(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS, compression="zstd", write_page_checksum=True)


def _ids(generator: np.random.Generator, count: int, field: int) -> np.ndarray:
    # Ids are spread over 64 bits, as in hashed logs; each field has its own popular ids.
    spread = generator.zipf(1.2, count).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * field)
    return (spread >> np.uint64(1)).astype(np.int64)


def open_files(folder: Path, checksums: bool) -> Dataset:
    """Return the benchmark's files as a dataset."""
    columns = dict.fromkeys([*IDS, *FLOATS, *LISTS], "benchmark")
    return open_dataset("benchmark", str(folder), columns, options=DataConfig(verify_checksums=checksums))


def decode(dataset: Dataset, checksums: bool) -> Iterator[int]:
    """Decode all row groups with pyarrow and drop them; yield the number of rows of each."""
    for path in dataset.row_groups.paths:
        with pq.ParquetFile(path, page_checksum_verification=checksums) as file:
            for i in range(file.num_row_groups):
                yield file.read_row_group(i, columns=list(dataset.columns), use_threads=False).num_rows


def build_loader(dataset: Dataset, mapping: Any, shuffle: bool, arguments: argparse.Namespace) -> Loader:
    """Return a loader with four row groups in a window."""
    spec = BatchSpec([IdColumn(name, name, mapping) for name in (*IDS, *LISTS)], [FloatColumn(n, n) for n in FLOATS])
    largest = int(dataset.row_groups.num_bytes.max())
    options = LoaderOptions(
        seed=1,
        shuffle=shuffle,
        num_streams=arguments.streams,
        window_bytes=ROW_GROUPS_IN_A_WINDOW * largest,
        num_threads=arguments.threads,
        prefetch_batches=4,
        pin_device=_pin_device(),
    )
    return Loader(dataset, spec, options, arguments.batch_size)


def _pin_device() -> Any:
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else None


def load(loader: Loader) -> Iterator[int]:
    """Load all batches; yield the number of rows of each."""
    with closing(loader.batches()) as batches:
        for batch in batches:
            yield batch.num_rows


@dataclass
class Cost:
    """Cost of some steps: rows, CPU time of all threads of the process, wall time, and hashing."""

    rows: int = 0
    cpu_ns: int = 0
    wall_ns: int = 0
    hash_ns: int = 0
    num_ids: int = 0

    def add(self, steps: Iterator[int], mapping: TimedMapping, num_rows: int) -> bool:
        """Run steps until they have `num_rows` more rows; return whether any steps are left."""
        stop, ids, hashing = self.rows + num_rows, mapping.num_ids, mapping.ns
        cpu, wall = time.process_time_ns(), time.monotonic_ns()
        rows: int | None = 0
        while self.rows < stop and (rows := next(steps, None)) is not None:
            self.rows += rows
        self.cpu_ns += time.process_time_ns() - cpu
        self.wall_ns += time.monotonic_ns() - wall
        self.hash_ns += mapping.ns - hashing
        self.num_ids += mapping.num_ids - ids
        return rows is not None


def compare(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Decode, load, and load shuffled, some row groups of each in turn; return medians of the repeats."""
    dataset = open_files(folder, arguments.checksums)
    mapping = TimedMapping(HashMapping(1_000_003, 0))
    loaders = {way: build_loader(dataset, mapping, way == "shuffled", arguments) for way in ("unshuffled", "shuffled")}
    repeats = []
    for repeat in range(arguments.repeats + 1):
        steps = {"decode": decode(dataset, arguments.checksums), **{way: load(loaders[way]) for way in loaders}}
        costs = {way: Cost() for way in steps}
        gc.collect()
        left = list(steps)
        while left:
            left = [way for way in left if costs[way].add(steps[way], mapping, ROW_GROUPS_IN_A_WINDOW * ROW_GROUP_ROWS)]
        if repeat:  # the first repeat warms caches and allocators
            repeats.append(costs)
            print(_line(repeat, costs), flush=True)
    return _medians(repeats)


def _ratio(costs: dict[str, Cost], way: str) -> float:
    return costs["decode"].cpu_ns / (costs[way].cpu_ns - costs[way].hash_ns)


def _line(repeat: int, costs: dict[str, Cost]) -> str:
    per_row = {way: f"{way} {cost.cpu_ns / cost.rows:.0f}" for way, cost in costs.items()}
    for way in ("unshuffled", "shuffled"):
        per_row[way] += f" (hashing {costs[way].hash_ns / costs[way].rows:.0f}, ratio {_ratio(costs, way):.3f})"
    return f"repeat {repeat}: CPU ns a row: {', '.join(per_row.values())}"


def _medians(repeats: list[dict[str, Cost]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for way in ("unshuffled", "shuffled"):
        ratios = [_ratio(costs, way) for costs in repeats]
        result[f"{way}_ratio"] = round(statistics.median(ratios), 4)
        result[f"{way}_ratios"] = [round(ratio, 4) for ratio in ratios]
    for way in repeats[0]:
        costs = [each[way] for each in repeats]
        result[f"{way}_cpu_ns_per_row"] = round(statistics.median(cost.cpu_ns / cost.rows for cost in costs), 1)
        result[f"{way}_rows_per_s"] = round(statistics.median(1e9 * cost.rows / cost.wall_ns for cost in costs))
    loads = [costs[way] for costs in repeats for way in ("unshuffled", "shuffled")]
    result["hash_ns_per_id"] = round(statistics.median(cost.hash_ns / cost.num_ids for cost in loads), 3)
    return result


def measure_alone(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load all files in this process; return rows/s, its peak of memory and the time to the first batch."""
    start = time.monotonic()
    dataset = open_files(arguments.folder, arguments.checksums)
    loader = build_loader(dataset, HashMapping(1_000_003, 0), True, arguments)
    with closing(loader.batches(num_epochs=arguments.epochs)) as batches:
        next(batches)
        first = time.monotonic() - start
        rows = sum(batch.num_rows for batch in batches) + arguments.batch_size
    return {
        "rows": rows,
        "rows_per_s": round(rows / (time.monotonic() - start)),
        "peak_rss_bytes": peak_rss(),
        "loader_bytes": loader.host_bytes,
        "first_batch_s": round(first, 3),
    }


def _in_a_process(folder: Path, streams: int, epochs: int, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks/benchmark.py"), "loader", "--alone", "--folder", str(folder)]
    command += ["--streams", str(streams), "--threads", "2", "--batch-size", str(arguments.batch_size)]
    command += ["--epochs", str(epochs)]
    command += [] if arguments.checksums else ["--no-checksums"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _times_ten(folder: Path) -> Path:
    """Return a folder that has every file ten times, as hard links."""
    ten = folder.with_name(folder.name + "-times-10")
    if not ten.exists():
        ten.mkdir()
        for path in folder.glob("*.parquet"):
            for copy in range(10):
                (ten / f"copy-{copy}-{path.name}").hardlink_to(path)
    return ten


def _many_files(folder: Path) -> Path:
    """Return a folder of 10,000 files of 200 rows each, all of the same content."""
    many = folder.with_name("10000-files")
    if not many.exists():
        small = folder.with_name("small")
        with pq.ParquetFile(next(folder.glob("*.parquet"))) as file:
            rows = pa.Table.from_batches([next(file.iter_batches(200))])
        _write(rows, small / "part.parquet")
        content = (small / "part.parquet").read_bytes()
        many.mkdir()
        for i in range(10_000):
            (many / f"part-{i:05d}.parquet").write_bytes(content)
    return many


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py loader`; return what its last line shows."""
    if arguments.alone:
        return measure_alone(arguments)
    folder = arguments.folder / f"{arguments.rows}-rows"
    if not folder.exists():
        print(f"writing {arguments.rows:,} rows to {folder}", flush=True)
        write_files(folder.with_suffix(".tmp"), arguments.rows)
        folder.with_suffix(".tmp").rename(folder)
    result = compare(folder, arguments)
    if not arguments.ratios_only:
        # The same number of rows: from a tenth of the data, ten times, and from all data. Both have one stream.
        result["tenth"] = _in_a_process(folder, 1, 10, arguments)
        result["whole"] = _in_a_process(_times_ten(folder), 1, 1, arguments)
        result["ten_thousand_files"] = _in_a_process(_many_files(folder), 8, 1, arguments)
    return {
        **result,
        "rows": arguments.rows,
        "repeats": arguments.repeats,
        "checksums": arguments.checksums,
        "num_streams": arguments.streams,
        "num_threads": arguments.threads,
        "batch_size": arguments.batch_size,
        "row_groups_in_a_window": ROW_GROUPS_IN_A_WINDOW,
        "versions": installed_versions(),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py loader`."""
    parser.add_argument("--rows", type=int, default=2_097_152)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--streams", type=int, default=1, help="1 reads row groups in turn, as bare decoding")
    parser.add_argument(
        "--threads", type=int, default=0, help="decoding threads; 0: all in one thread, as bare decoding"
    )
    parser.add_argument("--batch-size", type=int, default=16_384)
    parser.add_argument("--no-checksums", dest="checksums", action="store_false", help="verify none, bare and loaded")
    parser.add_argument("--ratios-only", action="store_true", help="leave out ten times the data and 10,000 files")
    parser.add_argument("--folder", type=Path, default=ROOT / "data/.cache/loader-benchmark", help="for its files")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
