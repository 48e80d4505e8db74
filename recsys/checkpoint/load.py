"""Loading checkpoints: which tensors are loaded, into what, and the report of it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys.checkpoint.state import Marker
from recsys.checkpoint.tensor_files import Entry, LocalTensor, read_rows, read_tensors
from recsys.checkpoint.tensors import (
    DENSE,
    DENSE_OPTIMIZER,
    IDS,
    RNG,
    TABLE_OPTIMIZER,
    TABLES,
    Tensors,
    owner_of,
    set_rank_rng,
)
from recsys.config import Config
from recsys.config.initial import InitConfig, Take
from recsys.config.meaning import changed_inputs, changed_optimizers
from recsys.errors import UserError
from recsys.ids import NULL_ROW, KeptIds
from recsys.runtime.files import replace_file
from recsys.runtime.logs import logger
from recsys.runtime.world import World


@dataclass
class Loaded:
    """Report of a load: what became of every tensor, by name, with a remark.

    Attributes:
        loaded: taken from the checkpoint.
        kept: both have it, and this run keeps its own initial values.
        new: only this run has it.
        left: only the checkpoint has it.
        rows: by vocabulary table, the numbers of kept and of new rows; of the latter, how many had evicted ids, if any.
    """

    source: str
    step: int
    loaded: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, int]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        replace_file(path, json.dumps(vars(self), indent=1) + "\n")

    def optimized_tables(self) -> set[str]:
        """Return the tables whose optimizer's state is taken from the checkpoint."""
        return {_table_of(name) for name in self.loaded if name.startswith(TABLE_OPTIMIZER)}

    def lines(self) -> Iterator[str]:
        """Yield a line for every group of tensors with the same outcome and remark."""
        for outcome in ("loaded", "kept", "new", "left"):
            by_remark: dict[str, list[str]] = {}
            for name, remark in getattr(self, outcome).items():
                by_remark.setdefault(remark, []).append(name)
            for remark, names in by_remark.items():
                listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                yield f"{outcome}: {listed}" + (f" ({remark})" if remark else "")


def load_tensors(
    path: Path,
    marker: Marker,
    tensors: Tensors,
    world: World,
    config: Config | None = None,
    kept_ids: Mapping[str, KeptIds] | None = None,
) -> Loaded:
    """Load tables, dense part and optimizers, whatever plan and number of ranks wrote them; collective.

    Args:
        path, marker: a checkpoint that `verify_checkpoint` has found valid.
        config: that of a new run that begins with these weights; its `train.init` says how the two may differ.
            None: the run goes on, they may not differ, and random number generators are set too.
        kept_ids: by vocabulary table, the ids of the checkpoint's vocabulary.

    Raises:
        UserError: the checkpoint differs from the run in ways that `init` does not allow, or cannot be read.
    """
    saved = marker.tensors
    world.agree(lambda: _check_names(path, marker))
    targets = tensors.to_load()
    entries = {name: Entry.of(local) for name, local in targets.items()}
    # Gathered from all ranks, since a rank knows no state of a table that it holds no shard of.
    here = {name: entry for by_rank in world.gather(entries) for name, entry in by_rank.items()}
    choice = _Choice(path, marker, here, config, kept_ids or {})
    choice.tables()
    choice.dense(type(tensors.dense_optimizer).__name__)
    report = choice.report
    state = {name: targets[name] for name in report.loaded if name in targets}
    for name in filter(_is_of_table, state):
        state[name] = state[name].moved(saved[name].size, choice.spans(name))
    same_ranks = config is None and marker.world_size == world.world_size
    rng = [name for name in saved if same_ranks and name.startswith(f"{RNG}{world.rank}/")]
    new = {name: LocalTensor.of(saved[name].empty()) for name in rng}
    new |= tensors.room_for({n: saved[n] for n in report.loaded if n.startswith(DENSE_OPTIMIZER) and n in saved})
    room = {name: local.shards[0].tensor for name, local in new.items()}
    with _initial_rows({name: targets[name] for name in state}, choice.evicted_rows):
        world.agree(lambda: read_tensors(path, saved, state | new))
    scalars = {n: value for n, value in marker.scalars.items() if DENSE_OPTIMIZER + n in report.loaded}
    world.agree(lambda: _set_state(tensors, room, scalars, path, world if same_ranks else None))
    if config is None and tensors.statistics:
        world.agree(lambda: _add_counts(tensors, saved, path, world))
    _warn_of_approximate(marker, report)
    return report


def _warn_of_approximate(marker: Marker, report: Loaded) -> None:
    for name, reason in marker.approximate.items():
        if name in report.loaded:
            logger.warning("%s is approximate: %s", name, reason)


@contextmanager
def _initial_rows(tensors: Mapping[str, LocalTensor], rows_of: Callable[[str], np.ndarray]) -> Iterator[None]:
    """Keep copies of some rows of tables and optimizers' state in host memory, and restore them at the end."""
    kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for name, local in tensors.items():
        rows = rows_of(name)
        if not len(rows):
            continue
        for shard in local.shards:
            first, stop = shard.offsets[0], shard.offsets[0] + shard.tensor.shape[0]
            own = torch.from_numpy(rows[(rows >= first) & (rows < stop)] - first).to(shard.tensor.device)
            kept.append((shard.tensor.detach(), own, shard.tensor.detach()[own].cpu()))
    yield
    for tensor, own, values in kept:
        tensor[own] = values.to(tensor.device)


def _check_names(path: Path, marker: Marker) -> None:
    for name in marker.tensors:
        if not _belongs(name, marker):
            raise UserError(f"checkpoint '{path}' is corrupt: {name} belongs to nothing else in it; use another one")


def _set_state(
    tensors: Tensors, room: dict[str, torch.Tensor], scalars: dict[str, Any], path: Path, world: World | None
) -> None:
    """Set the state of the dense optimizer, and of random numbers if `world` is given."""
    tensors.after_load()
    of_optimizer = {n.removeprefix(DENSE_OPTIMIZER): t for n, t in room.items() if n.startswith(DENSE_OPTIMIZER)}
    with _state_is_readable(path):
        if of_optimizer or scalars:
            tensors.set_dense_optimizer(of_optimizer, scalars)
        if world is not None:
            set_rank_rng(room, world)


def _add_counts(tensors: Tensors, saved: Mapping[str, Entry], path: Path, world: World) -> None:
    """Add the saved counts of ids to the statistics; those that a rank has saved are loaded by exactly one rank.

    A rank may load those of many: one at a time, since all would take much memory.
    """
    ranks = {name: int(name.split("/")[1]) for name in saved if name.startswith(IDS)}
    for name in [name for name, rank in ranks.items() if rank % world.world_size == world.rank]:
        counts = read_rows(path, saved[name], 0, saved[name].size[0])
        with _state_is_readable(path):
            tensors.add_statistics(name, counts)


@contextmanager
def _state_is_readable(path: Path) -> Iterator[None]:
    """Report what does not fit the run as a corrupt checkpoint: its names and numbers may be anything."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"checkpoint '{path}' is corrupt: its optimizer state, random state or id counts cannot be read "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); use another one"
        ) from error


class _Choice:
    """Decides for each tensor whether it is loaded, from shapes and types alone, so that all ranks decide alike."""

    def __init__(
        self,
        path: Path,
        marker: Marker,
        wanted: dict[str, Entry],
        config: Config | None,
        kept_ids: Mapping[str, KeptIds],
    ) -> None:
        self._path, self._marker, self._wanted, self._saved = path, marker, wanted, marker.tensors
        self._config, self._init, self._kept_ids = config, config.train.init if config else InitConfig(), kept_ids
        self._other_inputs = changed_inputs(marker.meaning, config) if config else set()
        self._other_optimizers = changed_optimizers(marker.meaning, config) if config else set()
        self.report = Loaded(str(path), marker.state.step)

    def tables(self) -> None:
        """Decide on the tables and their optimizers' state."""
        self._sides(TABLES, self._init.tables, "tables", self._table)
        self._sides(TABLE_OPTIMIZER, self._init.optimizers, "optimizers", self._table_state)

    def dense(self, optimizer: str) -> None:
        """Decide on the dense part and its optimizer; `optimizer` is the name of its class."""
        self._sides(DENSE, self._init.dense, "dense", self._dense_weight)
        names = [name for name in self._saved if name.startswith(DENSE_OPTIMIZER)]
        names += [DENSE_OPTIMIZER + name for name in self._marker.scalars]
        same = optimizer == self._marker.optimizer
        if names and not same and self._init.optimizers is Take.all and self._init.dense is not Take.none:
            raise self._differs(
                f"was trained with {self._marker.optimizer} for the dense part, and the config asks for {optimizer}",
                "optimizers=none",
            )
        all_dense = all(name in self.report.loaded for name in self._wanted if name.startswith(DENSE))
        for name in names:
            owner = owner_of(name)
            is_loaded = owner in self.report.loaded or (owner.startswith(f"{DENSE}group") and all_dense)
            if same and is_loaded and self._init.optimizers is not Take.none:
                self.report.loaded[name] = ""
            else:
                self.report.left[name] = "state of the optimizer"

    def spans(self, name: str) -> list[tuple[int, int, int]]:
        """Return which rows of a table, or of its optimizer's state, are loaded, as `spans` of `LocalTensor.moved`.

        After the null row and the rows of its vocabulary's ids, a table has the rows that all other ids share.
        """
        here, there = self._wanted[name].size[0], self._saved[name].size[0]
        table = _table_of(name)
        if self._config is None or table not in self._kept_ids:
            return [(0, 0, min(here, there))]
        first, num_shared = 1 + self._kept_ids[table].num_ids, self._config.tables[table].num_buckets
        return [(0, 0, first), (here - num_shared, first, min(there - first, num_shared))]

    def evicted_rows(self, name: str) -> np.ndarray:
        """Return the rows of a table, or of its optimizer's state, that had evicted ids, int64."""
        kept = self._kept_ids.get(_table_of(name)) if _is_of_table(name) else None
        return np.zeros(0, np.int64) if kept is None else NULL_ROW + 1 + kept.evicted

    def _sides(self, prefix: str, take: Take, key: str, decide: Callable[[str, Entry, Entry], None]) -> None:
        """Decide on the tensors with a prefix; `decide` is called for those that both sides have."""
        names = [name for name in dict.fromkeys([*self._wanted, *self._saved]) if name.startswith(prefix)]
        for name in names:
            here, there = self._wanted.get(name), self._saved.get(name)
            if here is None or there is None:
                missing = f"has {name}, which the config does not have"
                if there is None:
                    missing = f"does not have {name}, which the config has"
                of_skipped_table = prefix == TABLE_OPTIMIZER and owner_of(name) not in self.report.loaded
                if take is Take.all and not of_skipped_table:
                    raise self._differs(missing, f"{key}=matching")
                (self.report.new if there is None else self.report.left)[name] = ""
            elif take is Take.none:
                self.report.kept[name] = f"train.init.{key}=none"
            else:
                decide(name, here, there)

    def _table(self, name: str, here: Entry, there: Entry) -> None:
        table, remarks = name.removeprefix(TABLES), []
        if here.size[1] != there.size[1]:
            raise UserError(
                f"checkpoint '{self._path}' has table '{table}' with embedding_dim {there.size[1]}, but the config has "
                f"{here.size[1]}; set tables.{table}.embedding_dim={there.size[1]}, or give the table another name"
            )
        if table in self._kept_ids:
            evicted = len(self._kept_ids[table].evicted)
            kept = sum(count for _, _, count in self.spans(name)) - evicted
            self.report.rows[table] = {"kept": kept, "new": here.size[0] - kept}
            if evicted:
                self.report.rows[table]["evicted"] = evicted
            if evicted or here.size[0] != there.size[0]:
                remarks.append(f"{kept:,} rows of {there.size[0]:,} there, {here.size[0] - kept:,} new")
        elif here.size[0] != there.size[0]:
            if not self._init.resize_tables:
                raise self._differs(
                    f"has table '{table}' with num_embeddings {there.size[0]}, and the config {here.size[0]}",
                    "resize_tables=true",
                )
            remarks.append(
                f"rows 0 to {min(here.size[0], there.size[0]) - 1}, of {there.size[0]} there, {here.size[0]} here"
            )
        if here.dtype != there.dtype:
            if not self._init.convert_tables:
                raise self._differs(
                    f"has table '{table}' in {there.dtype}, and the config in {here.dtype}", "convert_tables=true"
                )
            remarks.append(f"{there.dtype} to {here.dtype}")
        self.report.loaded[name] = "; ".join(remarks)

    def _table_state(self, name: str, here: Entry, there: Entry) -> None:
        table = owner_of(name)
        if table not in self.report.loaded:
            self.report.kept[name] = "its table is not loaded"
        elif _table_of(name) in self._other_optimizers and self._init.optimizers is not Take.all:
            self.report.kept[name] = "of another optimizer there"
        elif len(here.size) == len(there.size) and here.size[1:] == there.size[1:]:
            differs = here.size != there.size or len(self.evicted_rows(name)) > 0
            self.report.loaded[name] = self.report.loaded[table].partition(";")[0] if differs else ""
        else:
            self._other_shape(name, here, there, self._init.optimizers, "optimizers")

    def _dense_weight(self, name: str, here: Entry, there: Entry) -> None:
        if name.removeprefix(DENSE) in self._other_inputs and self._init.dense is not Take.all:
            self.report.kept[name] = "reads other features there"
        elif here.size == there.size:
            self.report.loaded[name] = ""
        else:
            self._other_shape(name, here, there, self._init.dense, "dense")

    def _other_shape(self, name: str, here: Entry, there: Entry, take: Take, key: str) -> None:
        if take is Take.all:
            raise self._differs(f"has {name} of shape {there.size}, and the config {here.size}", f"{key}=matching")
        self.report.kept[name] = f"of shape {there.size} there"

    def _differs(self, how: str, option: str) -> UserError:
        instead = "set" if self._config else "start a run of its own with train.init_from and"
        return UserError(f"checkpoint '{self._path}' {how}; restore the config, or {instead} train.init.{option}")


def _belongs(name: str, marker: Marker) -> bool:
    """Return whether a tensor is a table or a dense weight, or belongs to one of these or to a rank."""
    if match := re.match(rf"({RNG}|{IDS})(\d+)/", name):
        return int(match[2]) < marker.world_size
    owner = owner_of(name)
    return owner.startswith((TABLES, DENSE)) and owner in marker.tensors


def _is_of_table(name: str) -> bool:
    """Return whether a tensor is a table, or state of its optimizer."""
    return name.startswith((TABLES, TABLE_OPTIMIZER))


def _table_of(name: str) -> str:
    """Return the name of the table that a tensor is, or whose optimizer's state it is."""
    return owner_of(name).removeprefix(TABLES)
