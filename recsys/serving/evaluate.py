"""Evaluation of a finished run on other data, without a change to the run."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recsys.checkpoint import Source, find_checkpoint, load_tensors, verify_checkpoint
from recsys.config import Config, OptimizerConfig, TableOptimizerConfig, load_config
from recsys.config.choices import DenseOptimizer
from recsys.config.device import check_device
from recsys.config.initial import InitConfig, Take
from recsys.config.schema import DenseOptimizerConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.data.inputs import Inputs, open_inputs
from recsys.errors import UserError, nearest
from recsys.runtime.files import replace_file, unused_folder
from recsys.runtime.logs import git_commit, logger, quiet_libraries, show_metrics, start_logging, to_json
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import open_world
from recsys.training.build import build_model
from recsys.training.evaluation import evaluate_dataset
from recsys.training.learning import learn_facts

_EVALUATED = ("valid", "test")
_NO_TRAINING = ("train.early_stop.metric=null", "train.eval_every_steps=null", "train.eval_every_epochs=null")
_CHANGEABLE = ("data.", "run.", "train.eval_batch_size", "model.top_k")


def find_run(run: str, overrides: Sequence[str], trust_code: bool = False) -> tuple[Config, Path, list[str]]:
    """Return the run's config with some changes, its checkpoint, and the datasets to evaluate.

    These are data.valid and data.test, or those of them that the overrides name.

    Args:
        run: a run directory, whose best checkpoint is taken, or its newest without early stopping; or a checkpoint.
        overrides: `key=value` over the run's config, of what does not change the model.
        trust_code: a class that the run names as its model may be imported.

    Raises:
        UserError: no such run, an override that would change the model, or nothing to evaluate.
    """
    checkpoint = find_checkpoint(run, "--evaluate")
    keys = [text.partition("=")[0].strip() for text in overrides]
    for key in keys:
        if not key.startswith(_CHANGEABLE):
            raise UserError(
                f"config key '{key}' is a part of what the run has trained; an evaluation changes "
                f"{', '.join(f'{prefix}*' if prefix.endswith('.') else prefix for prefix in _CHANGEABLE)} alone"
                f"{nearest(key, [f'data.{role}' for role in _EVALUATED])}"
            )
    changes = [*_NO_TRAINING, *overrides]
    config = _without_training(load_config(checkpoint / "config.yaml", changes, trust_code=trust_code))
    directory = config.run.dir if "run.dir" in keys else str(checkpoint.parent.parent)
    config = replace(config, run=replace(config.run, plan=None, dir=directory))
    named = [role for role in _EVALUATED if f"data.{role}" in keys] or _EVALUATED
    roles = [role for role in named if getattr(config.data, role) is not None]
    if not roles:
        raise UserError("there is nothing to evaluate; set data.valid or data.test")
    return config, checkpoint, roles


def evaluate(config: Config, checkpoint: Path, roles: Sequence[str]) -> int:
    """Evaluate a run's model on some datasets; return the exit status, 0.

    The metrics, with where they are from, are the last line of the output and evaluations/TIME/result.json of run.dir.
    data.train is not read: what is known of it is in the run.

    Raises:
        UserError: data that do not fit the model, or a checkpoint that is corrupt.
    """
    quiet_libraries()
    run_dir = checkpoint.parent.parent
    with open_world(config.run.device, config.run.num_threads) as world:
        start = time.monotonic()
        torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")
        instead = world.from_rank_zero(lambda: check_device(config, world.device.type == "cuda", world.world_size))
        source = Source(checkpoint, verify_checkpoint(checkpoint, world), init=None)
        inputs = open_inputs(config, world, known=run_dir / "footers", roles=[*roles, "items"])
        folder = world.from_rank_zero(lambda: _new_folder(Path(config.run.dir or run_dir) / "evaluations"))
        start_logging(folder / "logs", world.rank)
        logger.info("%s at step %d, on %d × %s", run_dir, source.marker.state.step, world.world_size, world.device.type)
        for sentence in instead:
            logger.warning("%s", sentence)
        metrics = _metrics(learn_facts(inputs, run_dir, source), source, roles)
        result = {
            "run": str(run_dir),
            "checkpoint": checkpoint.name,
            "metrics": metrics,
            "data": {role: _described(inputs, role) for role in inputs.datasets},
            "world_size": world.world_size,
            "device": world.device.type,
            "seconds": round(time.monotonic() - start, 2),
            "versions": installed_versions(),
            "git_commit": git_commit(),
        }
        if world.rank == 0:
            replace_file(folder / "result.json", to_json(result, indent=1) + "\n")
        logger.info("done: %s", folder / "result.json")
        logger.info("%s", to_json({"run": str(run_dir), "checkpoint": checkpoint.name, "metrics": metrics}))
    return 0


def _without_training(config: Config) -> Config:
    """Return a config whose tables have no optimizer's state, and train by what every device has."""
    tables = {name: replace(table, optimizer=None, stochastic_rounding=False) for name, table in config.tables.items()}
    sgd = OptimizerConfig(TableOptimizerConfig(TableOptimizer.sgd), DenseOptimizerConfig(DenseOptimizer.sgd))
    train = replace(config.train, init=InitConfig(optimizers=Take.none))
    return replace(config, tables=tables, optimizer=sgd, train=train)


def _new_folder(parent: Path) -> Path:
    try:
        return unused_folder(parent / time.strftime("%Y%m%d-%H%M%S"))
    except OSError as error:
        raise UserError(f"cannot write to '{parent}' ({error.strerror}); name another folder by run.dir") from error


def _metrics(inputs: Inputs, source: Source, roles: Sequence[str]) -> dict[str, dict[str, float]]:
    world, built, metrics = inputs.world, build_model(inputs), {}
    load_tensors(source.path, source.marker, built.tensors, world, inputs.config)
    for role in roles:
        metrics[role] = evaluate_dataset(inputs, built.model, role)
        logger.info("%s: %s", role, show_metrics(metrics[role]))
    return metrics


def _described(inputs: Inputs, role: str) -> dict[str, Any]:
    dataset = inputs.datasets[role]
    paths = getattr(inputs.config.data, role)
    return {"paths": paths, "rows": dataset.num_rows, "files": dataset.num_files, "filter": dataset.filter}
