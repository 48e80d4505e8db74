"""Batches in canonical order, decoded and mapped by threads ahead of training."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import torch

from recsys.data.batch import Batch
from recsys.data.collate import BatchSpec, Columns, Piece, collate, convert
from recsys.data.order import EpochOrder, Position, Window
from recsys.data.parquet import Dataset, SegmentReader
from recsys.errors import UserError

WindowSource = Callable[[Window], "Future[Columns]"]


@dataclass(frozen=True)
class LoaderOptions:
    """How to read: see `DataConfig` for the meaning of each."""

    seed: int
    shuffle: bool
    num_streams: int
    window_bytes: int
    num_threads: int
    prefetch_batches: int
    pin_device: torch.device | None  # the GPU that batches are pinned for


class Loader:
    """Gives one rank its equal share of every step.

    Args:
        dataset: files and footers. spec: what a batch is made of. options: how to read.
        global_batch_size: rows of a step over all ranks, a multiple of the number of streams.
        rank, world_size: the number of streams must be a multiple of the world size.

    Raises:
        UserError: the streams do not divide over the ranks.
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
        if options.num_streams % world_size:
            raise UserError(
                f"config key 'data.num_streams' must be a multiple of the number of ranks, found "
                f"{options.num_streams} streams for {world_size} ranks; use data.num_streams="
                f"{-(-options.num_streams // world_size) * world_size} and batch sizes that are multiples of it"
            )
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self._spec = spec
        self._options = options
        self._rows_per_stream = global_batch_size // options.num_streams
        share = options.num_streams // world_size
        self._streams = range(rank * share, (rank + 1) * share)
        self._reader = SegmentReader(dataset.columns)

    def start(self) -> Position:
        """Return the position before the first row."""
        return Position(0, (0,) * self._options.num_streams)

    def steps_left(self, position: Position, num_epochs: int) -> int:
        """Return how many batches lie between a position and the end of the epochs, on every rank alike."""
        if position.epoch >= num_epochs:
            return 0
        left = max(n - done for n, done in zip(self._stream_rows(), position.consumed, strict=True))
        return self._steps(left) + (num_epochs - position.epoch - 1) * self._steps(max(self._stream_rows()))

    def batches(self, position: Position | None = None, num_epochs: int = 1) -> Generator[Batch, None, None]:
        """Yield the batches from a position to the end of the epochs.

        Close the iterator, or exhaust it, to end its threads.

        Raises:
            UserError: data that cannot be read or do not fit; it comes out of `next`, in the caller's thread.
        """
        position = position or self.start()
        if self._options.num_threads == 0:
            yield from self._produce(position, num_epochs, self._read_now)
            return
        pool = ThreadPoolExecutor(self._options.num_threads, "decode")
        batches = self._produce(position, num_epochs, lambda window: pool.submit(self._read, window))
        ahead = _ReadAhead(batches, self._options.prefetch_batches, self._options.pin_device)
        try:
            yield from ahead
        finally:
            # The pool first, so that nobody waits for windows that nobody needs any more.
            pool.shutdown(wait=False, cancel_futures=True)
            ahead.close()
            pool.shutdown()

    def _stream_rows(self) -> list[int]:
        return self._order(0).stream_rows()

    def _steps(self, rows: int) -> int:
        return -(-rows // self._rows_per_stream)

    def _order(self, epoch: int) -> EpochOrder:
        options = self._options
        return EpochOrder(
            self.dataset.row_groups,
            options.seed,
            epoch,
            options.shuffle,
            options.num_streams,
            options.window_bytes,
        )

    def _produce(self, position: Position, num_epochs: int, source: WindowSource) -> Iterator[Batch]:
        while position.epoch < num_epochs:
            order = self._order(position.epoch)
            stream_rows = order.stream_rows()
            readers = [
                _StreamReader(order.windows(stream), position.consumed[stream], source) for stream in self._streams
            ]
            while position.epoch == order.epoch:
                pieces = [
                    piece
                    for i, reader in enumerate(readers)
                    for piece in reader.take(self._rows_per_stream, at=i * self._rows_per_stream)
                ]
                position = self._advance(position, stream_rows)
                yield collate(pieces, len(readers) * self._rows_per_stream, self._spec, position)

    def _advance(self, position: Position, stream_rows: list[int]) -> Position:
        step = self._rows_per_stream
        consumed = tuple(min(done + step, rows) for done, rows in zip(position.consumed, stream_rows, strict=True))
        if consumed == tuple(stream_rows):
            return Position(position.epoch + 1, (0,) * len(consumed), position.rows_before + sum(consumed))
        return Position(position.epoch, consumed, position.rows_before)

    def _read(self, window: Window) -> Columns:
        tables = [self._reader.read(segment) for segment in window.segments]
        permutation = window.permutation()
        try:
            table = pa.concat_tables(tables, promote_options="permissive")
            if permutation is not None:
                table = table.take(pa.array(permutation))
            return convert(table, self._spec)
        except (UserError, pa.ArrowException) as error:
            files = sorted({segment.path for segment in window.segments})
            raise UserError(f"{error} (in {', '.join(files[:3])}{' …' if len(files) > 3 else ''})") from error

    def _read_now(self, window: Window) -> "Future[Columns]":
        future: Future[Columns] = Future()
        future.set_result(self._read(window))
        return future


class _StreamReader:
    """Takes rows of one stream, window after window, with the next window on its way."""

    def __init__(self, windows: list[Window], consumed: int, source: WindowSource) -> None:
        left = [window for window in windows if window.start + window.num_rows > consumed]
        self._row = consumed - left[0].start if left else 0  # the next row of the current window
        self._windows = iter(left)
        self._source = source
        self._current = self._request()
        self._next = self._request()

    def take(self, rows: int, at: int) -> Iterator[Piece]:
        """Yield pieces of up to `rows` rows in all, for the rows of a batch from `at` on."""
        while rows and self._current is not None:
            columns = self._current.result()
            stop = min(self._row + rows, columns.num_rows)
            yield Piece(columns, self._row, stop, at)
            rows, at, self._row = rows - (stop - self._row), at + stop - self._row, stop
            if stop == columns.num_rows:
                self._current, self._next, self._row = self._next, self._request(), 0

    def _request(self) -> "Future[Columns] | None":
        window = next(self._windows, None)
        return None if window is None else self._source(window)


class _ReadAhead:
    """Runs an iterator of batches in a thread, up to `depth` batches ahead."""

    def __init__(self, batches: Iterator[Batch], depth: int, pin_device: torch.device | None) -> None:
        self._batches = batches
        self._pin_device = pin_device
        self._queue: queue.Queue[Batch | Exception | None] = queue.Queue(max(1, depth))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

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
                self._queue.put(batch.pin_memory() if self._pin_device is not None else batch)
                if self._stopped.is_set():
                    return
            self._queue.put(None)
        except Exception as error:
            self._queue.put(error)
