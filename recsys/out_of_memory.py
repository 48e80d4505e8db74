"""When memory runs out, or would: what holds it, and the settings that help most."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recsys.config import Config
from recsys.config.choices import Saver
from recsys.config.topology import num_bytes
from recsys.data_facts import data_facts
from recsys.errors import NoPlanError, UserError
from recsys.fit import Change, Fitter, with_changes
from recsys.inputs import Inputs
from recsys.memory import BudgetExceeded, DataFacts, Timeline
from recsys.memory.predict import CUDA_CONTEXT_BYTES
from recsys.observe import logger
from recsys.process_group import World
from recsys.topology import Topology, topology_of

_SIGNS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc")


@dataclass(frozen=True)
class Advice:
    """What holds memory, and what would help.

    Attributes:
        holders: of the fullest rank by the prediction, with their bytes.
        changes: with the bytes that each saves there.
        fits: the first of `changes` is enough.
    """

    holders: list[tuple[str, int]]
    changes: list[tuple[Change, int]]
    fits: bool

    def lines(self) -> list[str]:
        """Return it for people."""
        held = ", ".join(f"{name} {_mib(size)}" for name, size in self.holders)
        lines = [f"what takes most, by the prediction: {held}"]
        for number, (change, size) in enumerate(self.changes, start=1):
            enough = ", which is enough" if number == 1 and self.fits else ""
            other = "" if change.saver is None else "; something else is learned"
            lines.append(f"{number}. {change} saves {_mib(size)}{enough} ({change.cost}{other})")
        more = "" if self.fits else "; no setting alone is enough: take more ranks, smaller tables or batches"
        return [*lines, f"(memory.fit=true chooses by itself){more}"]

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        changes = [{"settings": str(c), "cost": c.cost, "saved_bytes": size} for c, size in self.changes]
        holders = [{"name": name, "predicted_bytes": size} for name, size in self.holders]
        return {"holders": holders, "advice": changes, "first_is_enough": self.fits}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory has run out, whatever library it comes from."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | BudgetExceeded | NoPlanError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def advise(config: Config, data: DataFacts, topology: Topology) -> Advice:
    """Return what would make a run fit."""
    fitter = Fitter(config, data, topology)
    changes = fitter.advice()
    fits = bool(changes) and not fitter.missing(with_changes(config, [changes[0][0]]))
    return Advice(fitter.holders(), changes, fits)


@contextmanager
def explained(
    inputs: Inputs, timeline: Timeline, folder: Path, write: Callable[[str, dict[str, Any]], None]
) -> Iterator[None]:
    """Let whatever fails inside leave a report, and memory that runs out, or would, an advice.

    Args:
        folder: RUN/memory, where the report goes.
        write: writes the report, with a status and further parts.

    Raises:
        UserError: memory has run out.
    """
    try:
        yield
    except BaseException as error:
        if not is_out_of_memory(error):
            write("failed", {})
            raise
        config, world = inputs.config, inputs.world
        if config.memory.snapshot and world.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"snapshot_rank_{world.rank}.pickle"))
        topology = topology_of(config, world)
        advice = advise(config, data_facts(config, inputs, topology.world_size), topology)
        cause = " ".join(str(error).split())[:300]
        first = f"memory has run out in {timeline.failed_phase}, step {timeline.step}: {cause}"
        if isinstance(error, NoPlanError):
            first = cause
        write("out of memory", {"out_of_memory": {"error": first, **advice.as_json()}})
        raise UserError(first, *advice.lines(), f"the report is in {folder}") from error


def limit_memory(config: Config, world: World) -> int | None:
    """Return the budget of this process in host memory; that of its GPU is given to torch's allocator."""
    if config.memory.budget is None:
        return None
    budget = num_bytes("memory.budget", config.memory.budget)
    if world.device.type == "cpu":
        return budget
    total = torch.cuda.get_device_properties(world.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, budget - CUDA_CONTEXT_BYTES) / total), world.device)
    return None


def fit_inputs(inputs: Inputs) -> tuple[Inputs, list[Change]]:
    """Return the inputs with a config that fits into memory, and what has been changed; collective.

    Raises:
        UserError: on every rank, when nothing that memory.allow lists is enough.
    """
    config, world = inputs.config, inputs.world
    changes = world.from_rank_zero(lambda: _fitting_changes(inputs, topology_of(config, world)))
    for change in changes:
        kept = "" if change.saver is None else f"; memory.allow has {change.saver.name}: SOMETHING ELSE IS LEARNED"
        logger.warning("memory.fit: %s (%s%s)", change, change.cost, kept)
    changed = with_changes(config, changes)
    return Inputs(changed, inputs.datasets, inputs.corpus, world, inputs.facts), changes


def _fitting_changes(inputs: Inputs, topology: Topology) -> list[Change]:
    config = inputs.config
    fitter = Fitter(config, data_facts(config, inputs, topology.world_size), topology)
    found = fitter.fit(config.memory.allow)
    if not found.missing:
        logger.info("memory.fit: %s on the fullest rank, before any change %s", _mib(found.after), _mib(found.before))
        return found.changes
    other = fitter.fit(tuple(Saver))
    also = [change.saver.name for change in other.changes if change.saver and change.saver not in config.memory.allow]
    help_ = f"memory.allow=[{','.join(also)}] would be enough" if also and not other.missing else "nothing is enough"
    raise UserError(
        f"config key 'memory.fit': the run takes {_mib(found.before)} on its fullest rank, {_mib(found.after)} with "
        f"what keeps what is learned, and {_mib(found.missing)} are missing over all ranks; {help_}: otherwise take "
        f"more ranks, smaller tables or a smaller train.global_batch_size"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
