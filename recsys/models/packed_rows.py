"""Rows of a binary label as integers of eight bytes that ascend with the score, for exact AUC."""

import numpy as np

_SIGN = np.uint32(1 << 31)
_MOST_IN_BLOCK = 1 << 22  # rows, or 32 MiB: glibc never takes blocks of that size from its heap


class PackedRows:
    """Packed rows in a few blocks of growing size.

    One block a batch would leave holes in the heap; large blocks are mapped, and returned to the system, one by one.
    """

    def __init__(self) -> None:
        self._blocks, self._used = [np.zeros(0, np.uint64)], 0  # in the last of them

    def add(self, rows: np.ndarray) -> None:
        """Add rows, as returned by `pack`."""
        while len(rows):
            if self._used == len(self._blocks[-1]):
                size = max(len(rows), sum(map(len, self._blocks)))
                self._blocks.append(np.empty(min(size, _MOST_IN_BLOCK), np.uint64))
                self._used = 0
            added = self._blocks[-1][self._used :][: len(rows)]
            added[:] = rows[: len(added)]
            self._used, rows = self._used + len(added), rows[len(added) :]

    def joined(self) -> np.ndarray:
        """Return all rows in one array, which replaces the blocks."""
        if len(self._blocks) > 1:
            self._blocks[-1] = self._blocks[-1][: self._used]
            blocks, self._used = self._blocks[::-1], sum(map(len, self._blocks))
            self._blocks, start = [np.empty(self._used, np.uint64)], 0
            while blocks:  # each is freed as soon as it is copied
                block = blocks.pop()
                self._blocks[0][start : start + len(block)] = block
                start += len(block)
        return self._blocks[0]


def pack(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return rows as integers that ascend with the score: 32 bits of it, one of the label and 31 of the weight.

    Args:
        labels: 0 or 1; scores: logits; weights: 0 or more. All FP32 [rows].
    """
    bits = (scores + np.float32(0)).view(np.uint32)  # -0.0 becomes 0.0
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.uint64)
    return ordered << 32 | weights.view(np.uint32) | np.where(labels > 0, _SIGN, np.uint32(0))


def unpack(rows: np.ndarray) -> np.ndarray:
    """Return labels, scores and weights of packed rows, FP32 [3, rows]."""
    ordered, others = (rows >> 32).astype(np.uint32), rows.astype(np.uint32)
    scores = np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered).view(np.float32)
    return np.stack([(others >> 31).astype(np.float32), scores, (others & ~_SIGN).view(np.float32)])
