"""Training throughput at the shapes that the field quotes, from batches on the device, page-locked ones, and Parquet.

`criteo` is DLRM with dots over 26 ids and 13 floats; `multi_hot` MLPerf's DLRM-DCNv2, whose 26 lists have 1 to 100 ids.
Tables are cut to `--max-rows`, and ids are made by a power law. Prints a line a measurement, and writes JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.runtime.environment import prepare_environment  # noqa: E402

prepare_environment()  # before pyarrow is imported

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import torch  # noqa: E402
from launcher import launch_command, machine  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from recsys.config import Config, load_config  # noqa: E402
from recsys.data.batch import Batch  # noqa: E402
from recsys.data.inputs import open_inputs  # noqa: E402
from recsys.datasets.writer import write_parts  # noqa: E402
from recsys.runtime.logs import quiet_libraries  # noqa: E402
from recsys.runtime.versions import installed_versions  # noqa: E402
from recsys.runtime.world import World, open_world  # noqa: E402
from recsys.step.pipeline import TimedIterator, build_pipeline  # noqa: E402
from recsys.training.build import Built, build_model  # noqa: E402

# Rows of MLPerf's tables and ids of its lists: github.com/mlcommons/training, recommendation_v2/torchrec_dlrm.
ROWS = [40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976]
ROWS += [14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36]
IDS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
NUM_FLOATS = 13
MODELS = {
    "criteo": "{name: dlrm, bottom_mlp: [512, 256], top_mlp: [1024, 1024, 512, 256]}",
    "multi_hot": "{name: dcn, structure: stacked, num_cross_layers: 3, rank: 512, bottom_mlp: [512, 256, 128], "
    "mlp: [1024, 1024, 512, 256]}",
}
PRECISIONS = {"fp32": [], "tf32": ["precision.tf32=true"], "bf16": ["precision.autocast=bf16"]}
FEEDS = ("device", "page_locked", "parquet")
ROW_GROUP_ROWS = 65536
EPOCHS = 3  # of the loader alone


def write_files(folder: Path, shape: str, num_rows: int, max_rows: int) -> None:
    """Write ids popular by a power law, floats, and a label by chance."""
    generator = np.random.default_rng(1)

    def column(rows: int, ids: int, number: int) -> pa.Array:
        ids = 1 if shape == "criteo" else ids
        found = pa.array((generator.zipf(1.2, number * ids) % min(rows, max_rows)).astype(np.int32))
        bounds = pa.array(np.arange(number + 1, dtype=np.int32) * ids)
        return found if shape == "criteo" else pa.ListArray.from_arrays(bounds, found)

    def tables() -> Iterator[pa.Table]:
        for start in range(0, num_rows, ROW_GROUP_ROWS):
            number = min(ROW_GROUP_ROWS, num_rows - start)
            columns = {f"c{i}": column(*each, number) for i, each in enumerate(zip(ROWS, IDS, strict=True))}
            columns |= {f"f{i}": pa.array(generator.random(number, np.float32)) for i in range(NUM_FLOATS)}
            yield pa.table(columns | {"label": pa.array(generator.integers(0, 2, number, np.int8))})

    write_parts(tables(), folder, ROW_GROUP_ROWS, 4 * ROW_GROUP_ROWS)


def config_of(shape: str, data: Path, arguments: argparse.Namespace, overrides: list[str]) -> Config:
    """Return the config of a shape."""
    ids = [f"c{i}: {{table: t{i}}}" for i in range(len(ROWS))]
    floats = [f"f{i}: {{type: float}}" for i in range(NUM_FLOATS)]
    sizes = [max(8, min(rows, arguments.max_rows)) for rows in ROWS]
    tables = [f"t{i}: {{num_embeddings: {rows}, embedding_dim: {arguments.dim}}}" for i, rows in enumerate(sizes)]
    text = (
        f"data: {{train: {data}, label_column: label}}\nfeatures: {{{', '.join(ids + floats)}}}\n"
        f"tables: {{{', '.join(tables)}}}\nmodel: {MODELS[shape]}\n"
        f"train: {{global_batch_size: {arguments.batch_size}}}\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load_config(file.name, overrides)


def now(device: torch.device) -> float:
    """Return the time when all that the device has been given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def train(built: Built, batches: Iterable[Batch], warm: int, world: World) -> dict[str, float]:
    """Train all batches; return steps/s after the first `warm`, and of that time the shares of waiting and idling."""
    pipeline = build_pipeline(built.model, built.dense_optimizer, world.device, debug=False)
    timed, done, start, waited = TimedIterator(iter(batches)), 0, 0.0, 0.0
    on_gpu = world.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA]) if on_gpu else nullcontext() as found:
        while True:
            if done == warm:
                start, waited = now(world.device), timed.seconds
            try:
                pipeline.progress(timed)
            except StopIteration:
                break
            done += 1
    seconds = now(world.device) - start
    pipeline.detach()
    shares = {"wait_share": (timed.seconds - waited) / seconds}
    if on_gpu:
        shares["idle_share"] = idle_share(found)
    return {"steps_per_s": (done - warm) / seconds, **shares}


def idle_share(found: Any) -> float:
    """Return the share of the second half of a profile in which the GPU ran no kernel."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events() or []
        if event.device_type == DeviceType.CUDA
    )
    spans = spans[len(spans) // 2 :]
    busy, end = 0.0, spans[0][0]
    for begin, stop in spans:
        busy, end = busy + max(0.0, stop - max(begin, end)), max(end, stop)
    return 1 - busy / (end - spans[0][0])


def measure(shape: str, precision: str, data: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train from each feed in turn, in this process or as one of the ranks."""
    config, results = config_of(shape, data, arguments, [*PRECISIONS[precision], *arguments.overrides]), []
    with open_world(config.run.device, config.run.num_threads) as world:
        inputs = open_inputs(config, world)
        built, loader = build_model(inputs), inputs.loader("train")
        with closing(loader.batches()) as batches:
            held = list(islice(batches, arguments.held))  # the loader does not write over what is kept
        steps = arguments.warm + arguments.steps
        for feed in arguments.feeds:
            if feed == "parquet":
                # More epochs than it takes, since the decoding of an epoch's first rows is not what is measured.
                with closing(loader.batches(num_epochs=1 + steps)) as batches:
                    found = train(built, islice(batches, steps), arguments.warm, world)
            else:
                mine = [each.to(world.device) for each in held] if feed == "device" else held
                found = train(built, islice(cycle(mine), steps), arguments.warm, world)
            rows = held[0].num_rows * world.world_size
            shown = {"samples_per_s": round(found.pop("steps_per_s") * rows)}
            results.append({"shape": shape, "precision": precision, "feed": feed, "ranks": world.world_size, **shown})
            results[-1] |= {name: round(share, 4) for name, share in found.items()} | sizes_of(built, held[0])
            if world.rank == 0:
                print(json.dumps(results[-1]), flush=True)
        if world.rank == 0 and arguments.part is not None:
            arguments.part.write_text(json.dumps(results))
        del built, held
    return results


def sizes_of(built: Built, batch: Batch) -> dict[str, int]:
    """Return the bytes of all tables' weights, and of a sample on its way to the device and in its vectors."""
    shapes, ids = [piece.size for piece in built.pieces], batch.ids.values().numel()
    content = 0 if batch.content is None else batch.content.numel()
    return {
        "table_bytes": sum(4 * rows * columns for rows, columns in shapes),
        "batch_bytes_a_sample": content // batch.num_rows,
        "vector_bytes_a_sample": 4 * max(columns for _, columns in shapes) * ids // batch.num_rows,
    }


def loader_rates(data: Path, shape: str, arguments: argparse.Namespace) -> dict[int, int]:
    """Return rows/s of the loader alone by its number of threads, over whole epochs from before the first batch."""
    rates = {}
    for threads in arguments.loader_threads:
        config = config_of(shape, data, arguments, [*arguments.overrides, f"data.num_threads={threads}"])
        with open_world(config.run.device, config.run.num_threads) as world:
            loader = open_inputs(config, world).loader("train")
            start = time.monotonic()
            with closing(loader.batches(num_epochs=EPOCHS)) as batches:
                rows = sum(batch.num_rows for batch in batches)
            rates[threads] = round(rows / (time.monotonic() - start))
    return rates


def main() -> None:
    """Write the files, measure each shape and precision in processes of its own, and write the JSON."""
    arguments = parse()
    quiet_libraries()
    if arguments.part is not None:
        measure(arguments.shapes[0], arguments.precisions[0], arguments.data, arguments)
        return
    results, loaders = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.shapes:
            data, part = Path(folder) / shape, Path(folder) / "part.json"
            write_files(data, shape, arguments.rows, arguments.max_rows)
            for precision in arguments.precisions:
                changed = ["--shapes", shape, "--precisions", precision, "--data", str(data), "--part", str(part)]
                subprocess.run([*launch_command(arguments.ranks), *sys.argv, *changed], check=True)
                results += json.loads(part.read_text())
            loaders[shape] = loader_rates(data, shape, arguments)
            print(f"{shape}: rows/s of the loader by its threads: {loaders[shape]}", flush=True)
    chosen = {key: getattr(arguments, key) for key in ("batch_size", "dim", "max_rows", "rows", "overrides")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = {**chosen, "results": results, "loader_rows_per_s_by_threads": loaders, "device": device}
    if arguments.out is not None:
        text = json.dumps({**found, "versions": installed_versions(), "machine": machine()}, indent=1)
        arguments.out.write_text(text + "\n")


def parse() -> argparse.Namespace:
    """Return the options, whose defaults are what a CPU of two cores does in minutes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[])
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32", "bf16"])
    parser.add_argument("--feeds", nargs="+", choices=FEEDS, default=FEEDS, help="without a GPU the first two are one")
    parser.add_argument("--batch-size", type=int, default=2048, help="of all ranks; the field's figures are of 65,536")
    parser.add_argument("--dim", type=int, default=16, help="of the tables; the field's figures are of 128")
    parser.add_argument("--max-rows", type=int, default=100_000, help="of a table; MLPerf's have up to 40,000,000")
    parser.add_argument("--rows", type=int, default=262_144, help="rows of the Parquet files")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm", type=int, default=20, help="steps before those that are measured")
    parser.add_argument("--held", type=int, default=16, help="batches that are kept and trained again and again")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--loader-threads", type=int, nargs="*", default=[1, *range(2, 1 + (os.cpu_count() or 1), 2)])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
