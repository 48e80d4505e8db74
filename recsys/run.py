"""One run from its config to its result: the run directory, training, the reports."""

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from recsys.build import Built, build_model, open_datasets
from recsys.config import Config, save_config
from recsys.data.parquet import Dataset
from recsys.distributed import describe_plan, shards, table_optimizer_tensors, table_tensors
from recsys.errors import UserError
from recsys.memory import measure_dense, measure_tables, predict_dense, predict_tables, write_report
from recsys.observe import git_commit, logger, quiet_libraries, start_logging, to_json
from recsys.process_group import World, as_lost_peer, open_world, world_size_from_environment
from recsys.trainer import FitResult, Trainer
from recsys.versions import installed_versions

_WRITTEN = ("config.yaml", "metrics.jsonl", "result.json", "memory", "checkpoints", "logs")
_MARKER = ".recsys-run"
STOPPED_STATUS = 143  # as a process that SIGTERM ended: the job is not done


def run(config: Config) -> int:
    """Train as the config says; return the exit status: 0 when done, 143 when a signal stopped it (after saving).

    Raises:
        UserError: a mistake in config or data.
        LostPeerError: another rank ended.
    """
    quiet_libraries()
    if config.debug and world_size_from_environment() > 1:
        raise UserError("--debug runs one process; start it with `python train.py CONFIG --debug`")
    with open_world(config.run.device, config.run.num_threads) as world:
        try:
            # The data first: a mistake in them leaves no run directory behind.
            datasets = open_datasets(config, world)
            run_dir = world.from_rank_zero(lambda: _prepare_run_dir(config))
            start_logging(run_dir / "logs", world.rank)
            return _run(config, world, run_dir, datasets)
        except RuntimeError as error:
            raise (as_lost_peer(error) or error) from error


def _run(config: Config, world: World, run_dir: Path, datasets: dict[str, Dataset]) -> int:
    start = time.monotonic()
    if config.debug:
        torch.autograd.set_detect_anomaly(True)
    logger.info("%s on %d × %s, writing to %s", config.run.name, world.world_size, world.device.type, run_dir)
    for role, dataset in datasets.items():
        logger.info("%s: %s rows in %d files", role, f"{dataset.num_rows:,}", dataset.num_files)
    built = build_model(config, datasets, world)
    for line in describe_plan(built.plan):
        logger.info("table %s", line)
    fitted = Trainer(config, built, datasets, world, run_dir).fit()
    memory, page = _write_memory(config, built, world, run_dir / "memory")
    logger.info("\n%s", page)
    result = _result(config, fitted, world, memory, time.monotonic() - start)
    if world.rank == 0:
        (run_dir / "result.json").write_text(to_json(result, indent=1) + "\n")
    logger.info("%s: %s", "stopped" if fitted.stopped else "done", run_dir / "result.json")
    return STOPPED_STATUS if fitted.stopped else 0


def _prepare_run_dir(config: Config) -> Path:
    """Make the run directory, refuse or clear an earlier run in it, and save the config there.

    A folder is taken for ours by a marker file, so that nothing else is ever cleared.
    """
    run_dir = Path(config.run.dir) if config.run.dir else _unused_dir(config.run.name or "run")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not config.run.resume and (run_dir / _MARKER).exists():
            _clear(run_dir, config.run.overwrite)
        elif not (run_dir / _MARKER).exists() and any(run_dir.iterdir()):
            raise UserError(f"config key 'run.dir': '{run_dir}' is not empty and holds no run; name another folder")
        (run_dir / _MARKER).touch()
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        # What to do with an earlier run is asked anew each time, and is no part of what this run is.
        save_config(replace(config, run=replace(config.run, resume=False, overwrite=False)), run_dir / "config.yaml")
    except OSError as error:
        raise UserError(
            f"config key 'run.dir': cannot write to '{run_dir}' ({error.strerror}); name another folder"
        ) from error
    return run_dir


def _unused_dir(name: str) -> Path:
    """Return runs/NAME-TIME, with a number where another run has begun in the same second."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        run_dir = Path(f"runs/{name}-{stamp}{suffix}")
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            continue
        except OSError:
            break
    return run_dir


def _clear(run_dir: Path, overwrite: bool) -> None:
    # A run that a mistake ended before its first step has left nothing to keep.
    metrics = run_dir / "metrics.jsonl"
    trained = any(run_dir.glob("checkpoints/step-*")) or (metrics.exists() and metrics.stat().st_size > 0)
    if trained and not overwrite:
        raise UserError(
            f"config key 'run.dir': '{run_dir}' holds an earlier run; add run.resume=true to go on with it, or "
            f"run.overwrite=true to replace it"
        )
    for name in _WRITTEN:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write_memory(config: Config, built: Built, world: World, folder: Path) -> tuple[dict[str, Any], str]:
    tables = {
        "predicted": predict_tables(shards(built.plan), config, world.rank),
        "measured": measure_tables(table_tensors(built.model), table_optimizer_tensors(built.model)),
    }
    dense = {
        "predicted": predict_dense(built.dense_model, config),
        "measured": measure_dense(built.dense_model, built.dense_optimizer),
    }
    return write_report(folder, world, tables, dense)


def _result(config: Config, fitted: FitResult, world: World, memory: dict[str, Any], seconds: float) -> dict[str, Any]:
    peaks = world.gather(memory["process"])
    return {
        "status": "stopped" if fitted.stopped else "done",
        "name": config.run.name,
        "metrics": fitted.metrics,
        "steps": fitted.state.step,
        "best_step": fitted.state.best_step,
        "rows_seen": fitted.state.rows_before + sum(fitted.state.consumed),
        "epochs": fitted.state.epoch,
        "samples_per_s": round(fitted.samples_per_s, 1),
        "wait_share": round(fitted.wait_share, 4),
        "seconds": round(seconds, 2),
        "world_size": world.world_size,
        "device": world.device.type,
        "peak_rss_bytes": [peak["peak_rss_bytes"] for peak in peaks],
        "device_peak_allocated_bytes": [peak["device_peak_allocated_bytes"] for peak in peaks],
        "device_peak_reserved_bytes": [peak["device_peak_reserved_bytes"] for peak in peaks],
        "versions": installed_versions(),
        "git_commit": git_commit(),
        "optimizer": {"tables": config.optimizer.tables.name.name, "dense": config.optimizer.dense.name.name},
        "state": asdict(fitted.state),
    }
