"""Folder of Parquet files that all ranks write, block by block; an interrupted command resumes after the last block.

The rows are cut into blocks. Each rank writes consecutive rows of a block to a part file of its own, so that the parts,
sorted by name, have the rows in order. When all parts of a block are written, the block is recorded as done.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from recsys.errors import UserError, counted
from recsys.report.shapes import misfit
from recsys.runtime.environment import give_unused_back
from recsys.runtime.files import make_folder, replace_file
from recsys.runtime.live import Task
from recsys.runtime.logs import logger
from recsys.runtime.parquet import write_parquet
from recsys.runtime.run_lock import RunLock, beside_lock
from recsys.runtime.world import World

BLOCK_ROWS = 1 << 20  # approximate; an interruption costs this many
_STATE = "_state.json"  # readers of Parquet folders skip names with an underscore in front
_SHAPE = {"task": {}, "rows": [int], "done": int}


@dataclass
class Parts:
    """State of a folder that is being written.

    Attributes:
        task: describes the content. rows: of each block. done: number of blocks that are written.
        progress: display, while the folder is being written.
    """

    folder: Path
    task: dict[str, Any]
    rows: list[int]
    done: int = 0
    progress: Task | None = None

    @classmethod
    def begin(cls, folder: Path, task: dict[str, Any], rows: list[int], lock: RunLock) -> "Parts":
        """Make or reuse a folder, and remove parts of an unfinished block of an interrupted attempt.

        Args:
            lock: locked before the folder is read, as another process may be writing it.

        Raises:
            UserError: the folder holds something else, or another process writes to it.
        """
        parts = cls(folder, json.loads(json.dumps(task)), rows)
        if folder.exists() and not folder.is_dir():
            raise UserError(f"'{folder}' is a file; name a folder to write to")
        make_folder(folder)
        lock.take(folder)
        if any(beside_lock(folder)):
            parts.done = parts._done_before()
        for path in folder.glob("part-*"):
            if int(path.name.split("-")[1]) >= parts.done:
                path.unlink()
        if parts.done:
            logger.info("%d of %d blocks were there", parts.done, len(rows))
        parts._save()
        return parts

    @property
    def is_done(self) -> bool:
        """Whether all blocks are written."""
        return self.done == len(self.rows)

    def write(self, world: World, lock: RunLock, tables_of: Callable[[int], Iterator[pa.Table]]) -> None:
        """Write the blocks that are not done; collective.

        Args:
            lock: of the folder, held on rank 0.
            tables_of: yields this rank's rows of a block, in order.

        Raises:
            UserError: another process has taken over the folder.
        """
        with Task("writing", sum(self.rows), "rows", world.rank == 0) as self.progress:
            while not self.is_done:
                write_parquet(self.folder / f"part-{self.done:05d}-{world.rank:05d}.parquet", tables_of(self.done))
                give_unused_back()  # loader and pipeline of a block leave holes in the heap, too small for the next
                world.barrier()
                lock.check(now=True)
                self.done += 1
                if world.rank == 0:
                    self._save()
        logger.info("done: %s in %s", counted(sum(self.rows), "row"), self.folder)

    def show(self, rows: int) -> None:
        """Show progress: the number of rows of the current block that are done, over all ranks."""
        if self.progress is not None:
            self.progress.done = sum(self.rows[: self.done]) + min(rows, self.rows[self.done])

    def _done_before(self) -> int:
        try:
            content = json.loads((self.folder / _STATE).read_text())
        except (OSError, ValueError):
            content = None
        if misfit(content, _SHAPE) or not 0 <= content["done"] <= len(content["rows"]):
            raise UserError(f"'{self.folder}' is not empty, but holds nothing to resume; name another folder")
        task = content["task"]
        differing = [key for key in {**self.task, **task} if self.task.get(key) != task.get(key)]
        if differing or content["rows"] != self.rows:
            what = ", ".join(differing) or "rows"
            remedy = "name another folder, or remove it"
            raise UserError(f"'{self.folder}' was written from something else (other {what}); {remedy}")
        return int(content["done"])

    def _save(self) -> None:
        content = {"task": self.task, "rows": self.rows, "done": self.done}
        replace_file(self.folder / _STATE, json.dumps(content, indent=1))
