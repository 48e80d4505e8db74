"""`--dry-run`: the plan and the memory that a run would take, on machines that need not be here."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recsys.config import Config
from recsys.config.device import check_device
from recsys.distributed import describe_plan
from recsys.errors import UserError
from recsys.fit import Fitter, pieces_of
from recsys.inputs import Inputs, open_inputs
from recsys.memory import RankMemory
from recsys.memory.page import gib, mib, row
from recsys.observe import quiet_libraries, to_json
from recsys.process_group import World, rehearse_world
from recsys.rehearsal import Prediction, data_facts, largest_batch, layer_page, misfits, predict_run
from recsys.tables import Shard
from recsys.topology import Topology, topology_of

SCHEMA_VERSION = 1
_SHOWN_RANKS = 8
_SHOWN_PIECES = 40


@dataclass(frozen=True)
class DryRun:
    """What a dry run has found out.

    Attributes:
        misfits: a sentence for each GPU and machine whose memory is not enough.
        instead: what the device has no kernel for, and what is done in its place.
        changes: what memory.fit has changed.
    """

    config: Config
    topology: Topology
    pieces: list[Shard]
    prediction: Prediction
    misfits: list[str]
    instead: list[str]
    changes: list[str]
    seconds: float


def dry_run(config: Config) -> int:
    """Print the plan and the memory by rank; return the exit status: 0 when it fits, 1 when not.

    With `run.dir` set, memory/dry_run.json and memory/dry_run.md are written there.

    Raises:
        UserError: a mistake in the config, or the memory of a GPU that is not known.
    """
    quiet_libraries()
    found = rehearse_run(config)
    page = format_dry_run(found)
    print(page)
    if config.run.dir is not None:
        folder = Path(config.run.dir) / "memory"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dry_run.md").write_text(page)
        (folder / "dry_run.json").write_text(to_json(as_json(found), indent=1) + "\n")
    return 1 if found.misfits else 0


def rehearse_run(config: Config) -> DryRun:
    """Plan and predict, for the machines of `topology`."""
    start, topology = time.monotonic(), topology_of(config)
    instead = check_device(config, topology.on_gpu)
    with rehearse_world(topology.world_size, topology.local_world_size, topology.device) as world:
        inputs, why_not = _open(config, world)
        data = data_facts(config, inputs, topology.world_size)
        if why_not:
            data = replace(data, source=f"{data.source} ({why_not})")
        changes: list[str] = []
        if config.memory.fit:
            fitted = Fitter(config, data, topology).fit(config.memory.allow)
            changes = [f"memory.fit: {change} ({change.cost})" for change in fitted.changes]
            config = fitted.config
        pieces = pieces_of(config, topology)
        prediction = predict_run(config, data, topology, pieces)
        largest = largest_batch(config, data, topology, pieces)
        wrong = misfits(prediction.ranks, topology)
        if wrong and not config.memory.fit:
            changes.append("memory.fit=true looks for settings that fit")
    prediction = replace(prediction, largest_batch=largest)
    return DryRun(config, topology, pieces, prediction, wrong, instead, changes, time.monotonic() - start)


def _open(config: Config, world: World) -> tuple[Inputs | None, str]:
    try:
        return open_inputs(config, world), ""
    except UserError as error:
        return None, str(error)


def as_json(found: DryRun) -> dict[str, Any]:
    """Return what dry_run.json holds."""
    config, topology, prediction = found.config, found.topology, found.prediction
    return {
        "schema_version": SCHEMA_VERSION,
        "fits": not found.misfits,
        "misfits": found.misfits,
        "topology": {**asdict(topology), "device": topology.device.type},
        "global_batch_size": config.train.global_batch_size,
        "largest_global_batch_size": prediction.largest_batch,
        "data": asdict(prediction.data),
        "dense": asdict(prediction.dense),
        "ranks": [
            {"rank": each.rank, "tables": {name: vars(b) for name, b in each.tables.items()}, "phases": each.phases}
            for each in prediction.ranks
        ],
        "shards": [asdict(piece) for piece in found.pieces],
        "instead": found.instead,
        "changes": found.changes,
        "seconds": round(found.seconds, 2),
    }


def format_dry_run(found: DryRun) -> str:
    """Return the page for people, as Markdown."""
    config, topology, prediction = found.config, found.topology, found.prediction
    ranks, batch = prediction.ranks, config.train.global_batch_size
    memory = f"{gib(topology.host_bytes)} of host memory a machine ({topology.sources['host_bytes']})"
    if topology.on_gpu:
        memory = f"{gib(topology.device_bytes)} a GPU ({topology.sources['device_bytes']}), {memory}"
    lines = [
        f"# Dry run: {config.run.name} on {topology.world_size} × {topology.device.type}",
        "",
        f"- {'Fits' if not found.misfits else 'DOES NOT FIT'} with a global batch of {batch:,} rows; the largest that "
        f"fits under this plan: {prediction.largest_batch:,}",
        *(f"  - {sentence}" for sentence in _few(found.misfits, _SHOWN_RANKS)),
        f"- {topology.num_machines} machines of {topology.local_world_size} ranks, {memory}",
        f"- Ids a row: {sum(prediction.data.mean_ids.values()):.2f}, by {prediction.data.source}",
        *(f"- {sentence}" for sentence in [*found.instead, *found.changes]),
        *_locked(found),
        "",
    ]
    for where in ("device", "host") if topology.on_gpu else ("host",):
        lines += [f"## {'GPU' if where == 'device' else 'Host'} memory by rank at its peak (MiB)", ""]
        lines += _by_rank(ranks, where)
        lines.append("")
    lines += [layer_page(config, prediction.data, prediction.dense.rows)]
    lines += ["## Plan", "", *_few([f"- {line}" for line in describe_plan(found.pieces)], _SHOWN_PIECES), ""]
    return "\n".join([*lines, f"{found.seconds:.1f} s"])


def _locked(found: DryRun) -> list[str]:
    """Tell how the page-locked batches of a machine compare with what may be locked."""
    topology = found.topology
    if not topology.on_gpu:
        return []
    own = found.prediction.ranks[0].phases["step"]["host"].get("loader_batches", 0)
    pinned = own * topology.local_world_size
    limit = "unlimited" if topology.locked_bytes is None else f"{mib(topology.locked_bytes)} MiB"
    return [
        f"- Page-locked by CUDA: {mib(own)} MiB a rank, {mib(pinned)} MiB a machine, of {gib(topology.host_bytes)}; "
        f"RLIMIT_MEMLOCK here: {limit} (it binds mlock and RDMA, not CUDA's driver)"
    ]


def _by_rank(ranks: list[RankMemory], where: str) -> list[str]:
    shown = _shown(ranks, where)
    at_peak = [rank.phases[rank.peak(where)[1]][where] for rank in shown]
    kinds = list(dict.fromkeys(kind for kinds in at_peak for kind in kinds))
    lines = [row("kind", *(f"rank {rank.rank}" for rank in shown)), row("---", *["---:"] * len(shown))]
    lines += [row(kind.replace("_", " "), *(mib(kinds.get(kind, 0)) for kinds in at_peak)) for kind in kinds]
    lines.append(row("**peak**", *(mib(rank.peak(where)[0]) for rank in shown)))
    lines.append(row("phase", *(rank.peak(where)[1] for rank in shown)))
    if len(shown) < len(ranks):
        lines += ["", f"Of {len(ranks)} ranks the fullest, the emptiest and the first are shown."]
    return lines


def _shown(ranks: list[RankMemory], where: str) -> list[RankMemory]:
    if len(ranks) <= _SHOWN_RANKS:
        return ranks
    by_size = sorted(ranks, key=lambda rank: rank.peak(where)[0])
    chosen = {each.rank: each for each in (*by_size[-3:], by_size[0], *ranks)}
    return sorted(list(chosen.values())[:_SHOWN_RANKS], key=lambda rank: rank.rank)


def _few(lines: list[str], most: int) -> list[str]:
    """Return the first lines, long ones cut, and how many there are besides."""
    short = [line if len(line) < 240 else f"{line[:200]} … ({line.count('; ') + 1} pieces)" for line in lines[:most]]
    return short if len(lines) <= most else [*short, f"- … and {len(lines) - most} more"]
