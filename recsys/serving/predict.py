"""Scores of rows, and the best items of users, as Parquet files row for row in the order of the data.

The rows are cut into blocks of whole row groups. Of a block every rank takes rows that follow each other, and writes
them to a part file of its own, so that the parts in the order of their names have the rows in theirs. When all parts of
a block are there, the block is noted as done; who begins again goes on behind it, on any number of ranks.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys.config.features import id_features
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.inputs import Given, Inputs
from recsys.data.loader import Loader
from recsys.data.parquet import narrowed
from recsys.data.wanted import column_of, role_features, role_lists
from recsys.errors import UserError
from recsys.models.metrics import best_items, rows_at_once
from recsys.runtime.files import replace_file, replacing
from recsys.runtime.logs import logger, quiet_libraries, start_logging
from recsys.runtime.world import World, open_world
from recsys.serving.finished import Finished, OpenRun
from recsys.step.output import StepOutput
from recsys.training.evaluation import outputs_of

_BLOCK_ROWS = 1 << 20  # at least, which an interruption costs
_ROW_GROUP_ROWS = 1 << 16  # of the files written, held in memory
_PROGRESS_S = 10.0
_STATE = "_state.json"  # readers of Parquet folders leave out what begins so

Results = Callable[[StepOutput], pa.Table]


def predict(run: Finished, data: str | list[str], out: Path, keep: Sequence[str] | None = None) -> int:
    """Write a folder of Parquet files with the scores of all rows; return the exit status, 0.

    Args:
        data: as data.test: a directory, glob, file, or list of these. Labels need not be there.
        out: a folder that is not there, is empty, or holds the same predictions, unfinished.
        keep: columns of the data to write beside `score`; default: those of ids that the model reads, without lists.

    Raises:
        UserError: data that do not fit the model, or a folder that holds other things.
    """
    return _write(run, data, out, keep, "rows", {}, scores_of_rows)


def recommend(run: Finished, data: str | list[str], out: Path, k: int = 20, keep: Sequence[str] | None = None) -> int:
    """Write the best `k` items of data.items for each row of users; return the exit status, 0.

    The columns are `items`, raw ids, best first, and `scores`. Items in the row's list of data.seen_column are left
    out, and with data.candidates_column those not in its list; so there may be fewer than `k`. Arguments and errors as
    of `predict`.
    """
    check_recommends(run)
    return _write(run, data, out, keep, "users", {"k": k}, lambda opened: best_of_users(opened, k))


def check_recommends(run: Finished) -> None:
    """Refuse a run without vectors of items, or without items. Raises UserError."""
    if run.config.model.needs().item_id is None:
        raise UserError(f"model '{run.config.model.name}' has no vectors of items to recommend; predict scores rows")
    if run.config.data.items is None:
        raise UserError("config key 'data.items' names no data: the items to recommend")


def _write(
    run: Finished,
    data: str | list[str],
    out: Path,
    keep: Sequence[str] | None,
    role: str,
    settings: dict[str, Any],
    results_of: Callable[[OpenRun], Results],
) -> int:
    quiet_libraries()
    config = run.config
    with open_world(config.run.device, config.run.num_threads) as world, naming_data():
        run = run.in_order(world.world_size)
        opened = OpenRun(run, world, ["items"] if role == "users" else [], run.given(role, data, keep))
        datasets = opened.inputs.datasets
        kept = kept_columns(keep, opened.inputs, role)
        task = {
            "checkpoint": {"path": str(run.checkpoint), "files": opened.source.marker.files},
            "data": {name: dataset.fingerprint for name, dataset in datasets.items()},
            "lists": {name: column for name, (column, _) in role_lists(config, role).items()},
            "columns": kept,
            **settings,
        }
        blocks = _blocks(datasets[role])
        rows = [block.num_rows for block in blocks]
        progress = world.from_rank_zero(lambda: _Progress.begin(out, task, rows))
        start_logging(out / "_logs", world.rank)
        opened.introduce()
        opened.model.eval()
        with torch.no_grad():
            if progress.done < len(blocks):
                results = results_of(opened)
            for number in range(progress.done, len(blocks)):
                loader = opened.inputs.loader(role, blocks[number])
                tables = scored(opened, loader, kept, results, progress.show)
                _write_part(tables, out / f"part-{number:05d}-{world.rank:05d}.parquet")
                world.barrier()
                progress.note(world)
        logger.info("done: %d rows in %s", datasets[role].num_rows, out)
        del opened
    return 0


def kept_columns(keep: Sequence[str] | None, inputs: Inputs, role: str) -> list[str]:
    """Return the columns to keep: those asked for, or those of ids that the model reads, without lists and crosses."""
    if keep is not None:
        return list(keep)
    config, schema = inputs.config, inputs.datasets[role].schema
    names = [name for name in role_features(config, role) if name in id_features(config)]
    columns = dict.fromkeys(column_of(config, name) for name in names if not config.features[name].cross)
    return [column for column in columns if not pa.types.is_nested(schema.field(column).type)]


def _blocks(dataset: Dataset) -> list[Dataset]:
    """Return parts of a dataset, of whole row groups."""
    rows = dataset.row_groups.num_rows
    block = (np.cumsum(rows) - rows) // _BLOCK_ROWS
    return [narrowed(dataset, np.where(block == number, rows, 0)) for number in np.unique(block)]


@dataclass
class _Progress:
    """How much of a folder is done.

    Attributes:
        task: what is to be written. rows: of each block. done: blocks that are.
    """

    folder: Path
    task: dict[str, Any]
    rows: list[int]
    done: int = 0
    shown_s: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, folder: Path, task: dict[str, Any], rows: list[int]) -> "_Progress":
        """Make or take a folder, and remove of an interrupted attempt what its blocks were not finished of.

        Raises:
            UserError: it holds something else.
        """
        progress = cls(folder, json.loads(json.dumps(task)), rows)
        if folder.exists() and not folder.is_dir():
            raise UserError(f"'{folder}' is a file; name a folder to write to")
        if folder.exists() and any(folder.iterdir()):
            progress.done = progress._done_before()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("part-*"):
            if int(path.name.split("-")[1]) >= progress.done:
                path.unlink()
        if progress.done:
            logger.info("%d of %d blocks were there", progress.done, len(rows))
        progress._save()
        return progress

    def note(self, world: World) -> None:
        """Note that one more block is done, with its parts."""
        self.done += 1
        if world.rank == 0:
            self._save()

    def show(self, rows: int) -> None:
        """Tell now and then how far it is; `rows` are done of the block that is under way, over all ranks."""
        if time.monotonic() - self.shown_s > _PROGRESS_S:
            self.shown_s = time.monotonic()
            now, total = sum(self.rows[: self.done]) + min(rows, self.rows[self.done]), sum(self.rows)
            logger.info("%s of %s rows (%.0f %%)", f"{now:,}", f"{total:,}", 100 * now / total)

    def _done_before(self) -> int:
        other = "name another folder, or remove it"
        try:
            content = json.loads((self.folder / _STATE).read_text())
            task, rows, done = content["task"], content["rows"], content["done"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"'{self.folder}' is not empty, and holds no predictions; {other}") from error
        differing = [key for key in {**self.task, **task} if self.task.get(key) != task.get(key)]
        if differing or rows != self.rows:
            what = ", ".join(differing) or "rows"
            raise UserError(f"'{self.folder}' holds predictions of something else (other {what}); {other}")
        return int(done)

    def _save(self) -> None:
        content = {"task": self.task, "rows": self.rows, "done": self.done}
        replace_file(self.folder / _STATE, json.dumps(content, indent=1))


def scored(
    opened: OpenRun, loader: Loader, columns: list[str], results: Results, show: Callable[[int], None]
) -> Iterator[pa.Table]:
    """Yield this rank's rows of a loader, batch by batch: columns that are kept, and results; collective.

    Args:
        show: told how many rows are done on all ranks.
    """
    kept, rows = KeptRows(loader, columns), 0
    for output in outputs_of(opened.inputs, opened.model, loader):
        table, found = kept.take(output.batch.num_rows), results(output).slice(0, output.batch.num_rows)
        for name, column in zip(found.column_names, found.columns, strict=True):
            if name in table.column_names:
                raise UserError(f"--keep: column '{name}' would be there twice; leave it out, or rename it in the data")
            table = table.append_column(name, column) if table.num_columns else pa.table({name: column})
        rows += output.batch.num_rows * opened.world.world_size
        show(rows)
        yield table


class KeptRows:
    """Columns of this rank's rows as they are in the files, in order."""

    def __init__(self, loader: Loader, columns: list[str]) -> None:
        self._segments = map(SegmentReader(loader.dataset, columns).read, loader.segments())
        self._schema = pa.schema([loader.dataset.schema.field(name) for name in columns])
        self._pending = self._schema.empty_table()

    def take(self, num_rows: int) -> pa.Table:
        """Return the next rows."""
        pieces = [self._pending]
        while self._schema.names and sum(map(len, pieces)) < num_rows:
            pieces.append(next(self._segments).cast(self._schema))
        rows = pa.concat_tables(pieces)
        self._pending = rows.slice(num_rows)
        return rows.slice(0, num_rows)


def _write_part(tables: Iterator[pa.Table], path: Path) -> None:
    """Write a stream of tables to a file, in row groups; of no rows, none."""
    pending: list[pa.Table] = []
    with ExitStack() as stack:
        file: pq.ParquetWriter | None = None
        for table in chain(tables, [None]):
            if table is not None and len(table):
                pending.append(table)
            is_full = sum(map(len, pending)) >= _ROW_GROUP_ROWS
            if pending and (is_full or table is None):
                group = pa.concat_tables(pending)
                if file is None:
                    aside = stack.enter_context(replacing(path))
                    file = stack.enter_context(
                        pq.ParquetWriter(aside, group.schema, compression="zstd", write_page_checksum=True)
                    )
                file.write_table(group)
                pending = []


def scores_of_rows(opened: OpenRun) -> Results:
    """Return what the model predicts of rows."""
    model = opened.model.module.dense.model

    def results(output: StepOutput) -> pa.Table:
        columns = model.predictions(output.outputs)
        return pa.table({name: column.cpu().numpy() for name, column in columns.items()})

    return results


def best_of_users(opened: OpenRun, k: int) -> Results:
    """Return the best items of users, by raw id, with their scores."""
    items, corpus = opened.items, opened.inputs.corpus
    assert corpus is not None

    def results(output: StepOutput) -> pa.Table:
        users = output.outputs[0]
        step = rows_at_once(len(items), users.device.type)
        pieces = [slice(start, start + step) for start in range(0, len(users), step)]
        best = [best_items(users[rows], items, k, output.batch, rows) for rows in pieces]
        scores, positions = (torch.cat(columns).cpu() for columns in zip(*best, strict=True))
        chosen = scores > -torch.inf
        offsets = pa.array(np.concatenate([[0], chosen.sum(1).cumsum(0).numpy()]), pa.int32())
        ids = corpus.take(pa.array(positions[chosen].numpy()))
        lists = {"items": ids, "scores": pa.array(scores[chosen].float().numpy())}
        return pa.table({name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()})

    return results


@contextmanager
def naming_data() -> Iterator[None]:
    """Let errors name the argument DATA as what it is."""
    try:
        yield
    except UserError as error:
        error.args = (str(error).replace(f"config key '{Given.key}'", Given.key), *error.args[1:])
        raise
