"""What each way to save memory saves and costs: one model and data set with every strategy, single and stacked.

    python benchmarks/compare_strategies.py configs/dlrm_frappe.yaml --seeds 1 2 3 --out benchmarks/strategies_frappe

Every run has its own process, so that peaks are its own. The first strategy is plain torch: FP32 nn.Embedding, dense
gradients, Adam for all parameters (`plain_torch.py`). Writes OUT.json, OUT.md and OUT.svg; runs that are in OUT.json
are not repeated, so that this can be stopped and started again.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launcher import launch_command, machine  # noqa: E402

from recsys.runtime.versions import exit_unless_installed, installed_versions  # noqa: E402

exit_unless_installed()

from recsys.config import Config, IdMappingType, config_text, load_config  # noqa: E402
from recsys.report.drawing import draw_bars  # noqa: E402
from recsys.tables.row_codes import row_bytes  # noqa: E402

SMALL_TABLE = 100  # tables of fewer rows stay as they are
PLAIN = "plain torch"


@dataclass(frozen=True)
class Strategy:
    """One row of the table.

    Attributes:
        overrides: of the config.
        command: the script that trains, and its options. nproc: processes.
        shared: whether the large tables are replaced by one shared table with half of all their rows.
        teacher: overrides of a run that is trained first, whose scores are learned in addition to the labels, or None.
    """

    name: str
    overrides: tuple[str, ...] = ()
    command: tuple[str, ...] = ("train.py",)
    nproc: int = 1
    shared: bool = False
    teacher: tuple[str, ...] | None = None


def strategies(
    config: Config,
    of_plain: Sequence[str] = (),
    of_state: Sequence[str] = (),
    of_rowwise: Sequence[str] = (),
    of_stack: Sequence[str] = (),
) -> list[Strategy]:
    """Return the strategies that fit a config.

    Args:
        of_plain: further overrides for plain torch. of_state: for Adagrad, with which single strategies are tried.
            of_rowwise: for row-wise Adagrad. of_stack: for stacks, from half the dimension on.
    """
    tables = config.tables
    large = {name: table for name, table in tables.items() if table.num_embeddings > SMALL_TABLE}
    told_apart = getattr(config.model, "item_id", None)  # items must each have a row of their own
    composed = [name for name in large if not told_apart or config.features[told_apart].table != name]

    def each(setting: Callable[[str], str], names: Any = tables) -> tuple[str, ...]:
        return tuple(f"tables.{name}.{setting(name)}" for name in names)

    def hashed(ratio: int) -> tuple[str, ...]:
        rows = {name: table.num_embeddings // ratio for name, table in large.items()}
        return (
            *each(lambda name: "mapping=hash", large),
            *each(lambda name: f"num_embeddings={rows[name]}", large),
        )

    def trimmed(percent: int) -> tuple[str, ...]:
        rows = {name: table.num_embeddings * percent // 100 for name, table in large.items()}
        return (
            *each(lambda name: "mapping=vocabulary", large),
            *each(lambda name: f"num_embeddings={rows[name]}", large),
            *each(lambda name: "num_buckets=8", large),
        )

    # State for every element: compared with "in-backward update, full state", this shows what a strategy alone saves.
    full = ("optimizer.tables={name: adagrad, learning_rate: 0.02}", *of_state)
    own = config.optimizer.tables.name.name
    fp16 = each(lambda name: "data_type=FP16")
    rowwise = ("optimizer.tables={name: rowwise_adagrad, learning_rate: 0.05}", *of_rowwise)
    halved = each(lambda name: f"embedding_dim={max(4, tables[name].embedding_dim // 8 * 4)}")
    low_rank = (
        *each(lambda name: f"projected_dim={tables[name].model_dim}"),
        *each(lambda name: f"embedding_dim={max(4, tables[name].model_dim // 16 * 4)}"),
    )
    cold = {
        name: f"num_embeddings: {table.num_embeddings}, embedding_dim: {max(4, table.model_dim // 16 * 4)}, "
        f"projected_dim: {table.model_dim}, mapping: vocabulary, pooling: {table.pooling.name}"
        for name, table in tables.items()
        if name in composed
    }
    mixed = (
        *each(lambda name: "mapping=vocabulary", cold),
        *each(lambda name: f"num_embeddings={tables[name].num_embeddings // 8}", cold),
        *each(lambda name: f"experts={{others: [{name}_cold]}}", cold),
        *(f"tables.{name}_cold={{{settings}}}" for name, settings in cold.items()),
    )
    coded = {code: each(lambda name, code=code: f"quantize={code}") for code in ("INT8", "INT4")}  # type: ignore[misc]
    quotients = {name: 2 + int(2 * (table.num_embeddings) ** 0.5) + 1 for name, table in large.items()}
    batch = config.train.global_batch_size
    lists = [name for name, feature in config.features.items() if feature.max_length]
    chosen = [
        Strategy(PLAIN, tuple(of_plain), command=("benchmarks/plain_torch.py",)),
        *(
            [Strategy("plain torch, padded lists", tuple(of_plain), command=("benchmarks/plain_torch.py", "--pad"))]
            if lists
            else []
        ),
        Strategy("in-backward update, full state", full),
        Strategy("row-wise state", rowwise),
        Strategy(f"the config's optimizer: {own}"),
        Strategy("FP16 tables", (*full, *fp16)),
        Strategy("half the dimension", (*full, *halved)),
        Strategy("a quarter of the dimension, widened by a matrix", (*full, *low_rank)),
        Strategy("experts: an eighth of the ids wide, the rest a quarter", (*full, *mixed)),
        *(Strategy(f"trained for rows of {code}", (*full, *words)) for code, words in coded.items()),
        *(Strategy(f"hashed to 1/{ratio} of the rows", (*full, *hashed(ratio))) for ratio in (2, 4, 8)),
        Strategy("two hashes, 1/4 of the rows", (*full, *hashed(4), *each(lambda name: "num_hashes=2", composed))),
        Strategy(
            "quotient and remainder",
            (
                *full,
                *each(lambda name: "mapping=quotient_remainder", composed),
                *each(lambda name: f"num_ids={tables[name].num_embeddings}", composed),
                *each(lambda name: f"num_embeddings={quotients[name]}", composed),
            ),
        ),
        *([Strategy("one shared table of half the rows", full, shared=True)] if len(large) > 1 else []),
        *(Strategy(f"rows for the most frequent ids, {share} %", (*full, *trimmed(share))) for share in (75, 50)),
        Strategy("micro-batches of 1/4", (*full, f"train.micro_batch_size={max(1, batch // 4)}")),
        Strategy("activation checkpointing", (*full, "train.activation_checkpointing=true")),
        Strategy("BF16 autocast", (*full, "precision.autocast=bf16")),
        Strategy("windows of 4 MiB, one batch ahead", (*full, "data.window_mib=4", "data.prefetch_batches=1")),
        Strategy("two processes", full, nproc=2),
        Strategy("two processes, dense state shared", (*full, "train.dense_sharding=optimizer"), nproc=2),
    ]
    if config.model.needs().labels:
        chosen += [
            Strategy("half of the negatives", (*full, "data.keep_negatives=0.5")),
            Strategy("half the dimension, taught by the whole", (*full, *halved), teacher=full),
        ]
    stack: tuple[str, ...] = ()
    for name, overrides in (
        (f"{own} + FP16", fp16),
        ("half the dimension", (*halved, *of_stack)),
        ("rows for the most frequent ids, 75 %", trimmed(75)),
        (
            "micro-batches, checkpointing",
            (f"train.micro_batch_size={max(1, batch // 4)}", "train.activation_checkpointing=true"),
        ),
    ):
        stack += overrides
        chosen.append(Strategy(f"stack: {name}" if stack == overrides else f"stack: + {name}", stack))
    return chosen


def run_once(strategy: Strategy, config: str, overrides: list[str], seed: int) -> dict[str, Any]:
    """Train one strategy with one seed; return its test metrics, samples/s and bytes by kind, summed over all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        launcher = launch_command(strategy.nproc)
        if strategy.shared:
            config, overrides = share_a_table(config, overrides, Path(folder))
        seeded = [*overrides, f"seed={seed}"]
        script, *options = strategy.command
        if strategy.teacher is not None:
            _run(strategy.name, [*launcher, script, config, *seeded, *strategy.teacher, f"run.dir={folder}/teacher"])
            seeded.append(f"train.distill.teacher={folder}/teacher")
        _run(strategy.name, [*launcher, script, config, *seeded, *strategy.overrides, f"run.dir={run_dir}", *options])
        result = json.loads((run_dir / "result.json").read_text())
        measured = result if "memory" in result else {**result, **_memory_of_ranks(run_dir, result["world_size"])}
        keys = ("memory", "served_bytes", "loader_bytes", "peak_rss_bytes", "peak_bytes", "samples_per_s", "steps")
        return {**{key: measured[key] for key in keys}, "test": measured["metrics"]["test"]}


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {' '.join(command)}\n{done.stderr[-2000:]}")


def share_a_table(config: str, overrides: list[str], folder: Path) -> tuple[str, list[str]]:
    """Return a config file and overrides in which one table, as wide as the widest, replaces the large tables."""
    whole = load_config(config, overrides)
    large = {name: table for name, table in whole.tables.items() if table.num_embeddings > SMALL_TABLE}
    rows = sum(table.num_embeddings for table in large.values()) // 2
    widest = max(large.values(), key=lambda table: table.embedding_dim)
    whole.tables = {name: table for name, table in whole.tables.items() if name not in large}
    whole.tables["shared"] = replace(widest, num_embeddings=rows, mapping=IdMappingType.hash)
    for feature in whole.features.values():
        feature.table = "shared" if feature.table in large else feature.table
    (folder / "shared.yaml").write_text(config_text(whole))
    return str(folder / "shared.yaml"), []


def _memory_of_ranks(run_dir: Path, world_size: int) -> dict[str, Any]:
    reports = [json.loads((run_dir / f"memory/rank_{rank}.json").read_text()) for rank in range(world_size)]
    memory: dict[str, int] = {}
    for line in (line for report in reports for line in report["lines"]):
        memory[line["kind"]] = memory.get(line["kind"], 0) + line["measured_bytes"]
    hosts = [report["host"] for report in reports]
    return {
        "memory": memory,
        "served_bytes": _served_bytes(run_dir, reports),
        "loader_bytes": sum(sum(report["loader"].values()) for report in reports),
        "peak_rss_bytes": sum(host["peak_rss_bytes"] for host in hosts),
        "peak_bytes": sum(host["peak_rss_bytes"] - host["baseline_bytes"] for host in hosts),
    }


def _served_bytes(run_dir: Path, reports: list[dict[str, Any]]) -> int:
    """Return the bytes of the tables' rows in the form that `recsys export` writes: in the codes of `quantize`."""
    tables = load_config(run_dir / "config.yaml").tables
    rows: dict[str, int] = {}
    for entry in (entry for report in reports for entry in report["tables"]):
        ends = [piece["offset"][0] + piece["rows"] for piece in entry["pieces"]]
        rows[entry["name"]] = max([rows.get(entry["name"], 0), *ends])
    return sum(count * row_bytes(tables[name], tables[name].quantize) for name, count in rows.items())


def summarise(runs: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Return a strategy's figures over its seeds: means, but medians of figures that depend on the machine's noise.

    `peak_bytes`, the memory above that after imports, is None for runs from before it was recorded.
    """
    memory = runs[0]["memory"]
    above = [run["peak_bytes"] for run in runs if "peak_bytes" in run]
    values = [run["test"][metric] for run in runs]
    return {
        "table_bytes": sum(size for kind, size in memory.items() if kind.startswith("table_")),
        "dense_bytes": sum(size for kind, size in memory.items() if kind.startswith("dense_")),
        "loader_bytes": statistics.median(run["loader_bytes"] for run in runs),
        "served_bytes": runs[0].get("served_bytes", memory.get("table_weight", memory.get("table_parameter_bytes"))),
        "peak_rss_bytes": statistics.median(run["peak_rss_bytes"] for run in runs),
        "peak_bytes": statistics.median(above) if above else None,
        "samples_per_s": statistics.median(run["samples_per_s"] for run in runs),
        metric: statistics.mean(values),
        "stdev": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def as_markdown(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    metric, rows = result["metric"], result["strategies"]
    plain = rows[PLAIN]["summary"]
    lines = [
        f"| Strategy | Tables, MiB | Less | Served, MiB | Dense, MiB | Loader, MiB | Process, MiB | Above imports, MiB "
        f"| Samples/s | {metric} | Change |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        summary = row["summary"]
        mib = [f"{summary[key] / 2**20:,.2f}" for key in ("table_bytes", "served_bytes", "dense_bytes")]
        keys = ("loader_bytes", "peak_rss_bytes", "peak_bytes")
        memory = ["–" if summary[key] is None else f"{summary[key] / 2**20:,.0f}" for key in keys]
        less = f"{plain['table_bytes'] / summary['table_bytes']:.1f}×"
        score = f"{summary[metric]:.4f} ± {summary['stdev']:.4f}" if len(row["runs"]) > 1 else f"{summary[metric]:.4f}"
        cells = [name, mib[0], less, *mib[1:], *memory, f"{summary['samples_per_s']:,.0f}", score]
        lines.append(f"| {' | '.join(cells)} | {summary[metric] - plain[metric]:+.4f} |")
    return "\n".join(lines) + "\n"


def as_svg(result: dict[str, Any]) -> str:
    """Return an SVG with a bar for the tables of each strategy, on a logarithmic scale, and a dot for its metric."""
    sizes = {name: row["summary"]["table_bytes"] for name, row in result["strategies"].items()}
    scores = [row["summary"][result["metric"]] for row in result["strategies"].values()]
    least, most, worst = min(sizes.values()) / 2, max(sizes.values()), min(scores)
    bars = [
        (name, math.log(size / least) / math.log(most / least), f"{size / 2**20:,.3f} MiB")
        for name, size in sizes.items()
    ]
    dots = [((score - worst) / (max(scores) - worst or 1), f"{score:.4f}") for score in scores]
    return draw_bars(bars, left=320, width=1000, dots=dots)


def main() -> None:
    """Parse the command line, do the missing runs, and write the three files after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--metric", default="auc", help="of data.test (default: auc)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="strategies to run; plain torch comes with them")
    for name, of in (
        ("plain", "plain torch alone, whose Adam trains tables too"),
        ("state", "all strategies with Adagrad, such as optimizer.tables.learning_rate"),
        ("rowwise", "row-wise Adagrad"),
        ("stack", "stacks from half the dimension on, which may want another learning rate and dropout"),
    ):
        parser.add_argument(f"--{name}", nargs="+", metavar="key=value", default=[], help=f"for {of}")
    parser.add_argument("--out", type=Path, required=True, help="path without the endings .json, .md and .svg")
    arguments = parser.parse_args()
    chosen = strategies(
        load_config(arguments.config, arguments.overrides),
        arguments.plain,
        arguments.state,
        arguments.rowwise,
        arguments.stack,
    )
    unknown = set(arguments.only or ()) - {strategy.name for strategy in chosen}
    if unknown:
        parser.error(f"no strategy {min(unknown)!r}; there are: {', '.join(each.name for each in chosen)}")
    path = arguments.out.with_suffix(".json")
    before = json.loads(path.read_text())["strategies"] if path.exists() else {}
    runs = {strategy.name: before.get(strategy.name, {}).get("runs", {}) for strategy in chosen}
    for strategy in chosen:
        for seed in map(str, arguments.seeds):
            if seed not in runs[strategy.name] and strategy.name in (PLAIN, *(arguments.only or [strategy.name])):
                run = run_once(strategy, arguments.config, arguments.overrides, int(seed))
                runs[strategy.name][seed] = run
                print(f"{strategy.name}, seed {seed}: {run['test'][arguments.metric]:.4f}", flush=True)
                write(arguments, chosen, runs)
    write(arguments, chosen, runs)


def write(arguments: argparse.Namespace, chosen: list[Strategy], runs: dict[str, dict[str, Any]]) -> None:
    """Write the three files from the runs so far, which are given by strategy and seed."""
    result = {
        "config": arguments.config,
        "overrides": arguments.overrides,
        "metric": arguments.metric,
        "machine": machine(),
        "versions": installed_versions(),
        "strategies": {
            each.name: {
                "overrides": each.overrides,
                "summary": summarise(list(runs[each.name].values()), arguments.metric),
                "runs": runs[each.name],
            }
            for each in chosen
            if runs[each.name]
        },
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(as_markdown(result))
    arguments.out.with_suffix(".svg").write_text(as_svg(result))


if __name__ == "__main__":
    main()
