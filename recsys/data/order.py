"""The canonical order of an epoch: a function of (seed, epoch, file footers) alone.

Row groups are permuted and laid end to end; the rows are cut by count into V equal *streams*; a stream is cut
into *windows* of whole row-group pieces bounded by bytes, and each window is shuffled by row. Every global batch
takes an equal slice of every stream, and of W ranks rank r reads streams r*V/W … (r+1)*V/W - 1. So step t trains
the same rows on any number of ranks.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file, as its footer describes it. `num_bytes` is uncompressed, of the columns read."""

    path: str
    index: int
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class Segment:
    """Rows `start` … `stop` - 1 of one row group."""

    path: str
    row_group: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Consecutive segments of a stream that are shuffled together.

    Attributes:
        start: rows of the stream before this window.
        seed: of the permutation; None leaves the rows in order.
    """

    start: int
    segments: tuple[Segment, ...]
    seed: tuple[int, ...] | None

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)

    def permutation(self) -> np.ndarray | None:
        """Return the order of the window's rows, int64 [num_rows], or None for the order of the file."""
        if self.seed is None:
            return None
        return np.random.Generator(np.random.PCG64(self.seed)).permutation(self.num_rows)


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch's rows.

    Attributes:
        row_groups: as the footers list them, files sorted by name.
        seed, epoch: of the permutations; shuffle: False keeps the order of the files.
        num_streams: V. window_bytes: bound of a window; a single segment may exceed it.
    """

    row_groups: Sequence[RowGroup]
    seed: int
    epoch: int
    shuffle: bool
    num_streams: int
    window_bytes: int

    @property
    def num_rows(self) -> int:
        return sum(group.num_rows for group in self.row_groups)

    def stream_rows(self) -> list[int]:
        """Return the number of rows of each stream; they differ by one at most."""
        bounds = self._bounds()
        return [bounds[v + 1] - bounds[v] for v in range(self.num_streams)]

    def windows(self, stream: int) -> list[Window]:
        """Return the windows of one stream, in order."""
        windows: list[Window] = []
        pending: list[Segment] = []
        start = size = 0
        for segment, num_bytes in self._segments(stream):
            if pending and size + num_bytes > self.window_bytes:
                windows.append(self._window(stream, len(windows), start, pending))
                start += windows[-1].num_rows
                pending, size = [], 0
            pending.append(segment)
            size += num_bytes
        if pending:
            windows.append(self._window(stream, len(windows), start, pending))
        return windows

    def _bounds(self) -> list[int]:
        return [self.num_rows * v // self.num_streams for v in range(self.num_streams + 1)]

    def _permuted(self) -> list[RowGroup]:
        if not self.shuffle:
            return list(self.row_groups)
        generator = np.random.Generator(np.random.PCG64((self.seed, self.epoch)))
        return [self.row_groups[i] for i in generator.permutation(len(self.row_groups))]

    def _segments(self, stream: int) -> list[tuple[Segment, int]]:
        low, high = self._bounds()[stream : stream + 2]
        segments, first = [], 0
        for group in self._permuted():
            start, stop = max(low - first, 0), min(high - first, group.num_rows)
            first += group.num_rows
            if start < stop:
                share = group.num_bytes * (stop - start) // group.num_rows
                segments.append((Segment(group.path, group.index, start, stop), share))
        return segments

    def _window(self, stream: int, index: int, start: int, segments: list[Segment]) -> Window:
        seed = (self.seed, self.epoch, stream, index) if self.shuffle else None
        return Window(start, tuple(segments), seed)


@dataclass(frozen=True)
class Position:
    """Where training stands: `consumed[v]` rows of stream v of `epoch` have been trained.

    `rows_before` counts the rows trained in earlier epochs.
    """

    epoch: int
    consumed: tuple[int, ...]
    rows_before: int = 0

    @property
    def num_rows(self) -> int:
        """Rows trained since the start of the run."""
        return self.rows_before + sum(self.consumed)


def fingerprint(row_groups: Sequence[RowGroup]) -> str:
    """Return a digest of the files' names, row counts and sizes, to notice that the order is not a checkpoint's."""
    # Names without their folders: the same data may be mounted elsewhere when a run goes on.
    content = [(g.path.rsplit("/", 1)[-1], g.index, g.num_rows, g.num_bytes) for g in row_groups]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def limit_rows(row_groups: Sequence[RowGroup], max_rows: int | None) -> list[RowGroup]:
    """Return the leading row groups up to `max_rows` rows, the last one cut short."""
    if max_rows is None:
        return list(row_groups)
    kept, left = [], max_rows
    for group in row_groups:
        rows = min(left, group.num_rows)
        if rows:
            kept.append(RowGroup(group.path, group.index, rows, group.num_bytes * rows // group.num_rows))
        left -= rows
    return kept
