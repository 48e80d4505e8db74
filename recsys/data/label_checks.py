"""Checks of labels: some are the same in every row, or name what happens in another order."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from recsys.config import Config
from recsys.data.convert import convert_floats
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.spec import BatchSpec, FloatColumn
from recsys.data.storage import BadDataError
from recsys.errors import UserError


def check_known(dataset: Dataset, label: FloatColumn) -> None:
    """Refuse a label that is unknown in every row. Raises UserError, or an error of `SegmentReader.read`."""
    if not label.may_be_unknown:
        return
    if not any(values.null_count < len(values) for values in _label_columns(dataset, label)):
        raise UserError(
            f"config key '{dataset.key}': {label.title} is null in every row, so nothing can be learned from it; "
            f"remove the label, or add rows that have it"
        )


def constant_labels(dataset: Dataset, spec: BatchSpec) -> list[str]:
    """Return sentences on binary labels that are the same in every row of a dataset, if all can be read."""
    trains, sentences = dataset.key == "data.train", []
    effect = (
        "a model learns no more than that"
        if trains
        else "AUC and other metrics that compare rows of both kinds are nan"
    )
    for label in spec.labels:
        try:
            values = _values(dataset, label) if label.binary else set()
        except BadDataError:  # which training reports, or whose rows it leaves out
            continue
        if len(values) == 1:
            sentences.append(
                f"config key '{dataset.key}': {label.title} is {values.pop()} in every row, so {effect}; take in rows "
                f"of the other kind"
            )
    return sentences


def _values(dataset: Dataset, label: FloatColumn) -> set[object]:
    """Return distinct values of a label or its condition: all if there is only one, else at least two."""
    values: set[object] = set()
    for column in _label_columns(dataset, label):
        values.update(column.drop_null().unique().to_pylist())
        if len(values) > 1:
            break
    return values


def _label_columns(dataset: Dataset, label: FloatColumn) -> Iterator[pa.ChunkedArray]:
    """Yield a label's column, or the values of its condition, one row group after the other."""
    for table in SegmentReader(dataset, sorted(label.columns())).tables():
        yield table.column(label.column or "") if label.condition is None else label.condition.mask(table)


def unordered_labels(config: Config, head: pa.Table, spec: BatchSpec) -> list[str]:
    """Return sentences on labels that follow each other in the model, but not in the first rows of data.train.

    A log may have a few such rows. If there are many, labels are named in another order than they happen in, and the
    model is kept from learning them.
    """
    if not config.model.needs().ordered_labels:
        return []
    sentences = []
    for before, label in pairwise(label for label in spec.labels if label.binary):
        there, (was_there, was_known) = _positives(head, label)[0], _positives(head, before)
        if alone := np.count_nonzero(there & was_known & ~was_there):
            sentences.append(
                f"config key 'data.labels': {label.title} is positive in {alone:,} of the first {len(there):,} rows "
                f"while {before.title} is not, but model {config.model.name} takes it to happen only after that; name "
                f"labels in the order in which they happen"
            )
    return sentences


def _positives(rows: pa.Table, label: FloatColumn) -> tuple[np.ndarray, np.ndarray]:
    """Return where a binary label is above 0, and where it is known, bool [rows] each."""
    column = rows.column(label.column or "") if label.condition is None else label.condition.mask(rows)
    values = column.combine_chunks()
    positive = convert_floats(values, replace(label, fill=0.0, finite=False)) > 0
    return positive, values.is_valid().to_numpy(zero_copy_only=False)
