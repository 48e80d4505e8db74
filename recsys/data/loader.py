"""Batches in canonical order, decoded and mapped by threads ahead of training."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from recsys.data.batch import Batch
from recsys.data.buffers import BlockPool
from recsys.data.collate import MicroBatches, Piece, collate
from recsys.data.order import Cut, EpochOrder, Position, Span, Window, drop_rows, shares
from recsys.data.parquet import Dataset, SegmentReader
from recsys.data.window import BatchSpec, Columns, load_window
from recsys.errors import UserError

WindowSource = Callable[[Window], "Future[Columns]"]


@dataclass(frozen=True)
class LoaderOptions:
    """How to read: see `DataConfig` for the meaning of each; `prefetch_batches` with its default filled in."""

    seed: int
    shuffle: bool
    num_streams: int
    window_bytes: int
    num_threads: int
    prefetch_batches: int
    pin_device: torch.device | None  # the GPU that batches are pinned for
    drop_last: bool = False
    skip_bad: bool = False
    micro_batches: MicroBatches = field(default_factory=MicroBatches)


class Loader:
    """Gives one rank its equal share of every step.

    Where the number of ranks divides the number of streams, steps train the same rows on any such number of ranks.
    Otherwise the rows are cut into more streams, so that it does.

    Args:
        dataset: files and footers. spec: what a batch is made of. options: how to read.
        global_batch_size: rows of a step over all ranks, at least one for each stream.
        rank, world_size: of this process.

    Raises:
        UserError: a step has fewer rows than there are streams.
    """

    def __init__(
        self,
        dataset: Dataset,
        spec: BatchSpec,
        options: LoaderOptions,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset = dataset
        self._num_rows = dataset.num_rows
        self.global_batch_size = global_batch_size
        self.num_streams = -(-options.num_streams // world_size) * world_size
        if global_batch_size < self.num_streams:
            raise UserError(
                f"config key 'train.global_batch_size': a step of {global_batch_size} rows cannot take one of each of "
                f"{self.num_streams} streams; use at least {self.num_streams}"
                f"{'' if self.num_streams == world_size else ', or fewer data.num_streams'}"
            )
        self._spec = spec
        self._options = options
        self._shares = shares(global_batch_size, self.num_streams)
        per_rank = self.num_streams // world_size
        self._streams = range(rank * per_rank, (rank + 1) * per_rank)
        self.batch_size = max(sum(self._shares[v : v + per_rank]) for v in range(0, self.num_streams, per_rank))
        self._reader = SegmentReader(dataset)
        self._windows = BlockPool()
        self._batches = BlockPool(pin=options.pin_device is not None)

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory that windows and batches take; page-locked are the batches, with a GPU."""
        return {"window_bytes": self._windows.num_bytes, "batch_bytes": self._batches.num_bytes}

    def start(self) -> Position:
        """Return the position before the first row."""
        return Position(0, (self._whole(),))

    def window_rows(self) -> list[list[int]]:
        """Return for each stream of this rank the rows of its windows in the first epoch, in order."""
        order = self._order(self.start())
        return [[span.window.num_rows for span in order.spans(stream)] for stream in self._streams]

    def resume(self, position: Position) -> Position:
        """Return the position from which this number of ranks goes on: the same, or with what is left cut anew."""
        if position.cuts[-1].shares == self._whole().shares:
            return position
        if position.num_rows == position.rows_before:  # nothing of this epoch has been trained
            return replace(position, cuts=(self._whole(),))
        return replace(position, cuts=(*position.cuts, self._whole()))

    def steps_left(self, position: Position, num_epochs: int) -> int:
        """Return how many batches lie between a position (of `start` or `resume`) and the end of the epochs."""
        if position.epoch >= num_epochs:
            return 0
        per_epoch = self._steps(self.start())
        return self._steps(position) + (num_epochs - position.epoch - 1) * per_epoch

    def batches(self, position: Position | None = None, num_epochs: int = 1) -> Generator[Batch, None, None]:
        """Yield the batches from a position (of `start` or `resume`) to the end of the epochs.

        Close the iterator, or exhaust it, to end its threads.

        Raises:
            UserError: data that cannot be read or do not fit; it comes out of `next`, in the caller's thread.
        """
        position = position or self.start()
        if self._options.num_threads == 0:
            yield from self._produce(position, num_epochs, self._read_now, num_ahead=0)
            return
        # One thread each: a team of OpenMP's threads in every one of them would spin on the cores that train.
        pool = ThreadPoolExecutor(self._options.num_threads, "decode", torch.set_num_threads, (1,))
        batches = self._produce(position, num_epochs, lambda window: pool.submit(self._read, window), num_ahead=1)
        depth = self._options.prefetch_batches
        ahead = _ReadAhead(batches, depth, self._options.pin_device) if depth else None
        try:
            yield from batches if ahead is None else ahead
        finally:
            # The pool first, so that nobody waits for windows that nobody needs any more.
            pool.shutdown(wait=False, cancel_futures=True)
            if ahead is not None:
                ahead.close()
            pool.shutdown()

    def _whole(self) -> Cut:
        even = len(set(self._shares)) == 1
        return Cut((1,) * self.num_streams if even else self._shares, (0,) * self.num_streams)

    def _left(self, position: Position) -> list[int]:
        lengths = position.stream_rows(self._num_rows)
        return [rows - done for rows, done in zip(lengths, position.cuts[-1].consumed, strict=True)]

    def _steps(self, position: Position) -> int:
        """Return the number of steps to the end of the epoch."""
        left = self._left(position)
        if self._options.drop_last:
            return min(rows // share for rows, share in zip(left, self._shares, strict=True))
        return max(-(-rows // share) for rows, share in zip(left, self._shares, strict=True))

    def _order(self, position: Position) -> EpochOrder:
        options = self._options
        return EpochOrder(
            self.dataset.row_groups,
            options.seed,
            position.epoch,
            options.shuffle,
            position.cuts,
            options.window_bytes,
        )

    def _produce(self, position: Position, num_epochs: int, source: WindowSource, num_ahead: int) -> Iterator[Batch]:
        readers = [_StreamReader(self._spans(position, num_epochs, v), source, num_ahead) for v in self._streams]
        while position.epoch < num_epochs:
            epoch, lengths = position.epoch, position.stream_rows(self._num_rows)
            for more in reversed(range(self._steps(position))):
                position = self._advance(position, lengths)
                # No name for the pieces, which would keep windows that are used up.
                yield self._collate(self._pieces(readers, epoch), position if more else self._next_epoch(position))
            position = self._next_epoch(position)

    def _collate(self, pieces: list[Piece], position: Position) -> Batch:
        micro_batches = self._options.micro_batches
        return collate(pieces, self.batch_size, self._spec, position, self._batches, micro_batches)

    def _pieces(self, readers: "list[_StreamReader]", epoch: int) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        for v, reader in zip(self._streams, readers, strict=True):
            pieces += reader.take(epoch, self._shares[v], at)
            at += self._shares[v]
        return pieces

    def _spans(self, position: Position, num_epochs: int, stream: int) -> Iterator[tuple[int, Span]]:
        """Yield (epoch, span) of one stream to the end of the epochs."""
        while position.epoch < num_epochs:
            for span in drop_rows(self._order(position).spans(stream), position.cuts[-1].consumed[stream]):
                yield position.epoch, span
            position = self._next_epoch(position)

    def _next_epoch(self, position: Position) -> Position:
        return Position(position.epoch + 1, (self._whole(),), position.num_rows)

    def _advance(self, position: Position, lengths: list[int]) -> Position:
        """Return the position a step on, before it is that of the next epoch."""
        *before, cut = position.cuts
        steps = zip(cut.consumed, self._shares, lengths, strict=True)
        consumed = tuple([min(done + share, rows) for done, share, rows in steps])
        return Position(position.epoch, (*before, Cut(cut.shares, consumed)), position.rows_before)

    def _read(self, window: Window) -> Columns:
        return load_window(window, self._reader.read, self._spec, self._windows, self._options.skip_bad)

    def _read_now(self, window: Window) -> "Future[Columns]":
        future: Future[Columns] = Future()
        future.set_result(self._read(window))
        return future


class _StreamReader:
    """Takes rows of one stream, window after window, with the next windows on their way."""

    def __init__(self, spans: Iterator[tuple[int, Span]], source: WindowSource, num_ahead: int) -> None:
        self._spans = spans
        self._source = source
        self._pending: list[tuple[int, Span, Future[Columns]]] = []
        self._num_ahead = num_ahead
        self._columns: Columns | None = None  # of the first that is pending, once rows of it are taken
        self._row = self._stop = 0  # of its rows: what comes next, and the end
        for _ in range(num_ahead):
            self._request()

    def take(self, epoch: int, rows: int, at: int) -> list[Piece]:
        """Return pieces of up to `rows` rows of an epoch in all, for the rows of a batch from `at` on."""
        pieces: list[Piece] = []
        while rows and (columns := self._window(epoch)) is not None:
            start, self._row = self._row, min(self._row + rows, self._stop)
            pieces.append(Piece(columns, start, self._row, at))
            rows, at = rows - (self._row - start), at + self._row - start
            if self._row == self._stop:
                self._drop()
        return pieces

    def _window(self, epoch: int) -> Columns | None:
        """Return the window that the epoch's next rows are in, or None after its last."""
        while self._pending and self._pending[0][0] < epoch:  # what drop_last has left of an earlier one
            self._drop()
            self._request()
        if self._columns is None:
            if not self._pending:
                self._request()
            if not self._pending or self._pending[0][0] != epoch:
                return None
            _, span, future = self._pending[0]
            if len(self._pending) <= self._num_ahead:
                self._request()
            self._columns, self._row, self._stop = future.result(), span.start, span.stop
        return self._columns

    def _drop(self) -> None:
        self._pending.pop(0)
        self._columns = None

    def _request(self) -> None:
        following = next(self._spans, None)
        if following is not None:
            epoch, span = following
            self._pending.append((epoch, span, self._source(span.window)))


class _ReadAhead:
    """Runs an iterator of batches in a thread, up to `depth` batches ahead."""

    def __init__(self, batches: Iterator[Batch], depth: int, pin_device: torch.device | None) -> None:
        self._batches = batches
        self._pin_device = pin_device
        self._queue: queue.Queue[Batch | Exception | None] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
            del item  # its memory is used again as soon as nobody holds it

    def close(self) -> None:
        """End the thread; batches not taken are dropped."""
        self._stopped.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._queue.get(timeout=0.05)
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._pin_device is not None:
                torch.cuda.set_device(self._pin_device)  # else pinning starts a context on GPU 0
            for batch in self._batches:
                self._queue.put(batch)
                del batch
                if self._stopped.is_set():
                    return
            self._queue.put(None)
        except Exception as error:
            self._queue.put(error)
