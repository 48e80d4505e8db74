"""Kept rows of pruned tables: a bit for each row before pruning, and a mapping to the rows after pruning."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.errors import UserError
from recsys.ids.hashing import IdKeys
from recsys.ids.mappings import NULL_ROW, IdMapping
from recsys.runtime.parquet import write_table

_COLUMN, _WORD = "kept", 64


class KeptRows:
    """The kept rows of a pruned table: they keep their order, and all other rows become one shared row after them.

    This takes one bit for each row before pruning, and half a bit for the counts from which its place is computed.

    Args:
        kept: [rows before pruning], Arrow booleans; true for the null row.

    Attributes:
        num_before: rows before pruning. num_rows: rows after pruning, with the shared one.
    """

    def __init__(self, kept: pa.BooleanArray) -> None:
        self.kept, self.num_before = kept, len(kept)
        # Arrow numbers bits from the lowest of a byte on, and so do words on the machines that Arrow runs on.
        words = np.zeros(-(-len(kept) // _WORD), np.uint64)
        packed = np.packbits(kept.to_numpy(zero_copy_only=False), bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        ends = np.cumsum(np.bitwise_count(words), dtype=np.int64)
        self._words, self._shared = words, int(ends[-1])
        self._before = np.concatenate([[0], ends[:-1]]).astype(np.int32 if self._shared < 2**31 else np.int64)
        self.num_rows = self._shared + 1

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Return for rows before pruning their places after it, int64 [rows]."""
        words, bits = rows >> 6, (rows & (_WORD - 1)).astype(np.uint64)
        word, bit = self._words[words], np.uint64(1)
        below = np.bitwise_count(word & ((bit << bits) - bit))
        return np.where((word >> bits) & bit, self._before[words] + below.astype(np.int64), self._shared)

    def write(self, path: Path) -> None:
        """Write a Parquet file with column `kept`."""
        write_table(path, pa.table({_COLUMN: self.kept}))

    @staticmethod
    def read(path: Path) -> "KeptRows":
        """Read a file that `write` has written.

        Raises:
            UserError: the file cannot be read, or holds something else.
        """
        try:
            kept = pq.read_table(path, page_checksum_verification=True)[_COLUMN].combine_chunks()
            if kept.type != pa.bool_() or kept.null_count or not len(kept) or not kept[NULL_ROW].as_py():
                raise ValueError("it must have a column kept of true and false, the first one true")
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"file '{path}' does not list the rows of a table ({reason}); name one that a run has written"
            ) from error
        return KeptRows(kept)


class PrunedMapping(IdMapping):
    """Maps ids like another mapping, and the rows to their places after pruning."""

    def __init__(self, mapping: IdMapping, kept: KeptRows) -> None:
        super().__init__(kept.num_rows, mapping._seed)
        self.rows_per_id, self._mapping, self._kept = mapping.rows_per_id, mapping, kept

    def _check(self, keys: IdKeys, dtype: pa.DataType) -> None:
        self._mapping._check(keys, dtype)

    def _write(self, keys: IdKeys, start: int, chunk: np.ndarray, out: np.ndarray) -> None:
        rows = np.empty(len(out), np.int64)
        self._mapping._write(keys, start, chunk, rows)
        out[:] = self._kept.places(rows)

    def usage(self, hashes: np.ndarray, weight: float) -> tuple[float, float]:
        """Return the shares in the table before pruning."""
        return self._mapping.usage(hashes, weight)
