"""The loader against bare decoding of the same columns, as ratios of CPU time; see `benchmark.py loader --help`."""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.data.convert import FloatColumn, IdColumn  # noqa: E402
from recsys.data.loader import Loader, LoaderOptions  # noqa: E402
from recsys.data.parquet import Dataset, ReadOptions, open_dataset  # noqa: E402
from recsys.data.prepare import ParquetSink  # noqa: E402
from recsys.data.window import BatchSpec  # noqa: E402
from recsys.id_mapping import HashMapping  # noqa: E402
from recsys.memory import peak_rss  # noqa: E402
from recsys.versions import installed_versions  # noqa: E402

ROW_GROUP_ROWS = 131_072
IDS = [f"id_{i}" for i in range(26)]
FLOATS = [f"float_{i}" for i in range(13)]
LISTS = ["list_0", "list_1"]
ROW_GROUPS_IN_A_WINDOW = 4


class TimedMapping:
    """Passes ids on to a mapping and adds up its CPU time, over all threads."""

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
    """Write 26 Zipf-distributed 64-bit ids, 13 floats and 2 lists of mean length 10, four row groups a file."""
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
        with ParquetSink(folder / f"part-{f:05d}.parquet", table.schema, ROW_GROUP_ROWS) as file:
            file.write(table)


def _ids(generator: np.random.Generator, count: int, field: int) -> np.ndarray:
    # Spread over 64 bits, as hashed logs are, each field with popular ids of its own.
    spread = generator.zipf(1.2, count).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * field)
    return (spread >> np.uint64(1)).astype(np.int64)


def open_files(folder: Path, checksums: bool) -> Dataset:
    """Return the benchmark's files as a dataset."""
    columns = dict.fromkeys([*IDS, *FLOATS, *LISTS], "benchmark")
    return open_dataset("benchmark", str(folder), columns, options=ReadOptions(verify_checksums=checksums))


def decode(dataset: Dataset, checksums: bool) -> int:
    """Decode all row groups with pyarrow and drop them; return the rows."""
    rows = 0
    for path in dataset.row_groups.paths:
        with pq.ParquetFile(path, page_checksum_verification=checksums) as file:
            for i in range(file.num_row_groups):
                rows += file.read_row_group(i, columns=list(dataset.columns), use_threads=False).num_rows
    return rows


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


def load(loader: Loader) -> int:
    """Take all batches; return their rows."""
    rows = 0
    with closing(loader.batches()) as batches:
        for batch in batches:
            rows += batch.num_rows
    return rows


def measured(action: Callable[[], int]) -> dict[str, float]:
    """Return rows, and nanoseconds a row of process CPU time over all threads and of wall time."""
    gc.collect()
    cpu, wall = time.process_time_ns(), time.monotonic_ns()
    rows = action()
    cpu, wall = time.process_time_ns() - cpu, time.monotonic_ns() - wall
    return {"rows": rows, "cpu_ns": cpu / rows, "wall_ns": wall / rows}


def compare(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Interleave decoding, loading and shuffled loading; return the medians of the paired repeats."""
    dataset = open_files(folder, arguments.checksums)
    mapping = TimedMapping(HashMapping(1_000_003, 0))
    loaders = {way: build_loader(dataset, mapping, way == "shuffled", arguments) for way in ("unshuffled", "shuffled")}
    repeats = []
    for repeat in range(arguments.repeats + 1):
        found: dict[str, Any] = {}
        ways = ["decode", "unshuffled", "shuffled"]
        for way in ways[repeat % 3 :] + ways[: repeat % 3]:
            if way == "decode":
                found[way] = measured(lambda: decode(dataset, arguments.checksums))
                continue
            mapping.ns = mapping.num_ids = 0
            found[way] = measured(lambda way=way: load(loaders[way]))  # type: ignore[misc]
            found[way]["hash_ns"] = mapping.ns / found[way]["rows"]
            found[way]["hash_ns_per_id"] = mapping.ns / mapping.num_ids
        if repeat:  # the first one warms caches and allocators
            repeats.append(found)
            print(_line(repeat, found), flush=True)
    return _medians(repeats)


def _ratio(found: dict[str, Any], way: str) -> float:
    ratio: float = found["decode"]["cpu_ns"] / (found[way]["cpu_ns"] - found[way]["hash_ns"])
    return ratio


def _line(repeat: int, found: dict[str, Any]) -> str:
    ways = ", ".join(
        f"{way} {found[way]['cpu_ns']:.0f} (hashing {found[way]['hash_ns']:.0f}, ratio {_ratio(found, way):.3f})"
        for way in ("unshuffled", "shuffled")
    )
    return f"repeat {repeat}: CPU ns a row: decode {found['decode']['cpu_ns']:.0f}, {ways}"


def _medians(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for way in ("unshuffled", "shuffled"):
        ratios = [_ratio(found, way) for found in repeats]
        result[f"{way}_ratio"] = round(statistics.median(ratios), 4)
        result[f"{way}_ratios"] = [round(ratio, 4) for ratio in ratios]
        result[f"{way}_cpu_ns_per_row"] = round(statistics.median(found[way]["cpu_ns"] for found in repeats), 1)
        result[f"{way}_rows_per_s"] = round(1e9 / statistics.median(found[way]["wall_ns"] for found in repeats))
    result["decode_cpu_ns_per_row"] = round(statistics.median(found["decode"]["cpu_ns"] for found in repeats), 1)
    per_id = [found[way]["hash_ns_per_id"] for found in repeats for way in ("unshuffled", "shuffled")]
    result["hash_ns_per_id"] = round(statistics.median(per_id), 3)
    return result


def measure_alone(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load all files once in this process; return rows/s, the peak of its memory and the time to the first batch."""
    start = time.monotonic()
    dataset = open_files(arguments.folder, arguments.checksums)
    loader = build_loader(dataset, HashMapping(1_000_003, 0), True, arguments)
    with closing(loader.batches()) as batches:
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


def _in_a_process(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts/benchmark.py"), "loader", "--alone", "--folder", str(folder)]
    command += ["--streams", "8", "--threads", "2", "--batch-size", str(arguments.batch_size)]  # as by default
    command += [] if arguments.checksums else ["--no-checksums"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _times_ten(folder: Path) -> Path:
    """Return a folder with every file ten times, as hard links."""
    ten = folder.with_name(folder.name + "-times-10")
    if not ten.exists():
        ten.mkdir()
        for path in folder.glob("*.parquet"):
            for copy in range(10):
                (ten / f"copy-{copy}-{path.name}").hardlink_to(path)
    return ten


def _many_files(folder: Path, count: int = 10_000) -> Path:
    """Return a folder of many files of 200 rows each, all of the same content."""
    many = folder.with_name(f"{count}-files")
    if not many.exists():
        small = folder.with_name("small")
        with pq.ParquetFile(next(folder.glob("*.parquet"))) as file:
            rows = pa.Table.from_batches([next(file.iter_batches(200))])
        with ParquetSink(small / "part.parquet", rows.schema) as sink:
            sink.write(rows)
        content = (small / "part.parquet").read_bytes()
        many.mkdir()
        for i in range(count):
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
        result["once"] = _in_a_process(folder, arguments)
        result["ten_times"] = _in_a_process(_times_ten(folder), arguments)
        result["ten_thousand_files"] = _in_a_process(_many_files(folder), arguments)
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
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument(
        "--threads", type=int, default=0, help="decoding threads; 0: all in one thread, as bare decoding"
    )
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--no-checksums", dest="checksums", action="store_false", help="verify none, bare and loaded")
    parser.add_argument("--ratios-only", action="store_true", help="leave out ten times the data and 10,000 files")
    parser.add_argument("--folder", type=Path, default=ROOT / "data/.cache/loader-benchmark", help="for its files")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
