"""A run from its config to its result: opens its data and its directory, trains, evaluates, reports."""

import shutil
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from recsys.checkpoint import FOOTERS, Source, find_source
from recsys.config import Config, idle_settings
from recsys.config.device import check_device, repeated_decoding
from recsys.config.meaning import refuse_differences
from recsys.data.checks import doubts
from recsys.data.inputs import Inputs, open_inputs
from recsys.errors import UserError, counted
from recsys.memory import Timeline
from recsys.memory.advice import Explained, fit_inputs, limit_memory
from recsys.memory.levers import Change
from recsys.memory.page import describe_plan, few_lines
from recsys.memory.report import SCHEMA_VERSION, write_rank
from recsys.report.page import reported
from recsys.report.trackers import import_trackers, open_writers
from recsys.runtime.environment import give_unused_back
from recsys.runtime.files import copy_files, replace_file
from recsys.runtime.logs import logger, quiet_libraries, start_logging, to_json
from recsys.runtime.run_lock import RunLock
from recsys.runtime.watchdog import Watchdog, open_run_world
from recsys.runtime.world import World
from recsys.tables.shard import save_plan
from recsys.training.alike import check_alike, check_shared, unlike_versions
from recsys.training.build import Built, Publishes, build_model
from recsys.training.figures import log_end
from recsys.training.learning import learn_facts
from recsys.training.memory_log import MemoryLog
from recsys.training.result import asked_of, closing_lines, how_to_go_on, is_finished, run_result
from recsys.training.resume import check_files
from recsys.training.run_dir import prepare_run_dir, saved_text
from recsys.training.taught import with_scores
from recsys.training.trainer import Trainer

_RUN_DIR = "run_dir"  # key of the run directory in the launch's store,
_LOCK = "run_lock"  # and of the lock of its last start
_SNAPSHOT_ENTRIES = 200_000  # the last allocations and frees, with their stacks
STOPPED_STATUS = 143  # as a process that SIGTERM ended: the job is not done


def run(asked: Config, publisher_of: Callable[[Inputs, Built], Publishes] | None = None) -> int:
    """Train as the config says; return the exit status: 0 when done, 143 when a signal stopped it (after saving).

    Args:
        publisher_of: makes the publisher of the model during training, if the config asks for one.

    Raises:
        UserError: a mistake in config or data.
        LostPeerError: another rank ended.
    """
    quiet_libraries()
    with open_run_world(asked.run, not asked.debug) as (world, watchdog), TemporaryDirectory() as folder:
        if asked.debug and world.world_size > 1:
            raise UserError("--debug runs one process; start it without torchrun")
        check_alike(asked, world)
        world.from_rank_zero(lambda: import_trackers(asked))
        timeline = Timeline(world.device, limit_memory(asked, world))
        if asked.memory.snapshot and world.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
        store = world.launch_store
        config = asked
        if world.from_rank_zero(lambda: store.check([_RUN_DIR])):  # torchrun has restarted the ranks of this run
            settings = replace(asked.run, dir=store.get(_RUN_DIR).decode(), resume=True, overwrite=False)
            config = replace(asked, run=settings)
        instead = world.from_rank_zero(lambda: check_device(config, world.device.type == "cuda", world.world_size))
        # Data come first: a mistake in them leaves no run directory behind.
        config = with_scores(config, world)
        footers = Path(folder)
        earlier = store.get(_LOCK).decode() if world.rank == 0 and store.check([_LOCK]) else None
        with RunLock() as lock, reported(world.rank == 0) as report_in, Explained(config, world, timeline) as explained:
            known = Path(config.run.dir) / FOOTERS if config.run.dir and config.run.resume else None
            explained.inputs = inputs = open_inputs(config, world, footers, known)
            run_dir = world.from_rank_zero(lambda: prepare_run_dir(config, lock, earlier))
            report_in(run_dir)
            check_shared(run_dir, lock, world)
            if world.rank == 0:
                store.set(_LOCK, lock.id)
            store.set(_RUN_DIR, str(run_dir))
            watchdog.keep_stacks(start_logging(run_dir / "logs", world.rank))
            session = _Session(run_dir, footers, instead, timeline, explained, watchdog, lock)
            return _run(inputs, session, publisher_of)


@dataclass(frozen=True)
class _Session:
    """Resources of a run, from the opening of its data to its end.

    Attributes:
        footers: temporary folder with cached footers of the data, until they go into the run directory.
        instead: sentences on what the device does instead of settings that it lacks.
    """

    run_dir: Path
    footers: Path
    instead: list[str]
    timeline: Timeline
    explained: Explained
    watchdog: Watchdog
    lock: RunLock
    start: float = field(default_factory=time.monotonic)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note progress, as `Watchdog.enter`; raise if another start has taken the run directory."""
        self.lock.check()
        self.watchdog.enter(phase, step)


def _run(opened: Inputs, session: _Session, publisher_of: Callable[[Inputs, Built], Publishes] | None) -> int:
    config, world, run_dir = opened.config, opened.world, session.run_dir
    timeline, explained = session.timeline, session.explained
    torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")
    if config.debug:
        torch.autograd.set_detect_anomaly(True)
    _log_start(opened, session)
    source = find_source(config, run_dir, world)
    explained.folder = run_dir / "memory"
    explained.write = partial(_write_unbuilt, explained.folder, world)
    inputs, changes = _settle(opened, session, source)
    text = saved_text(inputs.config, config)
    if source is not None and source.goes_on:
        if world.from_rank_zero(lambda: is_finished(run_dir, source, inputs, text)):
            told = "done at step %d already, and nothing more is asked for, such as train.epochs above %d: %s"
            logger.info(told, source.marker.state.step, config.train.epochs, run_dir / "result.json")
            return 0
        check_files(inputs, source)
    world.from_rank_zero(lambda: replace_file(run_dir / "config.yaml", text))
    explained.inputs = inputs
    with timeline.phase("init"):
        built = build_model(inputs)
        timeline.check()
    for line in few_lines([f"table {line}" for line in describe_plan(built.shards)]):
        logger.info("%s", line)
    with timeline.phase("load"):
        publisher = publisher_of(inputs, built) if publisher_of and config.train.publish.dir else None
    with publisher or nullcontext():
        result, reports = _train(inputs, built, session, source, publisher)
    result["asked"] = asked_of(text)
    return _end(inputs, session, result, reports, changes)


def _train(
    inputs: Inputs, built: Built, session: _Session, source: Source | None, publisher: Publishes | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train a built model; return the run's result, and the memory report of each rank."""
    world, run_dir, timeline = inputs.world, session.run_dir, session.timeline
    with timeline.phase("load"):
        trainer = Trainer(inputs, built, run_dir, timeline, source, session.enter, publisher)
    memory = MemoryLog(inputs, built, trainer, timeline, run_dir / "memory")
    world.from_rank_zero(lambda: save_plan(built.shards, world.world_size, run_dir / "plan.json"))
    # Only now is it certain that the data are those of the checkpoint, if there is one.
    world.from_rank_zero(lambda: copy_files(session.footers, run_dir / FOOTERS))
    shutil.rmtree(session.footers)  # a run that is killed later could not remove it
    give_unused_back()  # the memory of planning and predicting
    session.explained.write = memory.write_alone
    if world.rank == 0:
        plan = "\n".join(describe_plan(built.shards))
        trainer.writer = open_writers(inputs.config, run_dir, trainer.state.step, plan)
    with closing(trainer.writer):
        with timeline.phase("step"):
            stopped = trainer.fit()
        session.watchdog.rest()
        session.lock.check(now=True)
        report = memory.write("stopped" if stopped else "done")
        reports = world.gather({section: report[section] for section in ("identity", "peak", "host")})
        result = run_result(inputs, trainer, stopped, reports, time.monotonic() - session.start)
        log_end(trainer.writer, inputs, built, result, report)
        trainer.writer.status = result["status"]
    return result, reports


def _end(
    inputs: Inputs,
    session: _Session,
    result: dict[str, Any],
    reports: list[dict[str, Any]],
    changes: list[Change],
) -> int:
    """Write result.json and the last lines of the log; return the exit status."""
    world, run_dir = inputs.world, session.run_dir
    result |= {"instead": session.instead, "fitted": [str(change) for change in changes]}
    if world.rank == 0:
        replace_file(run_dir / "result.json", to_json(result, indent=1) + "\n")
        for line in closing_lines(result, reports, run_dir, how_to_go_on(inputs.config, run_dir, world)):
            logger.info("%s", line)
    return STOPPED_STATUS if result["status"] == "stopped" else 0


def _log_start(inputs: Inputs, session: _Session) -> None:
    config, world = inputs.config, inputs.world
    logger.info("%s on %d × %s, writing to %s", config.run.name, world.world_size, world.device.type, session.run_dir)
    for role, dataset in inputs.datasets.items():
        logger.info("%s: %s in %s", role, counted(dataset.num_rows, "row"), counted(dataset.num_files, "file"))
    for sentence in (*session.instead, *idle_settings(config), *unlike_versions(world)):
        logger.warning("%s", sentence)
    if repeated := repeated_decoding(config, world.world_size):
        logger.info("%s", repeated)


def _settle(opened: Inputs, session: _Session, source: Source | None) -> tuple[Inputs, list[Change]]:
    """Return the inputs with facts of the data and, with memory.fit, a config that fits; also its changes.

    Raises:
        UserError: rows and numbers of the source would mean something else; raised before facts are measured, unless
            fitting may still make the configs agree.
    """
    asked = opened.config
    if source is not None and not asked.memory.fit:
        refuse_differences(asked, source.marker.meaning, source.path, source.init)
    with session.timeline.phase("vocabularies"):
        learned = learn_facts(opened, session.run_dir, source)
    inputs, changes = fit_inputs(learned) if asked.memory.fit else (learned, [])
    if source is not None and asked.memory.fit:
        refuse_differences(inputs.config, source.marker.meaning, source.path, source.init)
    datasets = inputs.datasets
    specs = {str(role): inputs.spec(role) for role in ("train", "valid", "test") if role in datasets}
    for sentence in opened.world.from_rank_zero(lambda: doubts(asked, datasets, specs)):
        logger.warning("%s", sentence)
    return inputs, changes


def _write_unbuilt(folder: Path, world: World, status: str, sections: dict[str, Any]) -> None:
    """Write a report of a run that ran out of memory before its tables were made."""
    if not sections:  # another failure, such as a refused start: an earlier report stays
        return
    content = {"schema_version": SCHEMA_VERSION, "identity": {"rank": world.rank, "status": status}, **sections}
    with suppress(OSError):  # so that the failure itself is reported
        write_rank(folder, content)
