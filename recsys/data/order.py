"""The canonical order of an epoch: a function of (seed, epoch, file footers) alone.

Row groups are permuted and laid end to end; the rows are cut by count into V equal *streams*; a stream is cut into
*windows* of whole row-group pieces, bounded by bytes, and each window is shuffled by row. Every global batch takes an
equal slice of every stream: laid end to end, the slices fill its *slots* 0 … G - 1. Rank r of W takes slots
G*r//W … G*(r+1)//W - 1, from whichever streams they come. So step t trains the same rows on any number of ranks. If
W divides V, a rank reads V/W whole streams; otherwise several ranks read some of the streams, each keeping its rows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsys.errors import UserError

# Bound for a window, so that a dataset of many small files does not open all of them before its first batch.
_MOST_SEGMENTS = 16
_FIRST_SEGMENTS = 4  # the same for a stream's first window
FIRST_WINDOW = 16  # the first has 1/16 of the bytes, the next 1/8 …, so that an epoch begins soon


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Row groups of files, as their footers describe them; one array per fact, because there may be a million.

    Attributes:
        paths: of all files, in order.
        file: int32 [n], position in `paths`; index: int32 [n], number of the row group in its file.
        num_rows: int64 [n], above 0; with a filter, only the rows that match.
        num_bytes: int64 [n], the memory of these rows in a window of the loader.
    """

    paths: tuple[str, ...]
    file: np.ndarray
    index: np.ndarray
    num_rows: np.ndarray
    num_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.file)

    @property
    def total_rows(self) -> int:
        return int(self.num_rows.sum())

    def segment(self, i: int, start: int = 0, stop: int | None = None) -> "Segment":
        """Return rows `start` … `stop` - 1 of the i-th row group, all of them by default."""
        stop = int(self.num_rows[i]) if stop is None else stop
        return Segment(self.paths[self.file[i]], int(self.index[i]), start, stop, i)


@dataclass(frozen=True)
class Segment:
    """Rows `start` … `stop` - 1 of one row group.

    Attributes:
        path: of the file. row_group: its number in the file. number: its number in the dataset.
    """

    path: str
    row_group: int
    start: int
    stop: int
    number: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let errors about values name the row group, unless it is of no file."""
        try:
            yield
        except (UserError, pa.ArrowException) as error:
            if not self.path:
                raise
            raise UserError(f"{error} (in row group {self.row_group} of {self.path})") from error


@dataclass(frozen=True)
class Window:
    """Consecutive segments of a stream that are shuffled together.

    Attributes:
        seed: of the permutation; None: the rows stay in order.
        epoch: that the window belongs to.
    """

    segments: tuple[Segment, ...]
    seed: tuple[int, ...] | None
    epoch: int = 0

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)

    def permutation(self) -> np.ndarray | None:
        """Return the shuffled order of the window's rows, int64 [num_rows], or None for the order of the file."""
        if self.seed is None:
            return None
        return np.random.Generator(np.random.PCG64(self.seed)).permutation(self.num_rows)


class Share(NamedTuple):
    """A rank's rows `start` … `stop` - 1 of a stream's `size` rows of a step; they are rows `at` … of its batch."""

    stream: int
    size: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Position:
    """Where training stands in the order of its rows; all streams advance together.

    Attributes:
        rows: trained in this epoch. rows_before: trained in earlier epochs.
    """

    epoch: int = 0
    rows: int = 0
    rows_before: int = 0

    @property
    def num_rows(self) -> int:
        """Rows trained since the start of the run."""
        return self.rows_before + self.rows


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch's rows.

    Attributes:
        row_groups: as the footers list them, files sorted by name.
        seed, epoch: seed the permutations. shuffle: False keeps the order of the files.
        slots: bounds of the streams' slices, from `slice_bounds`; streams are as long in proportion as their slices.
        window_bytes: bound of a window; a single segment may exceed it. Without shuffling, each segment is a window.
    """

    row_groups: RowGroups
    seed: int
    epoch: int
    shuffle: bool
    slots: tuple[int, ...]
    window_bytes: int

    def windows(self, stream: int) -> Iterator[Window]:
        """Yield the windows of a stream, in order."""
        pending: list[Segment] = []
        size = number = 0
        for segment, num_bytes in self._segments(stream):
            most_bytes = self.window_bytes // max(1, FIRST_WINDOW >> number)
            most_segments = _MOST_SEGMENTS if number else _FIRST_SEGMENTS
            if pending and (size + num_bytes > most_bytes or len(pending) >= most_segments or not self.shuffle):
                yield self._window(stream, number, pending)
                pending, size, number = [], 0, number + 1
            pending.append(segment)
            size += num_bytes
        if pending:
            yield self._window(stream, number, pending)

    def row_groups_of(self, rank: int, world_size: int) -> np.ndarray:
        """Return the numbers in `row_groups`, int64 [n], of the row groups that a rank's streams are cut from."""
        streams = [share.stream for share in shares(self.slots, rank, world_size)]
        bounds = [stream_bounds(self.slots, stream, self.row_groups.total_rows) for stream in (streams[0], streams[-1])]
        places = self._places(bounds[0][0], bounds[1][1])
        return self._permuted[places.start : places.stop]

    def _places(self, low: int, high: int) -> range:
        """Return the places, in the epoch's order, of the row groups that hold rows `low` … `high` - 1."""
        if low == high:
            return range(0)
        first, last = np.searchsorted(self._ends, (low, high - 1), side="right").tolist()
        return range(first, last + 1)

    @cached_property
    def _permuted(self) -> np.ndarray:
        """Row groups in the order of the epoch."""
        if not self.shuffle:
            return np.arange(len(self.row_groups))
        return np.random.Generator(np.random.PCG64((self.seed, self.epoch))).permutation(len(self.row_groups))

    @cached_property
    def _ends(self) -> np.ndarray:
        """How many rows there are up to the end of each row group, in the order of the epoch."""
        return np.cumsum(self.row_groups.num_rows[self._permuted])

    def _window(self, stream: int, number: int, segments: list[Segment]) -> Window:
        seed = (self.seed, self.epoch, stream, number) if self.shuffle else None
        return Window(tuple(segments), seed, self.epoch)

    def _segments(self, stream: int) -> Iterator[tuple[Segment, int]]:
        groups = self.row_groups
        low, high = stream_bounds(self.slots, stream, groups.total_rows)
        for place in self._places(low, high):
            i = self._permuted[place]
            rows, end = int(groups.num_rows[i]), int(self._ends[place])
            start, stop = max(low - (end - rows), 0), min(high - (end - rows), rows)
            if start < stop:
                yield groups.segment(i, start, stop), int(groups.num_bytes[i]) * (stop - start) // rows


def slice_bounds(global_batch_size: int, num_streams: int) -> tuple[int, ...]:
    """Return the slots where the streams' slices of a step begin, and the end; lengths differ by one at most."""
    return tuple(global_batch_size * v // num_streams for v in range(num_streams + 1))


def stream_bounds(slots: tuple[int, ...], stream: int, num_rows: int) -> tuple[int, int]:
    """Return the first row of a stream, and the row after its last, in the order of the epoch."""
    return num_rows * slots[stream] // slots[-1], num_rows * slots[stream + 1] // slots[-1]


def shares(slots: tuple[int, ...], rank: int, world_size: int) -> list[Share]:
    """Return a rank's shares in the slices of a step; the sums for two ranks differ by one row at most."""
    low, high = (slots[-1] * r // world_size for r in (rank, rank + 1))
    own = []
    for stream in range(bisect_right(slots, low) - 1, bisect_left(slots, high)):
        first, end = slots[stream : stream + 2]
        start, stop = max(low, first), min(high, end)
        if start < stop:
            own.append(Share(stream, end - first, start - first, stop - first, start - low))
    return own


def most_shares(slots: tuple[int, ...], world_size: int) -> list[Share]:
    """Return the shares of the rank that reads the most streams."""
    return max((shares(slots, rank, world_size) for rank in range(world_size)), key=len)
