"""`--dry-run`: the plan and the memory of a run, also for machines other than this one."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recsys.config import Config, idle_settings
from recsys.config.choices import Saver
from recsys.config.device import check_device, repeated_decoding
from recsys.data.inputs import Inputs, open_inputs
from recsys.errors import UserError, output_is_cut
from recsys.memory import DataFacts
from recsys.memory.advice import what_fits
from recsys.memory.autofit import Fitter, Offer, planned_shards
from recsys.memory.data_facts import data_facts
from recsys.memory.page import Cell, describe_plan, few_lines, kind_rows, rank_table
from recsys.memory.report import DRY_RUN_JSON, DRY_RUN_PAGE
from recsys.memory.step_time import StepTime, speeds_of, step_load
from recsys.memory.trace import Prediction, demands, largest_batch, layer_page, misfits, predict_run
from recsys.report.text import listed
from recsys.report.text import size as shown
from recsys.runtime.files import cannot_write, replace_file
from recsys.runtime.logs import quiet_libraries, to_json
from recsys.runtime.machine import Topology, topology_of
from recsys.runtime.threads import decode_in_processes, decoding_threads
from recsys.runtime.world import World, rehearse_world
from recsys.tables.spec import Shard

SCHEMA_VERSION = 4  # from 4 on, `changes` holds settings by name instead of sentences
_APART = 0.02  # ranks that differ by less are shown as one


@dataclass(frozen=True)
class Fitted:
    """The result of memory.fit.

    Attributes:
        changes: of settings, with what each saves. missing: bytes still missing with them, over all ranks.
        allow: if it does not fit, what memory.allow has to list for the run to fit.
        advice: if it does not fit, what was found and what to do.
    """

    changes: list[Offer]
    missing: int
    allow: list[Saver]
    advice: str

    def sentences(self) -> list[str]:
        """Return the result as sentences."""
        enough = ", which is not enough" if self.missing else ""
        lines = [f"memory.fit: {x.change} saves {shown(x.saved)}{enough} ({x.change.full_cost})" for x in self.changes]
        return [*lines, f"memory.fit: {self.advice}"] if self.advice else lines


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        largest_batch: the largest global batch that fits; 0 if none fits, None if the memory is not known.
        misfits: a sentence for each GPU, process and machine whose memory is not enough.
        instead: what is replaced since the device has no kernel for it, and settings without effect.
        fitted: result of memory.fit; None if it is not set.
        time: that of a step; None if `topology.speeds` is not given.
    """

    config: Config
    topology: Topology
    shards: list[Shard]
    prediction: Prediction
    largest_batch: int | None
    misfits: list[str]
    instead: list[str]
    fitted: Fitted | None
    time: StepTime | None
    seconds: float


def dry_run(config: Config, price_per_hour: float | None = None) -> int:
    """Print the plan, the time of a step and the memory by rank; return the exit status: 0 if it fits, 1 if not.

    With `run.dir` set, memory/dry_run.json and memory/dry_run.md are written there.

    Args:
        price_per_hour: price of a machine.

    Raises:
        UserError: there is a mistake in the config, a GPU's memory is not known, or run.dir cannot be written.
    """
    quiet_libraries()
    result = rehearse_run(config, price_per_hour)
    page = format_dry_run(result)
    if config.run.dir is not None:
        folder = Path(config.run.dir) / "memory"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / DRY_RUN_PAGE, page)
            replace_file(folder / DRY_RUN_JSON, to_json(as_json(result), indent=1) + "\n")
        except OSError as error:
            raise cannot_write("run.dir", folder, error) from error
    try:
        print(page, flush=True)
    except BrokenPipeError:  # `| head -1` has read enough
        if not output_is_cut():
            raise
    return 1 if result.misfits else 0


def rehearse_run(config: Config, price_per_hour: float | None = None) -> DryRun:
    """Return the plan and the prediction for the machines of `topology`."""
    start, topology = time.monotonic(), topology_of(config)
    speeds = speeds_of(config, topology, price_per_hour)
    instead = check_device(config, topology.on_gpu, topology.world_size) + idle_settings(config)
    with rehearse_world(topology.world_size, topology.local_world_size, topology.device) as world:
        inputs, why_not = _open(config, world)
        data = data_facts(config, inputs, topology.world_size)
        if why_not:
            data = replace(data, source=f"{data.source} ({why_not})")
        fitted = None
        if config.memory.fit:
            config, data, fitted = _fit(config, data, topology, inputs)
        shards = planned_shards(config, topology)
        prediction = predict_run(config, data, topology, shards)
        bounded = topology.on_gpu or topology.host_known
        largest = largest_batch(config, data, topology, shards, prediction.dense) if bounded else None
        wrong = misfits(prediction.ranks, topology)
        of_step = None
        if speeds is not None:
            load = step_load(config, data, prediction.dense, topology, shards)
            rows = None if inputs is None else inputs.datasets["train"].num_rows
            sizes = config.train.global_batch_size, rows, topology.num_machines
            of_step = StepTime(load, speeds, *sizes, price_per_hour)
    parts = config, topology, shards, prediction, largest, wrong, instead, fitted
    return DryRun(*parts, of_step, time.monotonic() - start)


def _fit(
    config: Config, data: DataFacts, topology: Topology, inputs: Inputs | None
) -> tuple[Config, DataFacts, Fitted]:
    """Return the config as changed by memory.fit, the facts of the data for it, and the result of memory.fit."""
    fitter, allowed = Fitter(config, data, topology, inputs=inputs), config.memory.allow
    fit = fitter.fit(allowed)
    allow = fitter.allowing(allowed) if fit.missing else []
    advice = what_fits(fitter, fit, allow) if fit.missing else ""
    fitted = Fitted(fitter.offers(fit.changes), fit.missing, allow, advice)
    return fit.config, fitter.data_of(fit.config), fitted


def _open(config: Config, world: World) -> tuple[Inputs | None, str]:
    try:
        return open_inputs(config, world), ""
    except UserError as error:
        return None, str(error)


def as_json(result: DryRun) -> dict[str, Any]:
    """Return what dry_run.json holds."""
    config, topology, prediction = result.config, result.topology, result.prediction
    return {
        "schema_version": SCHEMA_VERSION,
        "fits": not result.misfits,
        "misfits": result.misfits,
        "topology": {
            **asdict(topology),
            "device": topology.device.type,
            "host_bytes": topology.host_bytes if topology.host_known else None,
        },
        "global_batch_size": config.train.global_batch_size,
        "largest_global_batch_size": result.largest_batch,
        "data": asdict(prediction.data),
        "dense": asdict(prediction.dense),
        "ranks": [
            {"rank": rank.rank, "tables": {name: vars(b) for name, b in rank.tables.items()}, "phases": rank.phases}
            for rank in prediction.ranks
        ],
        "shards": [asdict(shard) for shard in result.shards],
        "time": None if result.time is None else result.time.as_json(),
        "instead": result.instead,
        "changes": [offer.as_json() for offer in result.fitted.changes] if result.fitted else [],
        "missing_bytes": result.fitted.missing if result.fitted else None,
        "allow": [saver.name for saver in result.fitted.allow] if result.fitted else [],
        "seconds": round(result.seconds, 2),
    }


def format_dry_run(result: DryRun) -> str:
    """Return the page as Markdown; its first line is the answer."""
    config, topology, prediction = result.config, result.topology, result.prediction
    ranks = prediction.ranks
    lines = [
        f"# {_answer(result)}",
        "",
        f"- {config.run.name}, a global batch of {config.train.global_batch_size:,} rows on {topology.world_size} × "
        f"{topology.device.type}: {topology.num_machines} machine{'s' if topology.num_machines > 1 else ''} of "
        f"{topology.local_world_size}",
        *(f"- {sentence}" for sentence in (result.time.sentences() if result.time else ())),
        *(
            f"- {sentence}"
            for sentence in [*_memory(result), *_full_or_idle(result), *result.instead, *_changes(result)]
        ),
        *(f"- {sentence}" for sentence in [repeated_decoding(config, topology.world_size)] if sentence),
        f"- Ids a row: {sum(prediction.data.mean_ids.values()):.2f}, by {prediction.data.source}",
        "",
    ]
    for where in ("device", "host") if topology.on_gpu else ("host",):
        peaks = [rank.peak(where) for rank in ranks]
        rows: dict[str, list[Cell]] = {"**peak**": [(peak,) for peak, _ in peaks]}
        rows |= {"phase": [phase for _, phase in peaks]}
        rows |= kind_rows([rank.phases[phase][where] for rank, (_, phase) in zip(ranks, peaks, strict=True)])
        lines += [f"## {'GPU' if where == 'device' else 'Host'} memory by rank at its peak", ""]
        lines += [*rank_table("kind", rows, _APART), ""]
    lines += [layer_page(config, prediction.data, prediction.dense.rows)]
    lines += ["## Plan", "", *few_lines([f"- {line}" for line in describe_plan(result.shards)]), ""]
    return "\n".join([*lines, f"{result.seconds:.1f} s"])


def _answer(result: DryRun) -> str:
    """Return a sentence on whether it fits, where memory is tightest, and the largest batch."""
    topology, largest = result.topology, result.largest_batch
    if largest is None:
        need = max(place.size for place in demands(result.prediction.ranks, topology))
        return f"Host memory not given: {shown(need)} a machine would be needed (topology.host_memory decides)"
    place = max(demands(result.prediction.ranks, topology), key=lambda place: place.size / place.there)
    verdict = "DOES NOT FIT" if result.misfits else "Fits"
    digits = 10 ** max(0, len(str(largest)) - 3)  # more than three are not known
    most = max(largest // digits * digits, 0 if result.misfits else result.config.train.global_batch_size)
    batch = f"the largest global batch that fits is {most:,} rows" if most else "no batch fits"
    return f"{verdict}: {place}; {batch} under this plan"


def _memory(result: DryRun) -> list[str]:
    """Return sentences on how much memory there is, where that figure is from, and how much of it batches lock."""
    topology, ranks = result.topology, result.prediction.ranks
    if topology.host_known:
        host = f"{shown(topology.host_bytes)} of host memory a machine ({topology.sources['host_bytes']})"
    else:
        need = max(place.size for place in demands(ranks, topology) if place.is_machine)
        host = f"host memory not given: {shown(need)} a machine would be needed"
    if not topology.on_gpu:
        return [host[0].upper() + host[1:]]
    own = ranks[0].phases["step"]["host"].get("loader_batches", 0)
    limit = "unlimited" if topology.locked_bytes is None else shown(topology.locked_bytes)
    return [
        f"{shown(topology.device_bytes)} a GPU ({topology.sources['device_bytes']}), {host}",
        f"Page-locked by CUDA: {shown(own)} a rank, {shown(own * topology.local_world_size)} a machine; "
        f"RLIMIT_MEMLOCK here: {limit} (it binds mlock and RDMA, not CUDA's driver)",
        *_decoding(result),
    ]


def _decoding(result: DryRun) -> list[str]:
    """Return a sentence on what decodes data for GPUs, if the number of CPU cores had to be assumed."""
    data, topology = result.config.data, result.topology
    if data.num_threads is not None or torch.cuda.is_available():
        return []
    number = decoding_threads(None, topology.device, topology.local_world_size)
    who = "processes" if decode_in_processes(data.processes, number, topology.device) else "threads"
    return [f"Data is decoded by {number} {who} a rank, as with {number + 2} cores a GPU or more (data.num_threads)"]


def _changes(result: DryRun) -> list[str]:
    """Return sentences on what memory.fit has changed, or that it could."""
    if result.fitted is not None:
        return result.fitted.sentences()
    return ["memory.fit=true looks for settings that fit"] if result.misfits else []


def _full_or_idle(result: DryRun) -> list[str]:
    """Return sentences on GPUs and machines that are too full, hold no table, or are not used."""
    topology, lines = result.topology, []
    world, local = topology.world_size, topology.local_world_size
    full = [place for place in demands(result.prediction.ranks, topology) if place.is_too_much]
    if ranks := [place.number for place in full if not place.is_machine]:
        lines.append(f"Too full: the {'GPUs' if topology.on_gpu else 'processes'} of {listed(ranks)}")
    if machines := [place.number for place in full if place.is_machine]:
        lines.append(f"Too full: the host memory of {listed(machines, 'machine')}")
    idle = set(range(world)) - {shard.rank for shard in result.shards}
    if idle:
        machines = [m for m in range(topology.num_machines) if idle.issuperset(range(m * local, (m + 1) * local))]
        so = f", so none on {listed(machines, 'machine')}" if machines else ""
        lines.append(f"No table is on {listed(idle)}{so}; tables.X.sharding_type=row_wise spreads one over all ranks")
    here = torch.cuda.device_count() if topology.sources["device_bytes"] == "the GPU here" else 0
    if here > local:
        lines.append(f"{here - local} of the {here} GPUs here are not used: topology.world_size={here} takes all")
    return lines
