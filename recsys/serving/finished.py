"""A finished run, opened for use: its config, its checkpoint, and its model with the weights of the checkpoint."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsys.checkpoint import FOOTERS, Source, find_checkpoint, load_tensors, verify_checkpoint
from recsys.checkpoint.tensor_files import LocalTensor
from recsys.checkpoint.tensors import DENSE
from recsys.config import Config, OptimizerConfig, TableOptimizerConfig, load_config
from recsys.config.choices import DenseOptimizer
from recsys.config.device import check_device
from recsys.config.initial import InitConfig, Take
from recsys.config.schema import DenseOptimizerConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.data.inputs import Given, Inputs, open_inputs
from recsys.data.wanted import row_filter
from recsys.errors import UserError, nearest
from recsys.models.items import ItemVectors
from recsys.runtime.logs import logger
from recsys.runtime.world import World
from recsys.tables.module_names import parameter_name
from recsys.training.alike import check_alike
from recsys.training.build import build_model
from recsys.training.evaluation import item_vectors
from recsys.training.learning import learn_facts

_NO_TRAINING = (
    *("train.early_stop.metric=null", "train.eval_every_steps=null", "train.eval_every_epochs=null"),
    "optimizer.schedule.name=constant",  # one may depend on the metric of early stopping
)
_CHANGEABLE = ("data.", "run.", "train.eval_batch_size", "model.top_k", "model.metrics")


@dataclass(frozen=True)
class Finished:
    """A finished run, as a config and a checkpoint.

    Attributes:
        config: of the run, with the user's changes, and without settings that only training needs.
        changed: the keys that the user has changed.
    """

    config: Config
    checkpoint: Path
    changed: tuple[str, ...]

    @property
    def run_dir(self) -> Path:
        """The run directory that the checkpoint is in."""
        return self.checkpoint.parent.parent

    def in_order(self, world_size: int) -> "Finished":
        """Return the run with one stream of data for each rank, so that rows keep the order of the files."""
        data = replace(self.config.data, num_streams=world_size)
        return replace(self, config=replace(self.config, data=data))

    @cached_property
    def trained(self) -> Config:
        """The config that the run was trained with; a class that it names has been trusted by `find_run`."""
        return load_config(self.checkpoint / "config.yaml")

    def with_trained_rows(self) -> Config:
        """Return the config with the rows of data.train that the run was trained on, whatever the user has changed."""
        own = {name: getattr(self.trained.data, name) for name in ("filter", "max_rows", "keep_negatives")}
        return replace(self.config, data=replace(self.config.data, **own))

    def absolute(self) -> "Finished":
        """Return the run with absolute paths of what may be read later: the checkpoint, and files of items."""
        data = self.config.data
        if data.items is not None:
            paths = [data.items] if isinstance(data.items, str) else data.items
            data = replace(data, items=[path if "://" in path else os.path.abspath(path) for path in paths])
        return replace(self, checkpoint=self.checkpoint.absolute(), config=replace(self.config, data=data))

    def given(self, role: str, paths: str | list[str], keep: Sequence[str] | None) -> Given:
        """Return rows to be scored, without the filter and row limit of the run, unless the user sets one."""
        filter = row_filter(self.config, role) if "data.filter" in self.changed else None
        max_rows = self.config.data.max_rows if "data.max_rows" in self.changed else None
        return Given(role, paths, keep, filter, max_rows=max_rows)


def find_run(run: str, overrides: Sequence[str] = (), trust_code: bool = False) -> Finished:
    """Find a run and its checkpoint.

    Args:
        run: a run directory, whose best checkpoint is used, or without early stopping the newest; or a checkpoint.
        overrides: `key=value` over the config of the run, for keys that do not change the model.
        trust_code: whether a class that the run names as its model may be imported.

    Raises:
        UserError: there is no such run, or an override would change the model.
    """
    checkpoint = find_checkpoint(run, "RUN")
    keys = tuple(text.partition("=")[0].strip() for text in overrides)
    for key in keys:
        if not key.startswith(_CHANGEABLE):
            raise UserError(
                f"config key '{key}' is fixed by what the run has trained; only these may change: "
                f"{', '.join(f'{prefix}*' if prefix.endswith('.') else prefix for prefix in _CHANGEABLE)}"
                f"{nearest(key, ('data.valid', 'data.test', 'data.items', *_CHANGEABLE[2:]))}"
            )
    changes = [*_NO_TRAINING, *overrides]
    config = _without_training(load_config(checkpoint / "config.yaml", changes, trust_code=trust_code))
    directory = config.run.dir if "run.dir" in keys else str(checkpoint.parent.parent)
    config = replace(config, run=replace(config.run, plan=None, dir=directory))
    return Finished(config, checkpoint, keys)


def _without_training(config: Config) -> Config:
    """Return a config whose tables have no optimizer's state, with optimizers that every device has."""
    tables = {
        name: replace(table, optimizer=None, sparsity=None, l2_all_rows=0.0, stochastic_rounding=False)
        for name, table in config.tables.items()
    }
    sgd = OptimizerConfig(TableOptimizerConfig(TableOptimizer.sgd), DenseOptimizerConfig(DenseOptimizer.sgd))
    # Without backward passes, activations need no offload or checkpointing; torch can export neither.
    init = InitConfig(optimizers=Take.none)
    train = replace(config.train, init=init, activation_checkpointing=False, activation_offload=False)
    return replace(config, tables=tables, optimizer=sgd, train=train)


def dense_weights(model: torch.nn.Module, source: Source) -> dict[str, LocalTensor]:
    """Return the weights of a dense part by their names in a checkpoint.

    Raises:
        UserError: the checkpoint has others, for example since the user has changed the class.
    """
    weights = {DENSE + parameter_name(name): LocalTensor.of(value) for name, value in model.state_dict().items()}
    saved = {name: entry.size for name, entry in source.marker.tensors.items() if name.startswith(DENSE)}
    sizes = {name: weight.size for name, weight in weights.items()}
    if differing := sorted(name for name in {**saved, **sizes} if saved.get(name) != sizes.get(name)):
        raise UserError(
            f"checkpoint '{source.path}' has other weights than the model's class ({', '.join(differing[:5])}); "
            f"restore the code that it was trained with"
        )
    return weights


class OpenRun:
    """The model of a finished run with its weights, on all ranks, and datasets for it; collective.

    Args:
        roles: datasets of the config to open. given: rows to be scored.

    Attributes:
        forget_caches: to be called after a table was changed; see `TableUpdates`.

    Raises:
        UserError: the data do not fit the model, or the checkpoint is corrupt.
    """

    def __init__(self, run: Finished, world: World, roles: Sequence[str], *given: Given) -> None:
        self.run, self.world = run, world
        config = run.config
        check_alike(config, world)
        self._set_precision()
        is_cuda = world.device.type == "cuda"
        self._instead = world.from_rank_zero(lambda: check_device(config, is_cuda, world.world_size))
        self.source = Source(run.checkpoint, verify_checkpoint(run.checkpoint, world), init=None)
        inputs = open_inputs(config, world, known=self._footers, roles=roles, given=given)
        self.inputs = learn_facts(inputs, run.run_dir, self.source)
        built = build_model(self.inputs)
        world.agree(lambda: dense_weights(built.dense_model, self.source))
        load_tensors(self.source.path, self.source.marker, built.tensors, world, self.inputs.config)
        self.model: DistributedModelParallel = built.model
        self.forget_caches = built.table_updates.forget_caches
        self.model.eval()

    def beside(self, roles: Sequence[str], *given: Given) -> Inputs:
        """Open other datasets for the model; arguments and errors as of the class."""
        self._set_precision()  # another run that was opened meanwhile has set its own
        return self.inputs.beside(self._footers, roles, given)

    def _set_precision(self) -> None:
        torch.set_float32_matmul_precision("high" if self.run.config.precision.tf32 else "highest")

    @property
    def _footers(self) -> Path:
        return self.run.run_dir / FOOTERS

    @cached_property
    def items(self) -> ItemVectors:
        """The vectors of all items of a retrieval model; computed at the first use, collective."""
        with torch.no_grad():
            return item_vectors(self.inputs, self.model)

    def introduce(self) -> None:
        """Log run, step and device, and the settings that this device replaces."""
        step, world = self.source.marker.state.step, self.world
        logger.info("%s at step %d, on %d × %s", self.run.run_dir, step, world.world_size, world.device.type)
        for sentence in self._instead:
            logger.warning("%s", sentence)
