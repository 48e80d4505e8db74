"""Batches in canonical order, decoded and mapped by threads ahead of training."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from recsys.data.batch import Batch, MicroBatches, Sampled
from recsys.data.collate import Chunk, collate
from recsys.data.dataset import Dataset
from recsys.data.decode import CACHED_ROW_GROUPS, SegmentReader
from recsys.data.negatives import ItemSampler
from recsys.data.order import (
    FIRST_WINDOW,
    EpochOrder,
    Position,
    Segment,
    Share,
    Window,
    most_shares,
    shares,
    slice_bounds,
    stream_bounds,
)
from recsys.data.permutation import Permutation, PermutedReader
from recsys.data.pool import BlockPool
from recsys.data.processes import DecodingProcesses
from recsys.data.spec import BatchSpec
from recsys.data.window import Columns, load_window
from recsys.runtime.loops import are_worth_compiling, compile_loops
from recsys.runtime.threads import windows_ahead

WindowSource = Callable[["_StreamWindow"], Callable[[], Columns]]  # starts to read a window; call the result to wait


@dataclass(frozen=True)
class LoaderOptions:
    """How to read: `DataConfig` explains the keys of the same names; the default of `prefetch_batches` is filled in."""

    seed: int
    shuffle: bool
    num_streams: int
    window_bytes: int
    num_threads: int
    prefetch_batches: int
    pin_device: torch.device | None  # the GPU that batches are pinned for
    processes: bool = False
    drop_last: bool = False
    skip_bad: bool = False
    micro_batches: MicroBatches = field(default_factory=MicroBatches)


class Loader:
    """Loads one rank's share of every step; shares are equal. A step trains the same rows on any number of ranks.

    Args:
        spec: the columns of a batch.
        global_batch_size: rows of a step over all ranks.
        rank, world_size: of this process.
        sampler: draws items to append to batches. permutation: replaces a feature's values by permuted ones.

    Attributes:
        batch_size: rows of this rank's batches, without drawn items; the same on all ranks.
        first_row: place of this rank's first row in the step.
        kept_row_groups: how many row groups that windows read in parts stay decoded.
    """

    def __init__(
        self,
        dataset: Dataset,
        spec: BatchSpec,
        options: LoaderOptions,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        sampler: ItemSampler | None = None,
        permutation: Permutation | None = None,
    ) -> None:
        self.dataset = dataset
        self._sampler = sampler
        self.global_batch_size = global_batch_size
        self.batch_size = -(-global_batch_size // world_size)
        self.first_row = global_batch_size * rank // world_size
        self._num_rows, self._world_size = dataset.num_rows, world_size
        self._slots = slice_bounds(global_batch_size, options.num_streams)
        self._shares = shares(self._slots, rank, world_size)
        bounds = {share.stream: stream_bounds(self._slots, share.stream, self._num_rows) for share in self._shares}
        self._lengths = {stream: stop - start for stream, (start, stop) in bounds.items()}
        self.kept_row_groups = _kept_row_groups(dataset, options)
        self._reader: SegmentReader | PermutedReader = SegmentReader(dataset, kept=self.kept_row_groups)
        if permutation is not None:
            self._reader, spec = permutation.reader(dataset, spec), permutation.spec(spec)
        self._spec = spec
        self._uncounted = spec.uncounted()
        self._options = options
        self._windows = BlockPool()
        self._processes: DecodingProcesses | None = None
        self._batches = BlockPool(pin=options.pin_device is not None)

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory for windows, batches (page-locked with a GPU), and decoding processes, if any."""
        batches = {"batch_bytes": self._batches.num_bytes}
        if self._processes is None:
            return {"window_bytes": self._windows.num_bytes, **batches}
        windows, processes = self._processes.sizes()
        return {"window_bytes": windows, **batches, "process_bytes": processes}

    def window_rows(self, epochs: int = 1) -> list[list[int]]:
        """Return how many rows each window has in the first epochs, for each stream of the rank that reads most."""
        orders, read = [self._order(epoch) for epoch in range(epochs)], most_shares(self._slots, self._world_size)
        return [[window.num_rows for order in orders for window in order.windows(share.stream)] for share in read]

    def row_groups_by_rank(self) -> list[np.ndarray]:
        """Return for each rank the numbers, int64, of the row groups that it reads in the first epoch."""
        order = self._order(0)
        return [order.row_groups_of(rank, self._world_size) for rank in range(self._world_size)]

    def segments(self) -> Iterator[Segment]:
        """Yield the segments of the streams that this rank reads in the first epoch, in order."""
        order = self._order(0)
        for share in self._shares:
            for window in order.windows(share.stream):
                yield from window.segments

    def begun(self, position: Position) -> Position:
        """Return the position, or the next epoch's start if no step is left in its own, as after options changed."""
        return position if self._steps(position) else Position(position.epoch + 1, 0, position.num_rows)

    def steps_left(self, position: Position, num_epochs: int) -> int:
        """Return how many batches there are from a position to the end of the epochs."""
        if position.epoch >= num_epochs:
            return 0
        return self._steps(position) + (num_epochs - position.epoch - 1) * self._steps(Position())

    def batches(self, position: Position | None = None, num_epochs: int = 1) -> Generator[Batch, None, None]:
        """Yield the batches from a position, by default the first row, to the end of the epochs.

        Close the iterator, or exhaust it, to end its threads.

        Raises:
            UserError: data cannot be read or do not fit the spec; raised by `next`, in the caller's thread.
        """
        position = position or Position()
        if self._options.num_threads == 0:
            yield from self._produce(position, num_epochs, lambda placed: lambda: self._read(placed))
            return
        processes = self._start_processes() if self._options.processes else None
        if processes is None and are_worth_compiling(self._options.num_threads, self._options.pin_device is not None):
            compile_loops()
        read = self._read if processes is None else lambda placed: processes.read(placed.window, placed.counts)
        # Each of these threads has one of OpenMP: a team of them in each would spin on the cores that train.
        pool = ThreadPoolExecutor(self._options.num_threads, "decode", torch.set_num_threads, (1,))
        batches = self._produce(position, num_epochs, lambda placed: pool.submit(read, placed).result)
        depth, device = self._options.prefetch_batches, self._options.pin_device
        # Without set_device, pinning from the new thread would start a context on GPU 0.
        pinning = (None, ()) if device is None else (torch.cuda.set_device, (device,))
        thread = ThreadPoolExecutor(1, "read-ahead", *pinning)
        try:
            yield from _read_ahead(batches, thread, depth) if depth else batches
        finally:
            # The pool ends first, so that no thread waits for windows that are no longer needed.
            pool.shutdown(wait=False, cancel_futures=True)
            if processes is not None:
                processes.end()
            thread.shutdown(cancel_futures=True)
            pool.shutdown()
            if processes is not None:
                processes.close()

    def _start_processes(self) -> DecodingProcesses:
        options, beside_gpu = self._options, self._options.pin_device is not None
        self._processes = DecodingProcesses(options.num_threads, self.dataset, self._spec, options.skip_bad, beside_gpu)
        return self._processes

    def _steps(self, position: Position) -> int:
        """Return the number of steps from a position to the end of its epoch."""
        left = self._num_rows - position.rows
        return left // self.global_batch_size if self._options.drop_last else -(-left // self.global_batch_size)

    def _advance(self, position: Position) -> Position:
        """Return the position one step later, or the next epoch's start if no step is left in this one."""
        if self._steps(position):
            rows = min(position.rows + self.global_batch_size, self._num_rows)
            position = Position(position.epoch, rows, position.rows_before)
        return self.begun(position)

    def _order(self, epoch: int) -> EpochOrder:
        options, row_groups = self._options, self.dataset.row_groups
        return EpochOrder(row_groups, options.seed, epoch, options.shuffle, self._slots, options.window_bytes)

    def _produce(self, position: Position, num_epochs: int, source: WindowSource) -> Iterator[Batch]:
        num_ahead = windows_ahead(self._options.num_threads, len(self._shares))
        readers = [_StreamReader(self._stream(position, num_epochs, s), source, num_ahead) for s in self._shares]
        while position.epoch < num_epochs:
            following = self._advance(position)
            if self._steps(position):
                # The chunks get no name here, because a name would keep used windows alive.
                yield self._collate(self._chunks(readers, position), following)
            position = following

    def _collate(self, chunks: list[Chunk], position: Position) -> Batch:
        how = self._spec, position, self._batches, self._options.micro_batches, self.first_row
        if self._sampler is None:
            return collate(chunks, self.batch_size, *how)
        items = self._sampler.rows(position.num_rows)
        chunks.append(Chunk(items, 0, items.num_rows, self.batch_size))
        batch = collate(chunks, self.batch_size + self._sampler.num_rows, *how)
        sampled = Sampled(self.batch_size, self.global_batch_size + self._sampler.first)
        return replace(batch, sampled=sampled, num_rows=batch.num_rows - items.num_rows)

    def _chunks(self, readers: "list[_StreamReader]", position: Position) -> list[Chunk]:
        chunks: list[Chunk] = []
        for share, reader in zip(self._shares, readers, strict=True):
            row, stop = self._rows(position, share)
            chunks += reader.take(min(row + share.start, stop), min(row + share.stop, stop), share.at)
        return chunks

    def _rows(self, position: Position, share: Share) -> tuple[int, int]:
        """Return a stream's next row and the end of its epoch, in row numbers that run through all epochs."""
        length = self._lengths[share.stream]
        first = position.epoch * length
        return first + position.rows * share.size // self.global_batch_size, first + length

    def _stream(self, position: Position, num_epochs: int, share: Share) -> "Iterator[_StreamWindow]":
        """Yield the windows of a stream that have rows to be trained, from a position to the end of the epochs."""
        while position.epoch < num_epochs:
            row, end = self._rows(position, share)
            stop = end - self._lengths[share.stream]
            for window in self._order(position.epoch).windows(share.stream):
                start, stop = stop, stop + window.num_rows
                if stop > row:
                    # Several ranks may read a window; the one that trains its next row counts its ids.
                    counts = share.start <= max(0, start - row) % share.size < share.stop
                    yield _StreamWindow(start, stop, window, counts)
            position = Position(position.epoch + 1)

    def _read(self, placed: "_StreamWindow") -> Columns:
        spec = self._spec if placed.counts else self._uncounted
        return load_window(placed.window, self._reader.read, spec, self._windows, self._options.skip_bad)


class _StreamWindow(NamedTuple):
    """A window with rows `start` … `stop` - 1 of a stream; `counts`: this rank counts its ids in the statistics."""

    start: int
    stop: int
    window: Window
    counts: bool


class _StreamReader:
    """Reads the rows of one stream, window after window, and requests the next windows ahead."""

    def __init__(self, windows: Iterator[_StreamWindow], source: WindowSource, num_ahead: int) -> None:
        self._windows = windows
        self._source = source
        self._pending: list[tuple[_StreamWindow, Callable[[], Columns]]] = []
        self._num_ahead = num_ahead
        self._columns: Columns | None = None  # of the first pending window, once its rows are read
        self._request(num_ahead)

    def take(self, start: int, stop: int, at: int) -> list[Chunk]:
        """Return rows `start` … `stop` - 1 of the stream as chunks, for rows `at` … of a batch."""
        chunks: list[Chunk] = []
        while start < stop:
            placed, columns = self._window(start)
            end = min(stop, placed.stop)
            chunks.append(Chunk(columns, start - placed.start, end - placed.start, at))
            at, start = at + end - start, end
            if end == placed.stop:
                self._drop()
        return chunks

    def _window(self, row: int) -> tuple[_StreamWindow, Columns]:
        """Return the window that holds a row, and drop the windows before it."""
        while self._pending and self._pending[0][0].stop <= row:  # other ranks train its last rows, or none does
            self._drop()
        if self._columns is None:
            self._request(self._num_ahead + 1 - len(self._pending), row)
            self._columns = self._pending[0][1]()
        return self._pending[0][0], self._columns

    def _drop(self) -> None:
        self._pending.pop(0)
        self._columns = None

    def _request(self, count: int, row: int = 0) -> None:
        needed = (placed for placed in self._windows if placed.stop > row)
        for placed in islice(needed, count):
            self._pending.append((placed, self._source(placed)))


def _kept_row_groups(dataset: Dataset, options: LoaderOptions) -> int:
    """Return how many row groups that are read in parts are worth keeping.

    A stream ends in the row group that the next stream begins in. It is needed twice within a few windows only if
    streams are no longer than a row group; else tables would be held for an epoch to save decoding two row groups.
    """
    groups = dataset.row_groups
    are_short = groups.total_rows <= groups.num_rows.max(initial=0) * options.num_streams
    are_small = groups.num_bytes.max(initial=0) * FIRST_WINDOW <= options.window_bytes
    return CACHED_ROW_GROUPS if are_short or are_small else 0


def _read_ahead(batches: Iterator[Batch], thread: Executor, depth: int) -> Iterator[Batch]:
    """Yield batches made by a thread: up to `depth` are ready, and one more is being made."""
    futures = deque(thread.submit(next, batches, None) for _ in range(depth + 1))
    while (batch := futures.popleft().result()) is not None:
        futures.append(thread.submit(next, batches, None))
        yield batch
        del batch  # so that its memory can be reused
