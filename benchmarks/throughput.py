"""Training throughput for shapes quoted in the field, from batches on the device, in page-locked memory and in Parquet.

`criteo` is DLRM with dots over 26 ids and 13 floats; `texts` is the same with ids like in Criteo's files, eight
hexadecimal digits; `multi_hot` is MLPerf's DLRM-DCNv2, whose 26 lists have 1 to 100 ids. Tables are cut to
`--max-rows`, and ids follow a power law. Without variants, only the loader is measured. Prints a line for each
measurement, and writes JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
from bare_loop import Bare, bare_batch, now  # noqa: E402
from launcher import launch_command, write  # noqa: E402
from step_trace import TRACED_STEPS, traced  # noqa: E402
from torchrec import EmbeddingBagCollection  # noqa: E402
from torchrec.models.dlrm import DLRM, DLRM_DCN  # noqa: E402

from recsys.config import Config, load_config  # noqa: E402
from recsys.config.choices import Autocast  # noqa: E402
from recsys.data.batch import Batch  # noqa: E402
from recsys.data.inputs import open_inputs  # noqa: E402
from recsys.data.order import Position  # noqa: E402
from recsys.datasets.writer import write_parts  # noqa: E402
from recsys.ids import hash_integers  # noqa: E402
from recsys.runtime.logs import quiet_libraries  # noqa: E402
from recsys.runtime.versions import installed_versions  # noqa: E402
from recsys.runtime.world import World, open_world  # noqa: E402
from recsys.step.pipeline import TimedIterator, build_pipeline  # noqa: E402
from recsys.step.step import AUTOCAST_TYPES  # noqa: E402
from recsys.training.build import Built, build_model  # noqa: E402

# Rows of MLPerf's tables and ids of its lists: github.com/mlcommons/training, recommendation_v2/torchrec_dlrm.
ROWS = [40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976]
ROWS += [14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36]
IDS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
NUM_FLOATS = 13
_DOTS = "{name: dlrm, bottom_mlp: [512, 256], top_mlp: [1024, 1024, 512, 256]}"
MODELS = {
    "criteo": _DOTS,
    "texts": _DOTS,
    "multi_hot": "{name: dcn, structure: stacked, num_cross_layers: 3, rank: 512, bottom_mlp: [512, 256, 128], "
    "mlp: [1024, 1024, 512, 256]}",
}
# Alternatives to FP32 and other settings; UVM is used for tables of more than 100,000 rows.
_LARGE = [i for i, rows in enumerate(ROWS) if rows > 100_000]
VARIANTS = {
    "fp32": [],
    "tf32": ["precision.tf32=true"],
    "bf16": ["precision.autocast=bf16"],
    "fp16": ["precision.autocast=fp16"],
    "compiled": ["train.compile=true"],
    "bf16_compiled": ["precision.autocast=bf16", "train.compile=true"],
    "fp16_tables": [f"tables.t{i}.data_type=FP16" for i in range(len(ROWS))],
    "fp8_tables": [f"tables.t{i}.{each}" for i in range(len(ROWS)) for each in ("data_type=FP8", "init_range=0.01")],
    "bf16_vectors": ["precision.output_dtype=BF16"],
    "uvm": [f"tables.t{i}.compute_kernel=fused_uvm" for i in _LARGE],
    "uvm_caching": [f"tables.t{i}.compute_kernel=fused_uvm_caching" for i in _LARGE],
    "unread": ["train.check_every_step=false"],
    "offload": ["train.activation_offload=true"],
    **{
        f"{each}_{n}": [
            *("precision.autocast=bf16", "train.compile=true"),
            *(f"data.num_threads={n}", f"data.processes={str(each == 'processes').lower()}"),
        ]
        for each in ("threads", "processes")
        for n in (2, 4, 8, 12)
    },
}
FEEDS = ("device", "page_locked", "parquet", "bare")
ROW_GROUP_ROWS = 65536
EPOCHS = 4  # to measure the loader alone, after a first epoch in which its threads start


def write_files(folder: Path, shape: str, num_rows: int, max_rows: int) -> None:
    """Write ids with power-law popularity, floats, and a random label."""
    generators = [np.random.default_rng((1, i)) for i in range(len(ROWS))]
    floats = np.random.default_rng(1)

    def column(i: int, number: int) -> pa.Array:
        ids = IDS[i] if shape == "multi_hot" else 1
        # Rounded-down numbers of Pareto's law of index 0.2, in a tenth of the time of Zipf's, which has the same tail.
        drawn = np.minimum((1 - generators[i].random(number * ids)) ** -5, 1e18).astype(np.int64)
        chosen = (drawn % min(ROWS[i], max_rows)).astype(np.int32)
        if shape == "texts":
            digits = hash_integers(chosen, i).astype(">u4").tobytes().hex().encode()
            eights = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), number, [None, pa.py_buffer(digits)])
            return eights.cast(pa.string())
        values = pa.array(chosen)
        bounds = pa.array(np.arange(number + 1, dtype=np.int32) * ids)
        return values if shape == "criteo" else pa.ListArray.from_arrays(bounds, values)

    def tables() -> Iterator[pa.Table]:
        with ThreadPoolExecutor() as pool:  # because drawing numbers takes longer than all the rest
            for start in range(0, num_rows, ROW_GROUP_ROWS):
                number = min(ROW_GROUP_ROWS, num_rows - start)
                ids = pool.map(column, range(len(ROWS)), [number] * len(ROWS))
                columns = {f"c{i}": each for i, each in enumerate(ids)}
                columns |= {f"f{i}": pa.array(floats.random(number, np.float32)) for i in range(NUM_FLOATS)}
                yield pa.table(columns | {"label": pa.array(floats.integers(0, 2, number, np.int8))})

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


def train(built: Built, batches: Iterator[Batch], world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train `warm` and `steps` batches; return steps/s of the latter, the last loss, and the results of `traced`."""
    pipeline = build_pipeline(built.model, built.dense_optimizer, world.device, debug=False)
    timed, start, waited = TimedIterator(batches), 0.0, 0.0
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)

    def step(number: int) -> Any:
        built.table_updates.begin(1.0, lambda _: number)
        return pipeline.progress(timed)

    for number in range(arguments.warm + arguments.steps):
        if number == arguments.warm:
            start, waited = now(world.device), timed.seconds
        output = step(number)
    seconds = now(world.device) - start
    output.read()
    figures = {"steps_per_s": arguments.steps / seconds, "wait_share": (timed.seconds - waited) / seconds}
    figures |= {"loss": output.loss}
    if on_gpu:
        figures |= {"device_peak_bytes": torch.cuda.max_memory_allocated(world.device)}
    figures |= traced(lambda: step(arguments.warm + arguments.steps), arguments.trace)
    pipeline.detach()
    return figures


def measure(shape: str, variant: str, data: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train from each feed in turn, in this process or as one of the ranks."""
    config, results = config_of(shape, data, arguments, [*VARIANTS[variant], *arguments.overrides]), []
    torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")  # like a run
    with open_world(config.run.device, config.run.num_threads) as world:
        inputs = open_inputs(config, world)
        loader = inputs.loader("train")
        with closing(loader.batches()) as batches:
            held = list(islice(batches, arguments.held))  # the loader does not overwrite batches that are held
        steps = arguments.warm + arguments.steps + TRACED_STEPS
        rows, sizes = held[0].num_rows * world.world_size, sizes_of(config, held[0])
        built: Built | None = None

        def add(feed: str, figures: dict[str, Any]) -> None:
            shown = {"samples_per_s": round(figures.pop("steps_per_s") * rows)}
            results.append({"shape": shape, "variant": variant, "feed": feed, "ranks": world.world_size, **shown})
            results[-1] |= {name: round(v, 4) if isinstance(v, float) else v for name, v in figures.items()}
            results[-1] |= sizes
            if world.rank == 0:
                print(json.dumps(results[-1]), flush=True)
                if arguments.part is not None:
                    arguments.part.write_text(json.dumps(results))

        for feed in arguments.feeds:
            if feed == "bare":
                built = None  # so that its tables make room for those of the bare loop
                add(feed, measure_bare(shape, held, world, arguments, config.precision.autocast))
                continue
            built = built or build_model(inputs)
            if feed == "parquet":
                # More epochs than are needed, so that the loader always has rows to decode ahead.
                with closing(loader.batches(num_epochs=1 + steps)) as batches:
                    found = train(built, islice(batches, steps), world, arguments)
            else:
                mine = [each.to(world.device) for each in held] if feed == "device" else held
                found = train(built, islice(cycle(mine), steps), world, arguments)
            add(feed, found)
        del built, held
    return results


def measure_bare(
    shape: str, held: list[Batch], world: World, arguments: argparse.Namespace, autocast: Autocast
) -> dict[str, float]:
    """Return the steps/s of torchrec's own loop on batches on the device, with the same autocast."""

    def make(tables: EmbeddingBagCollection, num_floats: int, device: torch.device) -> torch.nn.Module:
        top, dim = [1024, 1024, 512, 256, 1], arguments.dim
        if shape != "multi_hot":
            return DLRM(tables, num_floats, [512, 256, dim], top, dense_device=device)
        return DLRM_DCN(tables, num_floats, [512, 256, dim], top, 3, 512, dense_device=device)

    batches = [bare_batch(each).to(world.device) for each in held]
    rows = {f"c{i}": max(8, min(number, arguments.max_rows)) for i, number in enumerate(ROWS)}
    bare, threads = Bare(batches, world, rows, arguments.dim, make, "table_wise"), torch.get_num_threads()
    dtype = AUTOCAST_TYPES.get(autocast)
    with torch.autocast(world.device.type, dtype, enabled=dtype is not None):
        bare.measure(arguments.warm, threads)
        samples = bare.measure(arguments.steps, threads)
    return {"steps_per_s": samples / (held[0].num_rows * world.world_size)}


def sizes_of(config: Config, batch: Batch) -> dict[str, int]:
    """Return the bytes of all tables in FP32, of a sample on its way to the device, and of the vectors of a sample."""
    tables, ids = config.tables.values(), batch.ids.values().numel()
    content = 0 if batch.content is None else batch.content.numel()
    return {
        "table_bytes": sum(4 * table.num_embeddings * table.embedding_dim for table in tables),
        "batch_bytes_a_sample": content // batch.num_rows,
        "vector_bytes_a_sample": 4 * max(table.embedding_dim for table in tables) * ids // batch.num_rows,
    }


def loader_rates(data: Path, shape: str, arguments: argparse.Namespace) -> dict[int, int]:
    """Return the rows/s of the loader alone for each number of threads, over whole epochs after the first."""
    rates = {}
    for threads in arguments.loader_threads:
        config = config_of(shape, data, arguments, [*arguments.overrides, f"data.num_threads={threads}"])
        with open_world(config.run.device, config.run.num_threads) as world:
            loader = open_inputs(config, world).loader("train")
            with closing(loader.batches(num_epochs=1 + EPOCHS)) as batches:
                for _ in islice(batches, loader.steps_left(Position(), 1)):
                    pass
                start = time.monotonic()
                rows = sum(batch.num_rows for batch in batches)
            rates[threads] = round(rows / (time.monotonic() - start))
    return rates


def main() -> None:
    """Write the files, measure each shape and variant in new processes, and write the JSON after each."""
    arguments = parse()
    quiet_libraries()
    if arguments.part is not None:
        measure(arguments.shapes[0], arguments.variants[0], arguments.data, arguments)
        return
    chosen = {key: getattr(arguments, key) for key in ("batch_size", "dim", "max_rows", "rows", "overrides")}
    results: list[dict[str, Any]] = []
    loaders: dict[str, dict[int, int]] = {}

    def write_all() -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        found = {**chosen, "results": results, "loader_rows_per_s_by_threads": loaders, "device": device}
        write(arguments.out, {**found, "versions": installed_versions()})

    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.shapes:
            # Next to the results, where the file stays if this process is ended during a variant.
            beside = Path(folder) / "out" if arguments.out is None else arguments.out
            data, part = Path(folder) / shape, beside.with_name(f"{beside.stem}_part.json")
            write_files(data, shape, arguments.rows, arguments.max_rows)
            for variant in arguments.variants:
                changed = ["--shapes", shape, "--variants", variant, "--data", str(data), "--part", str(part)]
                if arguments.out is not None:
                    changed += ["--trace", str(arguments.out.with_name(f"trace_{shape}_{variant}.json.gz"))]
                done = subprocess.run([*launch_command(arguments.ranks), *sys.argv, *changed])
                if part.exists():  # it has the feeds that were measured, even if another has failed
                    results += json.loads(part.read_text())
                    part.unlink()
                if done.returncode:
                    results.append({"shape": shape, "variant": variant, "failed": done.returncode})
                write_all()
            loaders[shape] = loader_rates(data, shape, arguments)
            print(f"{shape}: rows/s of the loader by its threads: {loaders[shape]}", flush=True)
            write_all()
    if any("failed" in each for each in results):
        sys.exit(1)


def parse() -> argparse.Namespace:
    """Return the options; a CPU with two cores needs minutes for the defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[])
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=["criteo", "multi_hot"])
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=["fp32", "bf16"])
    parser.add_argument(
        "--feeds",
        nargs="+",
        choices=FEEDS,
        default=FEEDS[:3],
        help="without a GPU the first two are one; bare: torchrec's own loop, on batches that lie on the device",
    )
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
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
