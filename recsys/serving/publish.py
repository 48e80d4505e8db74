"""Publishing during training: an export, then changes to it, for scorers that follow.

A publication is a folder of `train.publish.dir`: `base-NUMBER` is an export, `delta-NUMBER` has the rows of tables that
training has touched since the publication before, and the dense part. It appears complete, under the next number.
`train.publish.dir` belongs to one run at a time.
"""

import json
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsys.data.inputs import Inputs
from recsys.errors import UserError, why
from recsys.runtime.command import run_command
from recsys.runtime.files import cannot_write, replace_file, sync
from recsys.runtime.logs import logger
from recsys.runtime.run_lock import RunLock
from recsys.serving.export_dense import check_packages, weight_chunks
from recsys.serving.export_tables import Files, encoded
from recsys.serving.rebase import ASIDE, WEIGHTS, number_of
from recsys.serving.score import FORMAT, MANIFEST, checksum
from recsys.tables.bytes import PUBLISHED_BYTES
from recsys.tables.touched import TouchedRows
from recsys.training.build import Built

_MOST_LEFT_OUT = 63  # publications in a row to skip, after many that failed
# Names of folders that a killed process leaves half written: by an export, a rebase or a delta.
_HALF_WRITTEN = re.compile(r"\.base-\d+\.\w+|(?:base|delta)-\d+" + re.escape(ASIDE))


class Publisher:
    """Publishes a model during training; every rank has one, enters it, and calls `publish` at the same steps.

    The first publication of a process is a base, since those of an earlier process may be ahead of the checkpoint from
    which training resumed. Once the deltas have more bytes than the base, both are also written as a new base.

    Entering a publisher locks the folder.

    Raises:
        UserError: the folder cannot be written, holds something else or is another run's, or a package that exports
            need is missing.
    """

    def __init__(self, inputs: Inputs, built: Built) -> None:
        self._config, self._world, self._built = inputs.config, inputs.world, built
        self._settings = inputs.config.train.publish
        self._folder = Path(self._settings.dir or "")
        self._touched = TouchedRows(built.model, inputs.config)
        self._lock = RunLock("config key 'train.publish.dir': another run publishes to '{}'")
        self._number = 0
        self._base: dict[str, Any] | None = None  # manifest of the base that deltas can follow, on rank 0; None: none
        self._last = ""  # checksum of the last manifest
        self._delta_bytes = 0
        self._published_at = time.monotonic()
        self._failures = 0  # in a row,
        self._left_out = 0  # and how many publications are still to be left out because of them

    def __enter__(self) -> "Publisher":
        self._number = self._world.from_rank_zero(lambda: next_number(self._folder, self._lock))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lock.release()

    def asks(self, step: int) -> bool:
        """Return whether this rank asks for a publication after a step; all ranks learn it with the step's totals.

        After failures, some of those that are due are skipped, since a base that fails has cost a whole export.
        """
        if self._world.rank != 0:
            return False
        is_due = time.monotonic() - self._published_at >= (self._settings.every_seconds or 0)
        if self._settings.every_steps is not None:
            is_due = step % self._settings.every_steps == 0
        if is_due and self._left_out:
            self._left_out -= 1
            self._published_at = time.monotonic()
            return False
        return is_due

    def publish(self, step: int, save: Callable[[], Path | UserError]) -> None:
        """Publish the model as it is after a step; collective.

        If it cannot be written, the reason is logged, training continues, and the next publication is a base.

        Args:
            save: writes a checkpoint of this step, waits for it, and returns its folder, or why it cannot be written.
        """
        if self._world.from_rank_zero(lambda: self._base is None):
            self._touched.clear()
            saved = save()
            self._publish(step, lambda: self._by_first_rank(partial(self._write_base, saved)))
        elif self._publish(step, partial(self._write_delta, step)) and self._world.from_rank_zero(self._is_outgrown):
            self._publish(step, lambda: self._by_first_rank(self._rebase))
        self._published_at = time.monotonic()

    def _publish(self, step: int, write: Callable[[], str | None]) -> bool:
        """Write one publication and log it; return whether it succeeded."""
        start, problem = time.monotonic(), write()
        self._number = self._world.from_rank_zero(lambda: self._number)
        if problem is None:
            logger.info("published step %d as number %d in %.1f s", step, self._number, time.monotonic() - start)
            self._number += 1
            self._failures = 0
        else:
            self._base = None
            self._left_out = min(2**self._failures - 1, _MOST_LEFT_OUT)
            self._failures += 1
            when = f", after leaving out {self._left_out}" if self._left_out else ""
            message = "step %d is not published as number %d (%s); training continues, and publishes all rows next%s"
            logger.warning(message, step, self._number, problem, when)
        return problem is None

    def _by_first_rank(self, write: Callable[[], None]) -> str | None:
        return self._world.from_rank_zero(lambda: _problem_of(write))

    def _is_outgrown(self) -> bool:
        assert self._base is not None
        return self._delta_bytes > sum(file["bytes"] for file in self._base["files"].values())

    def _write_base(self, checkpoint: Path | UserError) -> None:
        """Export the checkpoint, if it could be written, in a process of its own, whose memory is then freed.

        If the folder was removed, or taken over by another run, meanwhile, it is locked again.
        """
        if self._lock.lost():
            self._lock.release()
        self._number = max(self._number, next_number(self._folder, self._lock))
        if isinstance(checkpoint, UserError):
            self._begin(checkpoint)
            return
        options = "--trust-code", "--tables", self._settings.tables.name.lower()
        self._begin(run_command("export", str(checkpoint), str(self._next_base), *options, shown=False))

    def _rebase(self) -> None:
        """Write a base from the last one and its deltas, in a process without torch."""
        self._check_lock()
        self._begin(run_command(str(self._next_base), module="recsys.serving.rebase", shown=False))

    def _check_lock(self) -> None:
        """Raise a UserError if the folder no longer belongs to this run."""
        if lost := self._lock.lost():
            raise UserError(lost)

    @property
    def _next_base(self) -> Path:
        return self._folder / f"base-{self._number:09d}"

    def _begin(self, problem: UserError | None) -> None:
        """Continue from the base that has been written, unless there was a problem."""
        if problem is not None:
            self._remove_old(bases_kept=1)  # on a full disk, nothing else makes room for a base
            raise problem
        self._base = json.loads((self._next_base / MANIFEST).read_text())
        self._last, self._delta_bytes = self._base["sha256"], 0
        self._remove_old()

    def _remove_old(self, bases_kept: int = 2) -> None:
        """Remove publications before the last bases, by default the last two, as scorers may still read the first."""
        bases = sorted(path for path in self._folder.glob("base-*") if number_of(path))
        for path in self._folder.iterdir():
            if len(bases) >= bases_kept and 0 < number_of(path) < number_of(bases[-bases_kept]):
                shutil.rmtree(path, ignore_errors=True)

    def _write_delta(self, step: int) -> str | None:
        """Write a delta; return on every rank the problem, if there is one."""
        name = f"delta-{self._number:09d}"
        files = Files(self._folder / (name + ASIDE))
        problem = None
        if self._world.rank == 0:
            problem = _problem_of(self._check_lock) or _problem_of(files.folder.mkdir)
        for table, value in self._built.tensors.tables().items():
            chunks = self._changed_rows(table, value)
            if self._world.rank == 0 and problem is None:
                problem = _problem_of(partial(files.write, f"tables/{table}.bin", chunks))
            deque(chunks, maxlen=0)  # other ranks, and rank 0 after an error, take part in the remaining collectives
        return self._world.from_rank_zero(lambda: self._completed(problem, step, files, self._folder / name))

    def _changed_rows(self, table: str, value: Any) -> Iterator[np.ndarray]:
        """Yield, on rank 0, the rows of a table that training has touched, in chunks; collective.

        A chunk is uint8 [rows, 8 + stride]: the number of each row, then its bytes in the encoding of the base.
        """
        num_rows, dim = self._config.tables[table].num_embeddings, self._config.tables[table].embedding_dim
        step = max(1, PUBLISHED_BYTES // (4 * dim))
        for start in range(0, num_rows, step):
            own = self._touched.take(table, value, start, start + step)
            shards = [shard for of_rank in self._gather(own) for shard in of_rank]
            if shards:
                rows = torch.cat([rows for _, rows, _ in shards]).unique()
                vectors = torch.empty(len(rows), dim)
                for column, rows_of_shard, weights in shards:
                    vectors[torch.searchsorted(rows, rows_of_shard), column : column + weights.shape[1]] = (
                        weights.float()
                    )
                assert self._base is not None
                coded = encoded(vectors, self._base["tables"][table]["vectors"]["encoding"])
                yield torch.cat([rows[:, None].view(torch.uint8), coded], dim=1).numpy()

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list on others."""
        if self._world.world_size == 1:
            return [value]
        values = [None] * self._world.world_size if self._world.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._world.host_group)
        return values or []

    def _completed(self, problem: str | None, step: int, files: Files, final: Path) -> str | None:
        """Complete a delta, unless writing its rows had a problem; return the problem, after the delta was removed."""
        problem = problem or _problem_of(lambda: self._complete(step, files, final))
        if problem and not self._lock.lost():  # otherwise the folder may belong to another run
            shutil.rmtree(files.folder, ignore_errors=True)
        return problem

    def _complete(self, step: int, files: Files, final: Path) -> None:
        """Write the dense part and the manifest, and rename the delta to its final name."""
        files.write(WEIGHTS, weight_chunks(self._built.dense_model))
        content: dict[str, Any] = {"format": FORMAT, "number": self._number, "step": step, "follows": self._last}
        content["files"] = files.entries
        content["sha256"] = checksum(content)
        replace_file(files.folder / MANIFEST, json.dumps(content, indent=1) + "\n")
        for folder in (files.folder / "tables", files.folder):
            if folder.exists():
                sync(folder)
        files.folder.rename(final)
        sync(self._folder)
        self._last = content["sha256"]
        self._delta_bytes += sum(file["bytes"] for file in files.entries.values())


def next_number(folder: Path, lock: RunLock) -> int:
    """Lock a folder, unless it is locked, remove half-written publications, and return the next number.

    Raises:
        UserError: it cannot be written, holds something else or is another run's, or a package that exports need is
            missing.
    """
    check_packages()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Hidden files are ignored: shares, desktops and version control make them; none is a publication.
        names = [path.name for path in folder.iterdir() if not (number_of(path) or path.name.startswith("."))]
        if foreign := [name for name in names if not _HALF_WRITTEN.fullmatch(name)]:
            raise UserError(
                f"config key 'train.publish.dir': '{folder}' holds '{min(foreign)}', which was not published; name "
                f"another folder"
            )
        if not lock.id:
            lock.take(folder)
        for path in folder.iterdir():
            if _HALF_WRITTEN.fullmatch(path.name):
                shutil.rmtree(path)
        return max(map(number_of, folder.iterdir()), default=0) + 1
    except OSError as error:
        raise cannot_write("train.publish.dir", folder, error) from error


def _problem_of(action: Callable[[], Any]) -> str | None:
    """Call a function that writes; return why it failed, or None."""
    try:
        action()
    except OSError as error:
        return f"{error.filename or 'a file'}: {why(error)}"
    except UserError as error:
        # Advice on how to resume an ended run or command does not fit this run, which continues by itself.
        return str(error).partition("; make room there")[0]
    return None
