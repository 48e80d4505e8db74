"""What holds memory, and which settings help most, when memory runs out or is predicted to."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recsys.config import Config
from recsys.config.choices import Saver
from recsys.config.topology import num_bytes
from recsys.data.inputs import Inputs
from recsys.errors import NoPlanError, UserError, is_out_of_memory
from recsys.memory import BudgetExceeded, DataFacts, Timeline
from recsys.memory.autofit import MARGIN, Fit, Fitter, Offer
from recsys.memory.data_facts import data_facts
from recsys.memory.levers import Change, with_changes
from recsys.memory.predict import CUDA_CONTEXT_BYTES, NCCL_BYTES
from recsys.runtime.logs import logger
from recsys.runtime.machine import Topology, topology_of
from recsys.runtime.world import World

_STAYS_FREE = f"{MARGIN:.0%} of the memory are left free, since predictions are not exact"


@dataclass(frozen=True)
class Advice:
    """What holds memory, and what would help.

    Attributes:
        holders: what takes most on the fullest rank, with predicted bytes.
        offers: changes of settings. missing: bytes missing over all ranks without them.
        process: result of `Fitter.process`.
    """

    holders: list[tuple[str, int]]
    offers: list[Offer]
    missing: int
    process: tuple[int, int]

    @property
    def first_is_enough(self) -> bool:
        """Whether memory is missing, and would not be with the first offer."""
        return bool(self.missing and self.offers) and not self.offers[0].missing

    def lines(self) -> list[str]:
        """Return the advice as lines of text."""
        held = ", ".join(f"{name} {_mib(size)}" for name, size in self.holders)
        lines = [f"the largest holders, by the prediction: {held}"]
        for number, offer in enumerate(self.offers, start=1):
            enough = f" of {_mib(self.missing)} missing: not enough" if offer.missing else ", which is enough"
            saved = f"saves {_mib(offer.saved)}{enough if self.missing else ''}"
            lines.append(f"{number}. {offer.change} {saved} ({offer.change.full_cost})")
        if not self.missing:
            rest = "something else on this machine, or a limit, holds the rest"
            return [*lines, f"(by the prediction everything fits: {rest})"]
        if self.first_is_enough:
            return [*lines, f"(memory.fit=true chooses by itself; {_STAYS_FREE})"]
        least = min([self.missing, *(offer.missing for offer in self.offers)])
        if in_vain := _in_vain(self.process):
            return [*lines, f"no setting is enough, nor are more ranks: {in_vain}; {_mib(least)} more is needed"]
        return [
            *lines,
            f"no setting is enough: {_mib(least)} more is needed, or more ranks, or smaller tables, layers or batches",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the advice for programs."""
        offers = [offer.as_json() | {"missing": offer.missing} for offer in self.offers]
        holders = [{"name": name, "predicted_bytes": size} for name, size in self.holders]
        missing = {"missing_bytes": self.missing, "first_is_enough": self.first_is_enough}
        return {"holders": holders, "advice": offers, **missing}


def advise(
    config: Config, data: DataFacts, topology: Topology, seen_bytes: int = 0, inputs: Inputs | None = None
) -> Advice:
    """Return what would make a run fit; for the arguments see `Fitter`."""
    fitter = Fitter(config, data, topology, seen_bytes, inputs)
    return Advice(fitter.holders(), fitter.advice(), fitter.missing(config), fitter.process())


def _in_vain(process: tuple[int, int]) -> str:
    """Return why neither settings nor ranks help, if a process by itself takes more than it may; else ""."""
    takes, may_take = process
    text = f"a process takes {_mib(takes)} before it holds a table or a batch, and may take {_mib(may_take)}"
    return text if takes > may_take else ""


class Explained:
    """A context that writes a report of any failure inside; for a lack of memory it raises a UserError with advice.

    Attributes:
        inputs: those of the run, as soon as they are open.
        folder: RUN/memory, where the report goes, as soon as there is one.
        write: writes the report, with a status and further parts.
    """

    def __init__(self, config: Config, world: World, timeline: Timeline) -> None:
        self._config, self._world, self._timeline = config, world, timeline
        self.inputs: Inputs | None = None
        self.folder: Path | None = None
        self.write: Callable[[str, dict[str, Any]], None] = lambda status, parts: None

    def __enter__(self) -> "Explained":
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if not is_out_of_memory(error):
            self.write("failed", {})
            return
        config, world, timeline = self._config, self._world, self._timeline
        if self.folder is not None and config.memory.snapshot and world.device.type == "cuda":
            with suppress(OSError):  # the error to report is the lack of memory
                self.folder.mkdir(exist_ok=True)  # reports, which come later, make it otherwise
                torch.cuda.memory._dump_snapshot(str(self.folder / f"snapshot_rank_{world.rank}.pickle"))
        cause = " ".join(str(error).split())[:300]
        first = f"memory has run out in {timeline.failed_phase or 'reading the data'}, step {timeline.step}: {cause}"
        if isinstance(error, NoPlanError):
            first = cause
        parts: dict[str, Any] = {"error": first}
        try:
            advice = self._advice(timeline.seen_bytes if isinstance(error, BudgetExceeded) else 0)
            parts |= advice.as_json()
            lines = advice.lines()
        except Exception as other:  # with no memory left, or for data that cannot be read
            lines = [f"what would help is not known ({type(other).__name__}: {other})"]
        self.write("out of memory", {"out_of_memory": parts})
        where = [] if self.folder is None else [f"the report is in {self.folder}"]
        raise UserError(first, *lines, *where) from error

    def _advice(self, seen_bytes: int) -> Advice:
        config = self._config if self.inputs is None else self.inputs.config
        topology = topology_of(config, self._world)
        if not topology.on_gpu:  # measured in this process, instead of the usual figure
            topology = replace(topology, start_bytes=self._timeline.baseline_bytes)
        data = data_facts(config, self.inputs, topology.world_size)
        return advise(config, data, topology, seen_bytes, self.inputs)


def limit_memory(config: Config, world: World) -> int | None:
    """Return this process's budget of host memory, if any; a budget of GPU memory is set in torch's allocator."""
    if config.memory.budget is None:
        return None
    budget = num_bytes("memory.budget", config.memory.budget)
    if world.device.type == "cpu":
        return budget
    total = torch.cuda.get_device_properties(world.device).total_memory
    budget -= CUDA_CONTEXT_BYTES + (NCCL_BYTES if world.world_size > 1 else 0)  # which the allocator does not give out
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, budget) / total), world.device)
    return None


def fit_inputs(inputs: Inputs) -> tuple[Inputs, list[Change]]:
    """Return the inputs with a config that fits into memory, and the changes made; collective.

    Raises:
        UserError: on every rank, if what memory.allow lists is not enough.
    """
    config, world = inputs.config, inputs.world
    changes = world.from_rank_zero(lambda: _fitting_changes(inputs, topology_of(config, world)))
    for change in changes:
        kept = "" if change.saver is None else f"; memory.allow has {change.saver.name}: THIS CHANGES WHAT IS LEARNED"
        logger.warning("memory.fit: %s (%s%s)", change, change.cost, kept)
    fitted = copy(inputs)  # no change touches an index of ids, and a second one would take memory
    fitted.config = with_changes(config, changes)
    return fitted, changes


def _fitting_changes(inputs: Inputs, topology: Topology) -> list[Change]:
    config = inputs.config
    fitter = Fitter(config, data_facts(config, inputs, topology.world_size), topology, inputs=inputs)
    fitted = fitter.fit(config.memory.allow)
    if not fitted.missing:
        logger.info("memory.fit: %s on the fullest rank, before any change %s", _mib(fitted.after), _mib(fitted.before))
        return fitted.changes
    sentence = what_fits(fitter, fitted, fitter.allowing(config.memory.allow))
    raise UserError(f"config key 'memory.fit': {sentence}")


def what_fits(fitter: Fitter, fitted: Fit, allow: Sequence[Saver]) -> str:
    """Return a sentence on what memory.fit leaves missing, and what would help; `allow` is from `Fitter.allowing`."""
    names = ",".join(saver.name for saver in allow)
    help_ = f"memory.allow=[{names}] would be enough" if allow else "nothing that memory.allow can list is enough"
    otherwise = "otherwise use more ranks, smaller tables or a smaller train.global_batch_size"
    if in_vain := _in_vain(fitter.process()):
        otherwise = f"{in_vain}; give it more"
    return (
        f"{_STAYS_FREE}; the fullest rank takes {fitter.shortage(fitter.config)}, with what memory.fit may change "
        f"{fitter.shortage(fitted.config)}, and {_mib(fitted.missing)} are missing over all ranks; "
        f"{help_}: {otherwise}"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
