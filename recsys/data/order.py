"""The canonical order of an epoch: a function of (seed, epoch, file footers) alone.

Row groups are permuted and laid end to end; the rows are cut by count into V equal *streams*; a stream is cut into
*windows* of whole row-group pieces, bounded by bytes, and each window is shuffled by row. Every global batch takes an
equal slice of every stream, and of W ranks rank r reads streams r*V/W … (r+1)*V/W - 1. So step t trains the same rows
on any number of ranks that divides V.

Where the number of ranks does not divide V, the rows that are still untrained are *cut anew* into a number of streams
that it does divide: what is left of every stream is laid end to end and cut again. Each row comes once all the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

# Of a window, so that a data set of many small files does not open them all before its first batch.
_MOST_SEGMENTS = 16
_FIRST_SEGMENTS = 4  # of a stream's first window
_FIRST_WINDOW = 16  # it has a sixteenth of the bytes, the next an eighth …, so that an epoch begins soon


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Row groups of files, as their footers describe them, in columns, because there may be a million.

    Attributes:
        paths: of all files, in order.
        file: int32 [n], position in `paths`; index: int32 [n], the row group within its file.
        num_rows: int64 [n], above 0; of a filter, the rows that match.
        num_bytes: int64 [n], what these rows take in a window of the loader.
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
        return Segment(self.paths[self.file[i]], int(self.index[i]), start, stop)


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
        seed: of the permutation; None leaves the rows in order.
    """

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
class Span:
    """Rows `start` … `stop` - 1 of a window's order."""

    window: Window
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Cut:
    """A division of rows into streams, and how much of each has been trained.

    Attributes:
        shares: the streams' lengths are in this proportion, all 1 for equal ones.
        consumed: rows of each stream that have been trained.
    """

    shares: tuple[int, ...]
    consumed: tuple[int, ...]

    def bounds(self, num_rows: int) -> list[int]:
        """Return where the streams of `num_rows` rows begin and end, [streams + 1]."""
        return list(accumulate(_stream_rows(self.shares, num_rows), initial=0))

    def stream_rows(self, num_rows: int) -> list[int]:
        """Return the length of each stream of `num_rows` rows."""
        return list(_stream_rows(self.shares, num_rows))


@lru_cache(maxsize=64)  # asked for at every step
def _stream_rows(shares: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    total = sum(shares)
    bounds = [num_rows * end // total for end in accumulate(shares, initial=0)]
    return tuple(stop - start for start, stop in pairwise(bounds))


@dataclass(frozen=True)
class Position:
    """Where training stands in the order of its rows.

    Attributes:
        cuts: of this epoch; the first is of all its rows, each further one of what the one before left untrained.
        rows_before: rows trained in earlier epochs.
    """

    epoch: int
    cuts: tuple[Cut, ...]
    rows_before: int = 0

    @property
    def num_rows(self) -> int:
        """Rows trained since the start of the run."""
        return self.rows_before + sum(sum(cut.consumed) for cut in self.cuts)

    def stream_rows(self, num_rows: int) -> list[int]:
        """Return the length of each stream of the last cut, in an epoch of `num_rows` rows."""
        for cut in self.cuts[:-1]:
            num_rows -= sum(cut.consumed)
        return self.cuts[-1].stream_rows(num_rows)


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch's rows.

    Attributes:
        row_groups: as the footers list them, files sorted by name.
        seed, epoch: of the permutations; shuffle: False keeps the order of the files.
        cuts: as in `Position`; what they have consumed matters of all but the last.
        window_bytes: bound of a window; a single segment may exceed it. Of rows in file order, each segment is one.
    """

    row_groups: RowGroups
    seed: int
    epoch: int
    shuffle: bool
    cuts: tuple[Cut, ...]
    window_bytes: int

    def spans(self, stream: int) -> Iterator[Span]:
        """Yield the pieces of windows that a stream of the last cut consists of, in order."""
        if len(self.cuts) > 1:
            return iter(self._cut_anew[stream])
        return (Span(window, 0, window.num_rows) for window in self._windows(stream))

    @cached_property
    def _permuted(self) -> np.ndarray:
        """Row groups in the order of the epoch."""
        if not self.shuffle:
            return np.arange(len(self.row_groups))
        return np.random.Generator(np.random.PCG64((self.seed, self.epoch))).permutation(len(self.row_groups))

    @cached_property
    def _ends(self) -> np.ndarray:
        """The rows up to the end of each row group, in the order of the epoch."""
        return np.cumsum(self.row_groups.num_rows[self._permuted])

    def _windows(self, stream: int) -> Iterator[Window]:
        pending: list[Segment] = []
        size = number = 0
        for segment, num_bytes in self._segments(stream):
            most_bytes = self.window_bytes // max(1, _FIRST_WINDOW >> number)
            most_segments = _MOST_SEGMENTS if number else _FIRST_SEGMENTS
            if pending and (size + num_bytes > most_bytes or len(pending) >= most_segments or not self.shuffle):
                yield self._window(stream, number, pending)
                pending, size, number = [], 0, number + 1
            pending.append(segment)
            size += num_bytes
        if pending:
            yield self._window(stream, number, pending)

    def _window(self, stream: int, number: int, segments: list[Segment]) -> Window:
        return Window(tuple(segments), (self.seed, self.epoch, stream, number) if self.shuffle else None)

    def _segments(self, stream: int) -> Iterator[tuple[Segment, int]]:
        groups = self.row_groups
        low, high = self.cuts[0].bounds(groups.total_rows)[stream : stream + 2]
        if low == high:
            return
        first, last = np.searchsorted(self._ends, (low, high - 1), side="right")
        for place in range(first, last + 1):
            i = self._permuted[place]
            rows, end = int(groups.num_rows[i]), int(self._ends[place])
            start, stop = max(low - (end - rows), 0), min(high - (end - rows), rows)
            if start < stop:
                yield groups.segment(i, start, stop), int(groups.num_bytes[i]) * (stop - start) // rows

    @cached_property
    def _cut_anew(self) -> list[list[Span]]:
        before = EpochOrder(self.row_groups, self.seed, self.epoch, self.shuffle, self.cuts[:-1], self.window_bytes)
        left: list[Span] = []
        for stream, consumed in enumerate(before.cuts[-1].consumed):
            left += drop_rows(before.spans(stream), consumed)
        streams = []
        for rows in self.cuts[-1].stream_rows(sum(span.num_rows for span in left)):
            taken, left = _split(left, rows)
            streams.append(taken)
        return streams


def drop_rows(spans: Iterator[Span], num_rows: int) -> Iterator[Span]:
    """Yield spans without their first `num_rows` rows."""
    for span in spans:
        dropped = min(num_rows, span.num_rows)
        num_rows -= dropped
        if dropped < span.num_rows:
            yield Span(span.window, span.start + dropped, span.stop)


def _split(spans: list[Span], num_rows: int) -> tuple[list[Span], list[Span]]:
    taken: list[Span] = []
    for i, span in enumerate(spans):
        if num_rows == 0:
            return taken, spans[i:]
        stop = min(span.stop, span.start + num_rows)
        taken.append(Span(span.window, span.start, stop))
        num_rows -= stop - span.start
        if stop < span.stop:
            return taken, [Span(span.window, stop, span.stop), *spans[i + 1 :]]
    return taken, []


def limit_rows(row_groups: RowGroups, max_rows: int | None) -> RowGroups:
    """Return the leading row groups up to `max_rows` rows, the last one cut short."""
    if max_rows is None or row_groups.total_rows <= max_rows:
        return row_groups
    ends = np.cumsum(row_groups.num_rows)
    count = int(np.searchsorted(ends, max_rows)) + 1
    num_rows = row_groups.num_rows[:count].copy()
    num_bytes = row_groups.num_bytes[:count].copy()
    num_rows[-1] -= ends[count - 1] - max_rows
    num_bytes[-1] = num_bytes[-1] * num_rows[-1] // row_groups.num_rows[count - 1]
    file = row_groups.file[:count]
    return RowGroups(row_groups.paths[: file[-1] + 1], file, row_groups.index[:count], num_rows, num_bytes)


def shares(num_rows: int, num_streams: int) -> tuple[int, ...]:
    """Return how many of a step's `num_rows` rows each stream gives; they differ by one at most."""
    bounds = [num_rows * v // num_streams for v in range(num_streams + 1)]
    return tuple(stop - start for start, stop in pairwise(bounds))
