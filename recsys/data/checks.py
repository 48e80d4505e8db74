"""Checks of columns: types must agree in all datasets, some columns must not be empty, some look like mistakes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.config import Config
from recsys.config.features import features_by_table, id_features, model_features
from recsys.data.arrays import value_type
from recsys.data.convert import convert_floats
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.label_checks import constant_labels, unordered_labels
from recsys.data.parquet import read_head
from recsys.data.spec import BatchSpec, FloatColumn
from recsys.data.storage import partition_keys
from recsys.data.wanted import column_of, columns_of, role_features, with_separators
from recsys.errors import UserError
from recsys.ids import is_text

# On 40,000 clicks, two epochs of a DLRM gave AUC .712 with an additional float of noise whose standard deviation was 1,
# .677 if it was 100, and .573 if it was 1,000. On data/sample it gave .650 with the logarithm of the price, and .604
# with the price itself, around 30.
_LARGE = 20.0
_FEW_ROWS = 100


def check_types(config: Config, schemas: dict[str, pa.Schema]) -> None:
    """Refuse columns of ids that are not alike in all data sets.

    Args:
        schemas: by the key that names the data.

    Raises:
        UserError: a table, or a column of a cross, has integers in one place and texts in another, which hash to
            different rows; or a feature has one id per row in some data and lists in others.
    """
    for table, features in features_by_table(config).items():
        dtypes: dict[str, pa.DataType] = {}
        for name in features:
            column = column_of(config, name)
            types = _types_of_ids(config, name, schemas)
            if config.features[name].hidden is not None:  # other data may hold anything in its column
                types = {key: dtype for key, dtype in types.items() if key.startswith("data.train")}
            _check_lists(config, name, column, types)
            dtypes |= _places(column, types)
        _check_dtypes(f"tables.{table}", dtypes)
    for name in id_features(config):
        for column in config.features[name].cross or ():
            _check_dtypes(f"features.{name}.cross", _places(column, _types(column, schemas)))


def _types(column: str, schemas: dict[str, pa.Schema]) -> dict[str, pa.DataType]:
    return {key: schema.field(column).type for key, schema in schemas.items() if column in schema.names}


def _types_of_ids(config: Config, feature: str, schemas: dict[str, pa.Schema]) -> dict[str, pa.DataType]:
    """Return the types of a feature's column by schema, where it is there; texts that are split are lists."""
    types, settings = _types(column_of(config, feature), schemas), config.features[feature]
    if settings.separator is not None:  # a schema may be that of files alone
        of_files = _types(columns_of(config, feature)[0], schemas)
        inside = {key: value_type(dtype) for key, dtype in of_files.items()}
        lists = {key: pa.list_(pa.int64() if settings.integers else dtype) for key, dtype in inside.items()}
        types = lists | types
    return types


def _places(column: str, types: dict[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Return the types of ids by where they are, for messages; for a list or dictionary that of its values."""
    return {f"'{column}' of {key}": value_type(dtype) for key, dtype in types.items()}


def _check_dtypes(asks: str, dtypes: dict[str, pa.DataType]) -> None:
    """Refuse ids that are numbers in some places and texts in others; `asks` is the config key that they belong to.

    Structs, maps and lists of lists are skipped: reading the column refuses them, and says what to name instead.
    """
    single = {
        place: dtype for place, dtype in dtypes.items() if not (pa.types.is_null(dtype) or pa.types.is_nested(dtype))
    }
    texts = [place for place, dtype in single.items() if is_text(dtype)]
    numbers = [place for place in single if place not in texts]
    if texts and numbers:
        raise UserError(
            f"config key '{asks}': its ids are {single[texts[0]]} in column {texts[0]} and {single[numbers[0]]} in "
            f"column {numbers[0]}; write both with the same type (texts with a separator become lists of integers by "
            f"features.X.integers=true; a partition key in paths is a number where all its values are integers of 32 "
            f"bits)"
        )


def has_text_ids(config: Config, table: str, schema: pa.Schema) -> bool | None:
    """Return whether the ids of a table are texts in data with this schema; None if it has no column of such ids."""
    for name in features_by_table(config)[table]:
        for dtype in _types_of_ids(config, name, {"": schema}).values():
            dtype = value_type(dtype)
            if not pa.types.is_null(dtype):
                return is_text(dtype)
    return None


def doubtful_lists(config: Config, train: pa.Schema) -> list[str]:
    """Return sentences on list features of users whose table also has single ids of users, for a retrieval model.

    Lists of friends may share it; a list of items, whose numbers look the same, would by mistake train users' vectors.
    """
    needs = config.model.needs()
    if needs.item_id is None:
        return []
    items, names = config.features[needs.item_id].table, set(role_features(config, "users")) & {*model_features(config)}
    lists = {name for name in names if pa.types.is_nested(train.field(column_of(config, name)).type)}
    single = {config.features[name].table: name for name in sorted(names - lists)}
    shared = {name: config.features[name].table for name in sorted(lists)}
    return [
        f"config key 'features.{name}.table': the ids in its lists have the rows of tables.{table} that those of "
        f"features.{single[table]} have; if they are of items, set it to {items}"
        for name, table in shared.items()
        if table in single and table != items
    ]


def labels_as_features(config: Config, labels: Sequence[FloatColumn]) -> list[str]:
    """Return sentences on features whose columns hold all that a label is made of, so that they give it away."""
    sentences = []
    for name, feature in config.features.items():
        columns = {*columns_of(config, name)}
        for label in labels if feature.expert_of is None else ():
            if (read := label.columns()) <= columns:
                sentences.append(
                    f"config key 'features.{name}': column '{min(read)}' is all that {label.name} is made of, so that "
                    f"the model is told what it is to find; leave the feature out"
                )
    return sentences


def doubts(config: Config, datasets: Mapping[str, Dataset], specs: Mapping[str, BatchSpec]) -> list[str]:
    """Return sentences on likely mistakes in the data of a run, and in the choice of columns.

    Args:
        datasets: by role, as in `Inputs`. specs: of data.train, data.valid and data.test, by role.

    Raises:
        BadDataError: the first rows of data.train cannot be read.
    """
    train, spec, head = datasets["train"], specs["train"], read_head(datasets["train"], 1000)
    of_features = doubtful_lists(config, train.schema) + labels_as_features(config, spec.labels)
    of_files = copied_files(train) + trained_files(datasets) + absent_columns(train)
    of_labels = [sentence for role, spec in specs.items() for sentence in constant_labels(datasets[role], spec)]
    of_labels += unordered_labels(config, head, spec)
    return of_features + of_files + unsplit_texts(config, head) + large_numbers(head, spec) + of_labels


def unsplit_texts(config: Config, head: pa.Table) -> list[str]:
    """Return sentences on features with a separator that is in none of the first texts, each of which is one id."""
    names = [name for name in with_separators(config, "train") if config.features[name].expert_of is None]
    lists = head.select([column_of(config, name) for name in names])
    return [
        f"config key 'features.{name}.separator': {config.features[name].separator!r} divides none of the first "
        f"{len(column):,} texts in column '{columns_of(config, name)[0]}', so that each is one id"
        for name, column in zip(names, lists.columns, strict=True)
        if pc.max(pc.list_value_length(column)).as_py() == 1
    ]


def large_numbers(head: pa.Table, spec: BatchSpec) -> list[str]:
    """Return sentences on floats and labels of data.train whose root mean square is above `_LARGE`.

    It is measured on the first rows, after transforms. Errors are those of `convert_floats`.
    """
    sentences = []
    for column in (*spec.floats, *spec.labels):
        if column.column is None:
            continue
        numbers = convert_floats(head.column(column.column).combine_chunks(), column).astype(np.float64)
        numbers = numbers[np.isfinite(numbers)]
        size = np.sqrt(np.square(numbers).mean()) if numbers.size else 0.0
        if size > _LARGE:
            is_label = column in spec.labels
            key = column.name if is_label else f"features.{column.name}"
            advice = (
                "squares of such errors drown other losses, and are learned slowly: write it in larger units, or its "
                "logarithm"
                if is_label
                else "a network wants numbers of about 1: set standardise: true, or log1p and clip"
            )
            sentences.append(
                f"config key '{key}': column '{column.column}' is around {size:,.0f} in its first rows, and {advice}"
            )
    return sentences


def _check_lists(config: Config, feature: str, column: str, dtypes: dict[str, pa.DataType]) -> None:
    nested = [key for key, dtype in dtypes.items() if pa.types.is_nested(dtype)]
    if nested and feature == config.model.needs().item_id:
        raise UserError(
            f"config key 'model.item_id': column '{column}' of {nested[0]} is {dtypes[nested[0]]}, not one id a row"
        )
    if nested and config.features[feature].hidden is not None:
        raise UserError(
            f"config key 'features.{feature}.hidden': column '{column}' of {nested[0]} is {dtypes[nested[0]]}, and "
            f"only one id a row can be hidden; remove it"
        )
    lists = [key for key, dtype in dtypes.items() if pa.types.is_list(dtype)]
    single = [key for key, dtype in dtypes.items() if key not in nested and not pa.types.is_null(dtype)]
    if lists and single:
        raise UserError(
            f"config key 'features.{feature}': column '{column}' has lists of ids in {lists[0]} and one id a row in "
            f"{single[0]}; write both alike"
        )


def check_weights(dataset: Dataset, weight: FloatColumn) -> None:
    """Refuse a column of weights that is 0 in every row. Raises UserError, or an error of `SegmentReader.read`."""
    lenient, column = replace(weight, fill=0.0, finite=False), weight.column or ""
    chunks = (chunk for table in SegmentReader(dataset, [column]).tables() for chunk in table.column(column).chunks)
    if not any((convert_floats(chunk, lenient) > 0).any() for chunk in chunks):
        raise UserError(
            f"config key '{dataset.key}': column '{column}' (data.weight_column) is 0 in every row, so no row counts"
        )


def copied_files(train: Dataset) -> list[str]:
    """Return a sentence on files of data.train that are copies of others, judged by their sizes and footers."""
    first, copies = dict[tuple[int, int], str](), []
    for path, key in _contents(train):
        if key is not None and (other := first.setdefault(key, path)) != path:
            copies.append((path, other))
    if not copies:
        return []
    path, other = copies[0]
    more = f", and {len(copies) - 1:,} more files are copies" if len(copies) > 1 else ""
    return [
        f"config key '{train.key}': '{path}' is a copy of '{other}'{more}, whose rows are trained as often as they are "
        f"there; if they should not be, move them elsewhere"
    ]


def absent_columns(train: Dataset) -> list[str]:
    """Return sentences on columns that may be missing in some files of data.train, but are missing in all."""
    there = {name for number in np.unique(train.file_layouts).tolist() for name in train.layouts[number].names}
    absent = [name for name in train.options.optional_columns if name in train.columns and name not in there]
    if absent:  # only then, because there may be many paths
        there = {key for path in train.row_groups.paths for key in partition_keys(path)}
    return [
        f"config key 'data.optional_columns': no file of {train.key} has column '{column}', so that it is null in "
        f"every row; mend its name, if it is misspelt"
        for column in absent
        if column not in there
    ]


def trained_files(datasets: Mapping[str, Dataset]) -> list[str]:
    """Return sentences on files of data.valid and data.test which, as such or as copies, are in data.train too.

    Args:
        datasets: by role, as in `Inputs`.
    """
    train, sentences = datasets["train"], []
    paths, keys = map(set, zip(*_contents(train), strict=True))
    for dataset in (datasets[role] for role in ("valid", "test") if role in datasets):
        shared = [path for path, key in _contents(dataset) if path in paths or (key is not None and key in keys)]
        # A different filter may select the rows that the filter of data.train leaves out.
        if shared and dataset.filter in (None, train.filter):
            sentences.append(
                f"config key '{dataset.key}': {len(shared):,} of its {dataset.num_files:,} files are trained on too, "
                f"such as '{shared[0]}', so that its metrics are of rows that the model has seen; name other files, or "
                f"part their rows by data.filter={{train: …, valid: …}}"
            )
    return sentences


def _contents(dataset: Dataset) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Yield each file with a key of its contents; None for files of few rows, which may be equal by chance."""
    groups = dataset.row_groups
    num_rows = np.bincount(groups.file, groups.num_rows, dataset.num_files)
    keys = zip(dataset.file_digests.tolist(), dataset.file_sizes.tolist(), strict=True)
    for path, key, rows in zip(groups.paths, keys, num_rows, strict=True):
        yield path, key if rows >= _FEW_ROWS else None
