"""Tables as Parquet: exported from a checkpoint without a process group, imported into a new run.

Columns: `row` int64; for a vocabulary table also `id`, null for rows that belong to no single id, and `bucket`, the
number of the row among those that the other ids share; `vector`, embedding_dim floats; then the optimizer's state, a
float or embedding_dim floats. The file's metadata name the optimizer, and say how many updates its state has seen.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from recsys.checkpoint.files import file_problem
from recsys.checkpoint.source import check_facts, facts_of
from recsys.checkpoint.state import Marker, find_checkpoint
from recsys.checkpoint.tensor_files import Entry, LocalTensor, read_rows
from recsys.checkpoint.tensors import TABLE_OPTIMIZER, TABLES
from recsys.config import IdMappingType, TableConfig
from recsys.data.arrays import value_type
from recsys.data.footers import metadata_of, opened
from recsys.data.storage import Storage
from recsys.errors import UserError, nearest
from recsys.ids import IdMapping, KeptRows, build_mapping, is_text, read_vocabulary
from recsys.runtime.parquet import ROW_GROUP_ROWS, STREAMED, prepare_parquet, write_parquet
from recsys.runtime.signals import ending_orderly
from recsys.runtime.threads import computed_by_one_thread

VECTOR = "vector"
_ROWS_AT_ONCE = 1 << 13  # rows read at a time
_KEYS = ("row", "id", "bucket")
_OPTIMIZER, _UPDATES = b"recsys.optimizer", b"recsys.updates"  # in a file's metadata


def export_table(source: Path, table: str, out: Path) -> int:
    """Write a table of a checkpoint as Parquet, a chunk of rows at a time; return the number of its rows.

    Args:
        source: a run directory, whose best or newest checkpoint is used, or a checkpoint.
        out: replaced once the new file is complete.

    Raises:
        UserError: there is no such checkpoint, it is corrupt, or it has no such table; or `out` is a folder or a file
            of something else, or cannot be written there.
    """
    path = find_checkpoint(source, "RUN_OR_CHECKPOINT")
    marker = Marker.read(path)
    prepare_parquet(out, "row", VECTOR)
    problems = [text for name, entry in marker.files.items() if (text := file_problem(path / name, *entry))]
    if problems:
        raise UserError(f"checkpoint '{path}' is corrupt: {problems[0]}; use another one")
    if TABLES + table not in marker.tensors:
        tables = [name.removeprefix(TABLES) for name in marker.tensors if name.startswith(TABLES)]
        raise UserError(
            f"checkpoint '{path}' has no table '{table}'{nearest(table, tables)} (known: {', '.join(sorted(tables))})"
        )
    prefix = f"{TABLE_OPTIMIZER}{table}/"
    states = sorted(name for name in marker.tensors if name.startswith(prefix))  # ranks name them in any order
    columns = {VECTOR: TABLES + table} | {name.removeprefix(prefix): name for name in states}
    vocabulary = None
    if (name := f"{table}.parquet") in marker.facts:
        check_facts(path, marker, [name])
        vocabulary = read_vocabulary(facts_of(path) / name)
    metadata = {_UPDATES: str(marker.state.updates_of(table)).encode()}
    if (optimizer := marker.meaning.get(f"tables.{table}.optimizer.name")) is not None:
        metadata[_OPTIMIZER] = optimizer.encode()
    batches = _batches(path, {column: marker.tensors[name] for column, name in columns.items()}, vocabulary)
    with ending_orderly(), computed_by_one_thread():
        write_parquet(out, (batch.replace_schema_metadata(metadata) for batch in batches))
    return marker.tensors[TABLES + table].size[0]


def _batches(path: Path, entries: Mapping[str, Entry], vocabulary: pa.Array | None) -> Iterator[pa.Table]:
    """Yield the rows of columns, some at a time."""
    num_rows = entries[VECTOR].size[0]
    for start in range(0, num_rows, ROW_GROUP_ROWS):
        stop = min(num_rows, start + ROW_GROUP_ROWS)
        values = {column: to_arrow(read_rows(path, entry, start, stop)) for column, entry in entries.items()}
        yield pa.table({**_keys(start, stop, vocabulary), **values})


def _keys(start: int, stop: int, vocabulary: pa.Array | None) -> dict[str, pa.Array]:
    rows = np.arange(start, stop)
    if vocabulary is None:
        return {"row": pa.array(rows)}
    first_bucket = 1 + len(vocabulary)
    has_id = (rows >= 1) & (rows < first_bucket)
    ids = vocabulary.take(pa.array(rows - 1, mask=~has_id))
    return {"row": pa.array(rows), "id": ids, "bucket": pa.array(rows - first_bucket, mask=rows < first_bucket)}


def to_arrow(tensor: torch.Tensor) -> pa.Array:
    """Return a tensor of any type and device as float32: [rows] as numbers, [rows, columns] as lists of one length."""
    values = pa.array(tensor.float().cpu().reshape(-1).numpy())
    return values if tensor.dim() == 1 else pa.FixedSizeListArray.from_arrays(values, tensor.shape[1])


class TableRows:
    """Finds the table rows of a Parquet file's rows, by raw id or by number.

    Args:
        vocabulary: that of a vocabulary table. kept: the kept rows of a pruned table.
        has_texts: whether the table's ids are texts in the data; None: not known.
        mapping: that of the table, if it exists already, since one of many ids takes memory.
    """

    def __init__(
        self,
        table: TableConfig,
        vocabulary: pa.Array | None,
        kept: KeptRows | None = None,
        has_texts: bool | None = None,
        mapping: IdMapping | None = None,
    ) -> None:
        self._table, self._has_texts = table, has_texts
        self._first_bucket = None if vocabulary is None else 1 + len(vocabulary)
        self._mapping = mapping or build_mapping(table, vocabulary, kept)
        # From this row on, ids share rows.
        self._first_shared = self._first_bucket if kept is None else kept.num_rows - 1

    def find(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return the table row of each row of a record batch, int64, or -1 if the table has none.

        Rows are found by `id` if there is such a column (the null row by `row`, shared rows by `bucket`), otherwise by
        `row`. Vectors of ids without a row of their own, in a vocabulary or after pruning, are left out, since other
        ids share their rows.

        Raises:
            UserError: the ids are texts, but numbers in the data, or the reverse, so none would be found.
        """
        if "id" not in batch.schema.names:
            return _whole_numbers(batch, "row")
        rows = np.full(batch.num_rows, -1, np.int64)
        ids = batch.column("id")
        self._check_type(ids)
        has_id = ids.is_valid().to_numpy(zero_copy_only=False)
        mapped = self._mapping.rows(ids.drop_null())
        if self._first_shared is not None:
            mapped[mapped >= self._first_shared] = -1
        rows[has_id] = mapped
        if self._first_bucket is not None and {"row", "bucket"} <= set(batch.schema.names):
            rows[~has_id & (_whole_numbers(batch, "row") == 0)] = 0
            buckets = _whole_numbers(batch, "bucket")
            shared = ~has_id & (buckets >= 0) & (buckets < self._table.num_embeddings - self._first_bucket)
            rows[shared] = self._first_bucket + buckets[shared]
        return rows

    def _check_type(self, ids: pa.Array) -> None:
        dtype = value_type(ids.type)
        if not pa.types.is_null(dtype) and self._has_texts not in (None, is_text(dtype)):
            texts = "texts" if self._has_texts else "numbers"
            raise UserError(f"its ids are {dtype}, and those of the data are {texts}; write both with the same type")


@dataclass(frozen=True)
class Imported:
    """The result of importing a file.

    Attributes:
        num_rows: rows of the file that have a place in the table, on any rank.
        updates: how many the optimizer's state in the file has seen; 0 if it has no state, or does not say.
        optimizer: the one that the state belongs to; the state is used only if it is the table's own optimizer.
    """

    num_rows: int
    updates: int = 0
    optimizer: str | None = None


def import_table(
    path: Path, table: str, settings: TableConfig, optimizer: str, rows: TableRows, targets: dict[str, LocalTensor]
) -> Imported:
    """Set rows of a table, and of its optimizer's state, from a Parquet file of vectors.

    State that the file lacks, or has for another optimizer, becomes 0 in these rows, as in new ones: the present state
    belongs to the old vectors, and FTRL would restore them from it.

    Args:
        table: its name. optimizer: name of its optimizer.
        targets: this rank's tensors by their names in a checkpoint; those of the table are set in place.

    Raises:
        UserError: the file cannot be read or is not one for this table.
    """
    key = f"config key 'train.init.from_parquet.{table}': file '{path}'"
    prefix, num_rows = f"{TABLE_OPTIMIZER}{table}/", 0
    columns = {VECTOR: targets[TABLES + table]}
    columns |= {name.removeprefix(prefix): local for name, local in targets.items() if name.startswith(prefix)}
    try:
        with _opened(path) as file:
            names, there, updates = file.schema_arrow.names, *_optimizer_of(file, optimizer)
            _check_columns(key, names, settings)
            states = [name for name in names if name not in (*_KEYS, VECTOR)]
            taken = {VECTOR, *(states if there == optimizer else ())} & columns.keys()
            read_columns = [name for name in names if name in (*_KEYS, *taken)]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=read_columns):
                places = _places(key, table, settings, rows, batch)
                num_rows += _set_rows(key, batch, places, columns, taken)
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise UserError(f"{key} cannot be read ({' '.join(str(error).split())[:200]}); name another one") from error
    # This does not depend on what this rank holds, since all ranks have to return the same.
    return Imported(num_rows, updates, there) if states else Imported(num_rows)


def _places(key: str, table: str, settings: TableConfig, rows: TableRows, batch: pa.RecordBatch) -> np.ndarray:
    """Return the result of `TableRows.find`, checked to be rows of the table."""
    try:
        places = rows.find(batch)
    except UserError as error:
        raise error.within(f"{key}: column 'id'") from error
    if len(places) and places.max() >= settings.num_embeddings:
        raise UserError(
            f"{key} has row {places.max()}, but the table has {settings.num_embeddings} rows; raise "
            f"tables.{table}.num_embeddings"
        )
    return places


def _set_rows(
    key: str, batch: pa.RecordBatch, places: np.ndarray, columns: Mapping[str, LocalTensor], taken: Collection[str]
) -> int:
    """Set the rows of a record batch in tensors, to 0 in those not `taken`; return how many rows have a place."""
    has_place = places >= 0
    rows = torch.from_numpy(places[has_place])
    for name, local in columns.items():
        if name in taken:
            values = _from_arrow(key, name, batch.column(name), local)
        else:
            values = torch.zeros(len(places), *local.size[1:])
        _scatter(local, rows, values[torch.from_numpy(has_place)])
    return len(rows)


def _whole_numbers(batch: pa.RecordBatch, column: str) -> np.ndarray:
    """Return a column of any type of whole numbers as int64 [rows], with -1 for null."""
    return batch.column(column).cast(pa.int64()).fill_null(-1).to_numpy()


def _optimizer_of(file: pq.ParquetFile, default: str) -> tuple[str, int]:
    """Return the optimizer of the state in a file, and its number of updates; `default` and 0 if it does not say."""
    metadata = file.metadata.metadata or {}
    return metadata.get(_OPTIMIZER, default.encode()).decode(), int(metadata.get(_UPDATES, 0))


def _opened(path: Path) -> pq.ParquetFile:
    """Open a file in Parquet's own types, since its writer may have used list views, or UUIDs for texts."""
    footer = metadata_of(Storage(), str(path), path.stat().st_size)
    return opened(str(path), footer, page_checksum_verification=True, **STREAMED)


def _check_columns(key: str, names: list[str], settings: TableConfig) -> None:
    one_row = settings.num_hashes == 1 and settings.mapping is not IdMappingType.quotient_remainder
    if VECTOR not in names or not {"row", "id"} & set(names):
        raise UserError(f"{key} has the columns {', '.join(names)}, but needs vector, and id or row")
    if "id" in names and not one_row:
        raise UserError(f"{key} has a column id, but the table gives each id several rows; write a column row instead")


def _from_arrow(key: str, name: str, column: pa.Array, local: LocalTensor) -> torch.Tensor:
    width, in_lists = torch.Size(local.size[1:]).numel(), pa.types.is_list(column.type)
    values = column.flatten() if in_lists else column
    # Each row is checked, since lists of other lengths may have the same sum.
    fits = not in_lists or pc.all(pc.equal(pc.list_value_length(column), width), min_count=0).as_py()
    if in_lists != (len(local.size) > 1) or column.null_count or values.null_count or not fits:
        raise UserError(f"{key}: column '{name}' must have {width} numbers a row, and no null")
    numbers = torch.from_numpy(values.cast(pa.float32()).to_numpy().copy())
    finite = numbers.to(local.dtype).isfinite()
    if not finite.all():
        most = f"{torch.finfo(local.dtype).max:.5g} for {str(local.dtype).removeprefix('torch.')}"
        raise UserError(
            f"{key}: column '{name}' holds {numbers[~finite][0]:.5g}, but must hold finite numbers that the "
            f"table can store, up to {most}"
        )
    return numbers.view(len(column), *local.size[1:])


def _scatter(local: LocalTensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Set rows of a tensor, as far as this rank holds them."""
    for shard in local.shards:
        first, columns = shard.offsets[0], values
        if values.dim() > 1:
            columns = values[:, shard.offsets[1] : shard.offsets[1] + shard.tensor.shape[1]]
        mine = (rows >= first) & (rows < first + shard.tensor.shape[0])
        place = (rows[mine] - first).to(shard.tensor.device)
        shard.tensor.index_copy_(0, place, columns[mine].to(shard.tensor))
