"""Saving checkpoints: written aside, completed by a marker, renamed; in the background if asked for."""

import copy
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recsys.checkpoint.files import write_file
from recsys.checkpoint.state import (
    Marker,
    OtherFormatError,
    TrainState,
    aside_of,
    name_of,
    refused_of,
    verify_checkpoint,
)
from recsys.checkpoint.tensor_files import SUFFIX, Entry, LocalTensor, write_tensors
from recsys.checkpoint.tensors import Tensors
from recsys.errors import UserError, why
from recsys.runtime.checkpoint_folders import list_checkpoints
from recsys.runtime.files import replace_file, sync
from recsys.runtime.logs import logger
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import World

T = TypeVar("T")

_LATEST = "latest"
_OVERHEAD_BYTES = 1 << 20  # marker, config and plan
_OVERHEAD_OF_SHARD_BYTES = 256  # in the marker


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        folder: RUN/checkpoints.
        keep: how many of the newest stay; the best one of early stopping stays too.
        documents: files that are copied into each (config, plan).
        background: write from a copy in host memory while training goes on.
        meaning, facts: see `Marker`.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep: int,
        documents: Sequence[Path] = (),
        background: bool = False,
        meaning: dict[str, Any] | None = None,
        facts: dict[str, tuple[int, str]] | None = None,
    ) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep
        self._documents = documents
        self._meaning, self._facts = meaning or {}, facts or {}
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._writing_world = world
        if background:
            # A process group of its own, because collectives of two threads on one group would be mixed up.
            group = dist.new_group(backend="gloo", timeout=world.timeout)
            assert group is not None
            self._writing_world = replace(world, host_group=group)
            self._thread = ThreadPoolExecutor(1, "checkpoint")

    def save(self, tensors: Tensors, state: TrainState) -> None:
        """Write a checkpoint of step `state.step`, or start to in the background; a crash leaves earlier ones valid.

        Raises:
            UserError: on every rank, it does not fit on the disk or cannot be written, or an earlier one in the
                background could not.
        """
        self.wait()
        final = self.path(state.step)
        if self._world.from_rank_zero(lambda: _is_saved(final)):
            self._world.from_rank_zero(lambda: _attempt_write(lambda: self._update(final, state), final))
            return
        to_save, approximate = tensors.to_save(self._world)
        for name, reason in approximate.items():
            logger.warning("%s is approximate in the checkpoint: %s", name, reason)
        self._check_space(to_save, state.best_step)
        marker = Marker(
            state,
            {},
            tensors.scalars(),
            type(tensors.dense_optimizer).__name__,
            approximate,
            installed_versions(),
            self._world.world_size,
            self._meaning,
            self._facts,
        )
        if self._thread is None:
            self._write(final, to_save, marker)
            return
        copied = {name: local.copy() for name, local in to_save.items()}
        num_bytes = sum(local.num_bytes for local in copied.values())
        logger.info("step %d is saved in the background, from a copy of %.1f MiB", state.step, num_bytes / 2**20)
        # Training goes on changing the state, so it is copied too.
        marker = replace(marker, state=copy.deepcopy(state))
        self._running = self._thread.submit(self._write, final, copied, marker)

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            UserError: on every rank, it failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed, as far as this rank knows; `wait` raises the error."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def newest_valid(self) -> tuple[Path, Marker] | None:
        """Return the newest valid checkpoint and its marker, or None; collective.

        Newer ones that are damaged are named in the log and renamed, so that their steps can be saved again.

        Raises:
            UserError: there are checkpoints but none is valid, or the newest is of another format.
        """
        refused: list[str] = []
        for path in reversed(self._world.from_rank_zero(lambda: list_checkpoints(self.folder))):
            try:
                marker = verify_checkpoint(path, self._world)
            except OtherFormatError:
                raise
            except UserError as error:
                refused.append(str(error))
                continue
            for text in refused:
                logger.warning("refused: %s", text)
            self._world.from_rank_zero(lambda last=path: self._set_aside_after(last))  # type: ignore[misc]
            return path, marker
        if refused:
            raise UserError(
                f"no checkpoint in '{self.folder}' is valid ({' | '.join(refused[:3])}); remove it to start from the "
                f"beginning"
            )
        return None

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / name_of(step)

    def _set_aside_after(self, path: Path) -> None:
        for other in list_checkpoints(self.folder):
            if other > path:
                shutil.rmtree(refused_of(other), ignore_errors=True)
                other.rename(refused_of(other))
        sync(self.folder)

    def _check_space(self, tensors: dict[str, LocalTensor], best_step: int | None) -> None:
        """Refuse to write more than there is room for, before anything is written."""
        own = sum(_file_bytes(local) for local in tensors.values() if not local.replicated)
        shared = sum(_file_bytes(local) for local in tensors.values() if local.replicated)
        needed = int(self._world.sum(torch.tensor(own))) + shared + _OVERHEAD_BYTES
        free = self._world.from_rank_zero(lambda: self._make_room(needed, best_step))
        if needed > free:
            raise UserError(
                f"a checkpoint needs {needed:,} bytes, and '{self.folder}' has {free:,} free; make room there and "
                f"continue with run.resume=true, or move '{self.folder.parent}' to a larger disk and continue there "
                f"(1 MiB of what it needs is reserved for marker, config and plan)"
            )

    def _write(self, final: Path, all_tensors: dict[str, LocalTensor], marker: Marker) -> None:
        """Write tensors, which may not change meanwhile, and the marker with their files and places; collective."""
        world, aside = self._writing_world, aside_of(final)
        path, tensors = aside / f"rank_{world.rank}{SUFFIX}", _of_rank(all_tensors, world)
        try:
            world.from_rank_zero(lambda: _attempt_write(aside.mkdir, final))
            written = world.gather(world.agree(lambda: _attempt_write(lambda: write_tensors(path, tensors), final)))
            files = {f"rank_{rank}{SUFFIX}": entry for rank, (_, entry) in enumerate(written)}
            marker = replace(marker, files=files, tensors=_joined(entries for entries, _ in written))
            world.from_rank_zero(lambda: _attempt_write(lambda: self._commit(final, marker), final))
        except UserError:
            # Every rank has stopped writing.
            world.from_rank_zero(lambda: shutil.rmtree(aside, ignore_errors=True))
            raise
        logger.info("saved %s", final)

    def _commit(self, final: Path, marker: Marker) -> None:
        aside = aside_of(final)
        present = [path for path in self._documents if path.exists()]
        copies = {path.name: write_file(aside / path.name, path.read_bytes()) for path in present}
        replace(marker, files=marker.files | copies).write(aside)
        if final.exists():  # damaged since, or it would have been updated
            shutil.rmtree(refused_of(final), ignore_errors=True)
            final.rename(refused_of(final))
        aside.rename(final)
        sync(self.folder)
        self._point_to(final)
        self._prune(marker.state.best_step, self._keep)

    def _update(self, final: Path, state: TrainState) -> None:
        """Update the state in a checkpoint of the same step and tensors, for example after an evaluation."""
        before = Marker.read(final)
        replace(before, state=state, meaning=self._meaning or before.meaning).write(final)
        self._point_to(final)

    def _point_to(self, final: Path) -> None:
        replace_file(self.folder / _LATEST, f"{final.name}\n")

    def _prune(self, best_step: int | None, keep: int) -> None:
        best = None if best_step is None else self.path(best_step)
        for path in list_checkpoints(self.folder)[:-keep]:
            if path != best:
                path.rename(aside_of(path))  # renamed first, so that no incomplete checkpoint has its name
                # NFS keeps a file that somebody reads; the next save tries again.
                shutil.rmtree(aside_of(path), ignore_errors=True)

    def _make_room(self, needed: int, best_step: int | None) -> int:
        """Remove incomplete checkpoints that a crash has left behind; return the free bytes.

        If those are too few, damaged checkpoints are removed too, and then those that the next save would remove,
        except the last one.
        """
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.glob("*.tmp"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        for path in self.folder.glob(refused_of(self.folder / "*").name):
            if needed > shutil.disk_usage(self.folder).free:
                shutil.rmtree(path, ignore_errors=True)
        if needed > shutil.disk_usage(self.folder).free:
            self._prune(best_step, max(1, self._keep - 1))
        return shutil.disk_usage(self.folder).free


def _is_saved(final: Path) -> bool:
    """Return whether there is a readable checkpoint of a step, whose tensors are then the same."""
    if not final.exists():
        return False
    try:
        Marker.read(final)
    except UserError:
        return False
    return True


def _file_bytes(local: LocalTensor) -> int:
    return local.num_bytes + _OVERHEAD_OF_SHARD_BYTES * len(local.shards)


def _of_rank(tensors: dict[str, LocalTensor], world: World) -> dict[str, LocalTensor]:
    """Return the tensors that a rank writes: its shards, and its share of the replicated tensors."""
    shared = sorted(name for name, local in tensors.items() if local.replicated)[world.rank :: world.world_size]
    return {name: local for name, local in tensors.items() if not local.replicated or name in shared}


def _joined(by_rank: Iterable[dict[str, Entry]]) -> dict[str, Entry]:
    """Join the entries of all ranks to one for each tensor, with its places in all files."""
    joined: dict[str, Entry] = {}
    for entries in by_rank:
        for name, entry in entries.items():
            joined[name] = replace(entry, places=(*(joined[name].places if name in joined else ()), *entry.places))
    return joined


def _attempt_write(action: Callable[[], T], final: Path) -> T:
    """Run an action that writes or removes files; an OSError becomes a UserError that names the checkpoint."""
    try:
        return action()
    except OSError as error:
        raise UserError(
            f"checkpoint '{final}' cannot be written: {why(error)}: {error.filename or ''}; the checkpoints before it "
            f"are valid"
        ) from error
