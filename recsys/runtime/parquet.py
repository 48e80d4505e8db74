"""Writing of Parquet files: from one table, or from a stream of tables, as commands do for their output."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.errors import UserError
from recsys.runtime.files import prepare_output, replacing

ROW_GROUP_ROWS = 1 << 16  # held in memory
# A dictionary has room for all numbers of FP16. Vectors in FP32 soon have more, and are then written plainly: with
# Arrow's default of 1 MiB that came so late that writing them took twice as long.
_WRITTEN: Any = {"compression": "zstd", "write_page_checksum": True, "dictionary_pagesize_limit": 1 << 18}
# To read a file some rows at a time; by default, Arrow reads all of the requested columns before the first row.
STREAMED: Any = {"pre_buffer": False, "buffer_size": 1 << 20}


def prepare_parquet(path: Path, *columns: str) -> None:
    """Refuse an existing OUT unless it is empty, or a file of the same command, which has these columns.

    So no data are overwritten if the shell has expanded a glob to files of data, or two arguments are swapped.

    Raises:
        UserError: it is another file; and the errors of `prepare_output`.
    """
    prepare_output(path)
    if not path.exists() or not path.stat().st_size:
        return
    try:
        missing = [name for name in columns if name not in pq.read_schema(path).names]
    except (OSError, pa.ArrowException):
        missing = [*columns]
    if missing:
        raise UserError(
            f"OUT: '{path}' exists and has no column '{missing[0]}', which such a file has; name another file"
        )


def write_table(path: Path, table: pa.Table, **options: Any) -> None:
    """Write a table to a file that appears complete, with page checksums; `options` are those of pyarrow."""
    with replacing(path) as aside:
        pq.write_table(table, aside, compression="zstd", write_page_checksum=True, **options)


def write_parquet(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write tables of one schema to a file that appears complete; without rows, write no file. Row groups have 65,536
    rows, or up to a table more. A thread writes a group while the tables of the next one are made."""
    pending: list[pa.Table] = []
    written: Future[None] | None = None
    with ExitStack() as stack:
        for table in chain(tables, [None]):
            if table is not None and len(table):
                pending.append(table)
            is_full = sum(map(len, pending)) >= ROW_GROUP_ROWS
            if pending and (is_full or table is None):
                group = pa.concat_tables(pending)
                if written is None:
                    aside = stack.enter_context(replacing(path))
                    file = stack.enter_context(pq.ParquetWriter(aside, group.schema, **_WRITTEN))
                    thread = stack.enter_context(ThreadPoolExecutor(1))
                else:
                    written.result()
                written = thread.submit(file.write_table, group)
                pending = []
        if written is not None:
            written.result()
