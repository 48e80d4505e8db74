"""Checkpoints: written aside, then renamed; loaded on any number of ranks and any plan."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from recsys.data.order import Cut, Position
from recsys.errors import UserError
from recsys.process_group import World

_STATE_FILE = "state.json"
_LATEST = "latest"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class TrainState:
    """Where training stands, beside the tensors.

    Attributes:
        position: in the data, after `step` steps trained.
        bad_steps: of `step`, those that were not finite and changed nothing.
        overflows: of `step`, those whose gradient overflowed FP16, likewise.
        loss_scale, loss_scale_good_steps: as of `LossScale`.
        epoch_rows: for each epoch begun, the rows trained, those left out as bad, and those of bad steps, as counted
            in the batches.
        fingerprint: of the training files; seed, shuffle, window_mib: what the order of the rows depends on besides.
        evaluated_step: of the last evaluation on data.valid; best_metric, best_step, bad_evaluations: early stopping.
    """

    position: Position
    step: int = 0
    bad_steps: int = 0
    overflows: int = 0
    loss_scale: float | None = None
    loss_scale_good_steps: int = 0
    epoch_rows: list[list[int]] = field(default_factory=list)
    fingerprint: str = ""
    seed: int = 0
    shuffle: bool = True
    window_mib: int = 0
    evaluated_step: int | None = None
    best_metric: float | None = None
    best_step: int | None = None
    bad_evaluations: int = 0


@dataclass
class Tensors:
    """What a checkpoint holds: functions for the tables, because torchrec makes its state dicts anew each time."""

    tables: Callable[[], dict[str, Any]]
    table_optimizer: Callable[[], dict[str, Any]]
    dense: torch.nn.Module
    dense_optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors by flat names, those of the tables sharded."""
        dense = get_model_state_dict(self.dense)
        optimizer = get_optimizer_state_dict(self.dense, self.dense_optimizer, options=_OPTIONS)
        return {
            **{f"tables/{name}": value for name, value in self.tables().items()},
            **{f"table_optimizer/{name}": value for name, value in self.table_optimizer().items()},
            **{f"dense/{name}": value for name, value in dense.items()},
            **{f"dense_optimizer/{name}": value for name, value in optimizer.items()},
        }

    def load_dense(self, state: dict[str, Any]) -> None:
        """Set the dense part and its optimizer's state; the tables' tensors are loaded in place.

        The optimizer's settings (weight decay …) stay those of this run's config.
        """
        groups = self.dense_optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        set_model_state_dict(self.dense, _under("dense/", state))
        set_optimizer_state_dict(self.dense, self.dense_optimizer, _under("dense_optimizer/", state), options=_OPTIONS)
        for group, setting in zip(self.dense_optimizer.param_groups, settings, strict=True):
            group.update(setting)


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        folder: RUN/checkpoints.
        keep: how many of the newest stay; the best one of early stopping stays besides.
    """

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep

    def save(self, tensors: Tensors, state: TrainState) -> Path:
        """Write a checkpoint of step `state.step`; a crash at any point leaves the earlier ones whole."""
        final = self.path(state.step)
        aside = final.with_name(final.name + ".tmp")
        self._world.from_rank_zero(lambda: shutil.rmtree(aside, ignore_errors=True))
        try:
            dcp.save(tensors.state_dict(), checkpoint_id=aside, process_group=self._world.host_group)
        except CheckpointException as error:
            raise UserError(f"checkpoint '{aside}' cannot be written: {_causes(error)}") from error
        self._world.from_rank_zero(lambda: self._commit(aside, final, state))
        return final

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint, or None."""
        found = _whole(self.folder)
        return found[-1] if found else None

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.folder / _name(step)

    def _commit(self, aside: Path, final: Path, state: TrainState) -> None:
        with (aside / _STATE_FILE).open("w") as file:
            json.dump(dataclasses.asdict(state), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        old = final.with_name(final.name + ".old.tmp")
        if final.exists():  # the same step again, with a later evaluation in its state
            final.rename(old)
        aside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        marker = self.folder / (_LATEST + ".tmp")
        marker.write_text(final.name + "\n")
        marker.replace(self.folder / _LATEST)
        best = None if state.best_step is None else self.path(state.best_step)
        for path in _whole(self.folder)[: -self._keep]:
            if path != best:
                shutil.rmtree(path)


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint that train.init_from names: itself, or of a run directory the best, else the newest.

    Raises:
        UserError: there is none.
    """
    path = Path(path)
    if (path / _STATE_FILE).is_file():
        return path
    found = _whole(path / "checkpoints")
    if not found:
        what = "holds no checkpoint" if path.is_dir() else "does not exist"
        raise UserError(
            f"config key 'train.init_from': '{path}' {what}; name a run directory or one of its checkpoints/step-*"
        )
    best = read_state(found[-1]).best_step
    return next((each for each in found if best is not None and each.name == _name(best)), found[-1])


def _name(step: int) -> str:
    return f"step-{step:09d}"


def read_state(path: Path) -> TrainState:
    """Return the training state of a checkpoint.

    Raises:
        UserError: its file is damaged, or from another version of this code.
    """
    try:
        content = json.loads((path / _STATE_FILE).read_text())
        position = content["position"]
        cuts = tuple(Cut(tuple(cut["shares"]), tuple(cut["consumed"])) for cut in position["cuts"])
        return TrainState(**{**content, "position": Position(position["epoch"], cuts, position["rows_before"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"'{path / _STATE_FILE}' cannot be read ({' '.join(str(error).split())}); remove '{path}' to go on from "
            f"the checkpoint before it"
        ) from error


def load_tensors(path: Path, tensors: Tensors, world: World) -> None:
    """Load tables, dense part and optimizers, whatever plan and number of ranks wrote them.

    Raises:
        UserError: the checkpoint lacks a tensor or holds one of another shape.
    """
    state = tensors.state_dict()
    try:
        dcp.load(state, checkpoint_id=path, process_group=world.host_group)
    except CheckpointException as error:
        raise UserError(
            f"checkpoint '{path}' is damaged, or does not fit this config (tables and model must be those it was "
            f"written with): {_causes(error)}"
        ) from error
    tensors.load_dense(state)


def _whole(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that were written to the end, oldest first."""
    found = sorted(file.parent for file in folder.glob(f"step-*/{_STATE_FILE}"))
    return [path for path in found if path.suffix != ".tmp"]


def _under(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _causes(error: CheckpointException) -> str:
    texts = {" ".join(str(failure[0]).split())[:200] for failure in error.failures.values()}
    return "; ".join(sorted(texts))
