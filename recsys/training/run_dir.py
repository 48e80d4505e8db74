"""The run directory: made and locked, and an earlier run in it resumed, refused or cleared."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from recsys.checkpoint import FACTS, FOOTERS, find_checkpoint
from recsys.config import Config, config_text
from recsys.errors import UserError
from recsys.memory.report import DRY_RUN_JSON, DRY_RUN_PAGE
from recsys.report.page import PAGE
from recsys.report.trackers import TENSORBOARD
from recsys.runtime.checkpoint_folders import MARKER as CHECKPOINT
from recsys.runtime.files import cannot_write, replace_file, unused_folder
from recsys.runtime.run_lock import RunLock, beside_lock

_WRITTEN = (
    *("config.yaml", "plan.json", "loaded.json", "metrics.jsonl", "result.json", "memory", "checkpoints", "logs"),
    *(PAGE, TENSORBOARD, "mlflow.json", "wandb.json", FACTS, FOOTERS, "bad_steps", "evaluations", "profile"),
)
MARKER = ".recsys-run"  # file by which a folder is known to be a run's


def prepare_run_dir(config: Config, lock: RunLock, earlier: str | None = None) -> Path:
    """Make the run directory and lock it, refuse or clear an earlier run in it, and save the config there.

    Only a folder with a marker file is ever cleared.

    Args:
        lock: takes the folder. earlier: the `RunLock.id` of an earlier start of this run, which has ended.

    Raises:
        UserError: the folder cannot be written to, is locked, or holds something else, or an earlier run that is
            neither to be resumed nor replaced.
    """
    run_dir = Path(config.run.dir) if config.run.dir else new_run_dir(config)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # A copy of a run may lack the marker, which is hidden; resuming clears nothing.
        goes_on = config.run.resume and any(run_dir.glob(f"checkpoints/step-*/{CHECKPOINT}"))
        is_run = (run_dir / MARKER).exists() or goes_on
        if not is_run and any(map(_is_of_others, beside_lock(run_dir))):
            raise UserError(f"config key 'run.dir': '{run_dir}' is not empty and holds no run; name another folder")
        lock.take(run_dir, earlier)
        if is_run and not config.run.resume:
            _clear(run_dir, config)
        (run_dir / MARKER).touch()
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        if not goes_on:  # otherwise after the config is checked against the checkpoint
            replace_file(run_dir / "config.yaml", saved_text(config, config))
    except OSError as error:
        raise cannot_write("run.dir", run_dir, error) from error
    return run_dir


def new_run_dir(config: Config) -> Path:
    """Make a run directory named after the run and the time, if the config names none.

    Raises:
        UserError: it cannot be made, or the run is to resume, which is impossible in a new one.
    """
    if config.run.resume:
        raise UserError(
            "config key 'run.resume' continues the run in run.dir, which is not set, so a new run would start each "
            "time; name it, such as run.dir=runs/mine"
        )
    try:
        return unused_folder(Path(f"runs/{config.run.name or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"))
    except OSError as error:
        raise cannot_write("run.dir", Path("runs"), error) from error


def _is_of_others(path: Path) -> bool:
    """Return whether a folder without a run holds more than a dry run with this run.dir leaves there."""
    if path.name != "memory" or not path.is_dir():
        return True
    return any(file.name not in (DRY_RUN_PAGE, DRY_RUN_JSON) for file in path.iterdir())


def saved_text(config: Config, asked: Config) -> str:
    """Return the text of config.yaml: the config, except for num_embeddings, which are as the user set them.

    Vocabularies may need fewer rows so far, and grow in another run.
    """
    bounds = {name: table.num_embeddings for name, table in asked.tables.items()}
    tables = {name: replace(table, num_embeddings=bounds[name]) for name, table in config.tables.items()}
    # How to treat an earlier run is set at each start, and is no property of the run.
    settings = replace(config.run, resume=False, overwrite=False)
    return config_text(replace(config, tables=tables, run=settings))


def _clear(run_dir: Path, config: Config) -> None:
    # A run that ended before its first step has nothing worth keeping.
    metrics = run_dir / "metrics.jsonl"
    trained = any(run_dir.glob("checkpoints/step-*")) or (metrics.exists() and metrics.stat().st_size > 0)
    if trained and not config.run.overwrite:
        raise UserError(
            f"config key 'run.dir': '{run_dir}' holds an earlier run; add run.resume=true to continue it, or "
            f"run.overwrite=true to replace it"
        )
    _check_sources(run_dir, config)
    paths = [run_dir / name for name in _WRITTEN]
    if linked := next((path for path in paths if path.is_symlink() and path.is_dir()), None):
        raise UserError(
            f"config key 'run.dir': '{linked}' of the earlier run is a link to '{linked.readlink()}', which is not "
            f"followed; remove the link (and its target, if nothing else needs it), or name another folder"
        )
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _check_sources(run_dir: Path, config: Config) -> None:
    """Refuse sources of a run that do not exist, or lie in the run directory, which is about to be cleared.

    Raises:
        UserError: names the key; nothing is cleared.
    """
    train = config.train
    sources = {"train.init_from": train.init_from, "run.plan": config.run.plan}
    sources |= {f"train.init.from_parquet.{table}": path for table, path in train.init.from_parquet.items()}
    sources |= {f"tables.{name}.vocabulary": table.vocabulary for name, table in config.tables.items()}
    sources |= {f"tables.{name}.kept_rows": table.kept_rows for name, table in config.tables.items()}
    for key, path in sources.items():
        if path is not None and Path(path).resolve().is_relative_to(run_dir.resolve()):
            raise UserError(
                f"config key '{key}': '{path}' lies in run.dir '{run_dir}', which run.overwrite=true would remove "
                f"before it is read; name another run.dir"
            )
    if train.init_from is not None:
        find_checkpoint(train.init_from)
