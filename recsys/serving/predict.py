"""Scores of rows, and the best items of users, as Parquet files with rows in the order of the data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recsys.config.features import id_features
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.inputs import Given, Inputs
from recsys.data.loader import Loader
from recsys.data.order import Segment
from recsys.data.parquet import narrowed
from recsys.data.wanted import column_of, read_features, role_lists
from recsys.errors import UserError, in_words
from recsys.runtime.logs import quiet_libraries, start_logging
from recsys.runtime.run_lock import output_lock
from recsys.runtime.watchdog import open_run_world
from recsys.serving.finished import Finished, OpenRun
from recsys.serving.parts import BLOCK_ROWS, Parts
from recsys.step.output import StepOutput
from recsys.training.alike import check_shared
from recsys.training.evaluation import outputs_of

NUMBER = "number of the row"
Results = Callable[[StepOutput], pa.Table]


def predict(run: Finished, data: str | list[str], out: Path, keep: Sequence[str] | None = None) -> int:
    """Write a folder of Parquet files with the scores of all rows; return the exit status, 0.

    Args:
        data: as for data.test, a directory, glob, file, or list of these; it needs no labels.
        out: a folder that does not exist, is empty, or holds the same predictions, unfinished.
        keep: columns of the data to write next to `score`; default: columns of ids that the model reads, without lists.

    Raises:
        UserError: the data do not fit the model, or the folder holds something else.
    """
    return write_results(run, out, run.given("rows", data, keep), {}, scores_of_rows)


def recommend(run: Finished, data: str | list[str], out: Path, k: int = 20, keep: Sequence[str] | None = None) -> int:
    """Write the best `k` items of data.items for each row of users; return the exit status, 0.

    The columns are `items`, raw ids, best first, and `scores`. Items in the row's list of data.seen_column are left
    out, as are those not in its list of data.candidates_column, if that is set. So there may be fewer than `k`.
    Arguments and errors as of `predict`.
    """
    check_recommends(run, k)
    given = run.given("users", data, keep)
    return write_results(run, out, given, {"k": k}, lambda opened: best_of_users(opened, k), ["items"])


def check_recommends(run: Finished, k: int) -> None:
    """Refuse a run without vectors of items or without items, and a `k` below 1. Raises UserError."""
    if run.config.model.needs().item_id is None:
        raise UserError(f"model '{run.config.model.name}' has no vectors of items to recommend; predict scores rows")
    if run.config.data.items is None:
        raise UserError("config key 'data.items' is not set; name the items to recommend")
    if not isinstance(k, Integral) or k < 1:
        raise UserError(f"k is {k!r}, but must be a whole number above 0")


def write_results(
    run: Finished,
    out: Path,
    given: Given,
    settings: Mapping[str, Any],
    results_of: Callable[[OpenRun], Results],
    roles: Sequence[str] = (),
    then: Callable[[OpenRun], None] = lambda opened: None,
) -> int:
    """Write a model's results for rows, block by block, on all ranks; return the exit status, 0.

    Args:
        settings: other settings that results depend on, so that no other task continues the folder.
        roles: datasets of the config to open too. then: called at the end, on all ranks.
    """
    quiet_libraries()
    config = run.config
    with open_run_world(config.run) as (world, _), naming_data():
        opened = OpenRun(run.in_order(world.world_size), world, roles, given)
        task = {
            "checkpoint": {"path": str(run.checkpoint), "files": opened.source.marker.files},
            "data": {name: dataset.fingerprint for name, dataset in opened.inputs.datasets.items()},
            "lists": {name: column for name, (column, _) in role_lists(config, given.role).items()},
            "columns": kept_columns(opened.inputs, given),
            **settings,
        }
        write_blocks(opened, out, given.role, task, results_of, then)
        del opened
    return 0


def write_blocks(
    opened: OpenRun,
    out: Path,
    role: str,
    task: dict[str, Any],
    results_of: Callable[[OpenRun], Results],
    then: Callable[[OpenRun], None] = lambda opened: None,
) -> None:
    """Write a model's results for the rows of a role, except blocks that are written already; collective.

    Args:
        task: as of `Parts`, with the `columns` to keep. then: called at the end, while the folder is locked.
    """
    inputs, world = opened.inputs, opened.world
    blocks = _blocks(inputs.datasets[role])
    with output_lock() as lock:
        parts = world.from_rank_zero(lambda: Parts.begin(out, task, [block.num_rows for block in blocks], lock))
        check_shared(out, lock, world, "OUT")
        start_logging(out / "_logs", world.rank)
        opened.introduce()
        if not parts.is_done:
            results = results_of(opened)

        def tables_of(number: int) -> Iterator[pa.Table]:
            return scored(opened, inputs.loader(role, blocks[number]), task["columns"], results, parts.show)

        parts.write(world, lock, tables_of)
        then(opened)


def kept_columns(inputs: Inputs, given: Given) -> list[str]:
    """Return the columns to keep: `given.kept`, else columns of ids that the model reads, no lists or crosses."""
    if given.kept is not None:
        return list(dict.fromkeys(given.kept))
    config, schema = inputs.config, inputs.datasets[given.role].schema
    names = [name for name in read_features(config, given.role) if name in id_features(config)]
    columns = dict.fromkeys(column_of(config, name) for name in names if not config.features[name].cross)
    return [column for column in columns if not pa.types.is_nested(schema.field(column).type)]


def _blocks(dataset: Dataset) -> list[Dataset]:
    """Return a dataset in blocks of whole row groups."""
    rows = dataset.row_groups.num_rows
    block = (np.cumsum(rows) - rows) // BLOCK_ROWS
    return [narrowed(dataset, np.where(block == number, rows, 0)) for number in np.unique(block)]


@torch.no_grad()
def scored(
    opened: OpenRun,
    loader: Loader,
    columns: list[str],
    results: Results,
    show: Callable[[int], None] = lambda rows: None,
) -> Iterator[pa.Table]:
    """Yield this rank's rows of a loader, batch by batch: kept columns and results; collective.

    Args:
        show: called with the number of rows that are done on all ranks.

    Raises:
        UserError: a kept column has the name of a result.
    """
    kept, rows = KeptColumns(loader, columns), 0
    for output in outputs_of(opened.inputs, opened.model, loader):
        table, scores = kept.take(output.batch.num_rows), results(output).slice(0, output.batch.num_rows)
        if twice := [name for name in scores.column_names if name in table.column_names]:
            raise UserError(
                f"--keep: column '{twice[0]}' would be written twice; leave it out, or rename it in the data"
            )
        rows += loader.global_batch_size
        show(rows)
        yield pa.table([*table.columns, *scores.columns], [*table.column_names, *scores.column_names])


class KeptColumns:
    """Columns of the rows of this rank as they are in the files, in order.

    Args:
        numbered: add column `NUMBER` with the places of rows in the dataset, int64.
    """

    def __init__(self, loader: Loader, columns: list[str], numbered: bool = False) -> None:
        self._schema = pa.schema([loader.dataset.schema.field(name) for name in columns])
        self._reader, sizes = SegmentReader(loader.dataset, columns), loader.dataset.row_groups.num_rows
        self._begins, self._segments = np.cumsum(sizes) - sizes, loader.segments()
        if numbered:
            self._schema = self._schema.append(pa.field(NUMBER, pa.int64()))
        self._pending = self._schema.empty_table()

    def take(self, num_rows: int) -> pa.Table:
        """Return the next rows."""
        tables = [self._pending]
        while self._schema.names and sum(map(len, tables)) < num_rows:
            tables.append(self._read(next(self._segments)).cast(self._schema))
        rows = pa.concat_tables(tables)
        self._pending = rows.slice(num_rows)
        return rows.slice(0, num_rows)

    def _read(self, segment: Segment) -> pa.Table:
        """Return the columns of a segment; the numbers of rows may be the only one."""
        if NUMBER not in self._schema.names:
            return self._reader.read(segment)
        rows = pa.table({NUMBER: self._begins[segment.number] + np.arange(segment.start, segment.stop)})
        return self._reader.read(segment).append_column(NUMBER, rows[NUMBER]) if len(self._schema) > 1 else rows


def scores_of_rows(opened: OpenRun) -> Results:
    """Return a function from the outputs of the model to a table of its predictions, a column of floats for each.

    It raises a UserError for predictions of another shape than one number a row.
    """
    model = opened.model.module.dense.model

    def results(output: StepOutput) -> pa.Table:
        columns = model.predictions(output.outputs)
        for name, column in columns.items():
            if column.shape != output.batch.weights.shape:
                raise UserError(
                    f"config key 'model.name': the model's predictions gave '{name}' of {list(column.shape)}, but must "
                    f"give a number for each row, [{len(output.batch.weights)}]"
                )
        return pa.table({name: column.cpu().numpy() for name, column in columns.items()})

    return results


def best_of_users(opened: OpenRun, k: int) -> Results:
    """Return a function from the outputs of the model to the best items of users, by raw id, with their scores."""
    items, corpus = opened.items, opened.inputs.corpus
    assert corpus is not None

    def results(output: StepOutput) -> pa.Table:
        scores, positions = (tensor.cpu() for tensor in items.best(output.outputs[0], k, output.batch))
        chosen = scores > -torch.inf
        offsets = pa.array(np.concatenate([[0], chosen.sum(1).cumsum(0).numpy()]), pa.int32())
        ids = corpus.take(pa.array(positions[chosen].numpy()))
        lists = {"items": ids, "scores": pa.array(scores[chosen].float().numpy())}
        return pa.table({name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()})

    return results


def naming_data() -> AbstractContextManager[None]:
    """Make errors name the argument DATA, not a config key."""
    return in_words({f"config key '{Given.key}'": Given.key})
