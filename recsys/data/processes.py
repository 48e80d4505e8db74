"""Decoding of windows in separate processes, which leave this process's Python lock to the thread that trains.

Each operator of training releases the lock for a moment. With a dozen decoding threads in the same process, training,
and with it the GPU, would then wait for one of them some hundred times a step. One process is started; it imports and
forks the others. Decoded windows are not copied: they lie in memory that both sides map.
"""

import gc
import logging
import logging.handlers
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from recsys.data.channel import LOST, Channel, pack
from recsys.data.dataset import Dataset
from recsys.data.decode import CACHED_ROW_GROUPS, SegmentReader
from recsys.data.order import Window
from recsys.data.pool import BlockPool
from recsys.data.spec import BatchSpec
from recsys.data.window import Columns, load_window
from recsys.errors import UserError
from recsys.ids import IdStatistics
from recsys.runtime.environment import keep_freed_memory, process_bytes
from recsys.runtime.launch import environment_of_one_process
from recsys.runtime.logs import logger
from recsys.runtime.loops import are_worth_compiling, compile_loops

# Signals are ignored from the start, since importing takes seconds and a launcher or terminal may signal all processes;
# decoding processes end when training does. Modules are not imported from the working directory.
_PROGRAM = """
import signal, sys
sys.path[:] = filter(None, sys.path)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
from recsys.data.processes import serve
serve()
"""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # also because forking needs a single thread
_MOST_FILES = 1 << 16
_ENDING_S = 10  # granted to windows that are being decoded
_LOOK_S = 1  # between two readings of a process's memory, each of which takes some milliseconds


class _Work(NamedTuple):
    """The first message to a decoding process: the data, the columns, and for each id feature whether to count ids."""

    dataset: Dataset
    spec: BatchSpec
    counted: list[bool]
    skip_bad: bool


class _Answer(NamedTuple):
    """A decoded window, or the error of decoding it.

    Attributes:
        counts: for each counted feature, a state for `IdStatistics.add_state`. records: of the log.
        window_bytes: memory of the process for windows. own_bytes: its memory without the windows that it has sent.
    """

    columns: Columns | None
    error: Exception | None
    counts: list[np.ndarray]
    records: list[logging.LogRecord]
    window_bytes: int
    own_bytes: int


class DecodingProcesses:
    """Processes that decode windows; `read` uses an idle one, or waits for one.

    Args:
        number: of processes. beside_gpu: whether training uses a GPU, so that freed memory may be kept.
    """

    def __init__(self, number: int, dataset: Dataset, spec: BatchSpec, skip_bad: bool, beside_gpu: bool) -> None:
        _allow_files()
        self._statistics = [part.statistics for part in spec.ids if part.statistics is not None]
        work = _Work(dataset, spec.uncounted(), [part.statistics is not None for part in spec.ids], skip_bad)
        self._pool, pairs = BlockPool(share=True), [socket.socketpair() for _ in range(number)]
        files = [str(theirs.fileno()) for _, theirs in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(int(beside_gpu)), *files],
            env=environment_of_one_process() | _ONE_THREAD,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno() for _, theirs in pairs],
            start_new_session=True,
        )
        self._channels, self._idle = [Channel(ours) for ours, _ in pairs], queue.SimpleQueue[Channel]()
        self._sizes, self._forking_bytes = dict[Channel, tuple[int, int]](), 0
        for _, theirs in pairs:
            theirs.close()
        try:
            parcel = pack(work, self._pool)
            for channel in self._channels:
                channel.send(parcel, self._pool)
                self._idle.put(channel)
        except LOST as error:
            self.end()
            self.close()
            raise _ended() from error

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of memory for windows, and for everything else in the processes."""
        self._forking_bytes = process_bytes("smaps_rollup", "Pss_Anon", self._process.pid) or self._forking_bytes
        sizes = list(self._sizes.values())
        own_bytes = sum(own for _, own in sizes) + self._forking_bytes + self._pool.num_bytes
        return sum(windows for windows, _ in sizes), own_bytes

    def read(self, window: Window, counts: bool) -> Columns:
        """Return a decoded window. Errors are those of `load_window`; `counts`: count its ids in the statistics."""
        channel = self._idle.get()
        try:
            channel.send(pack((window, counts), self._pool), self._pool)
            answer: _Answer = channel.receive()
        except LOST as error:
            raise _ended() from error
        finally:
            self._idle.put(channel)
        self._sizes[channel] = answer.window_bytes, answer.own_bytes
        for record in answer.records:
            logger.handle(record)
        for statistics, state in zip(self._statistics, answer.counts, strict=True):
            statistics.add_state(state)
        if answer.error is not None:
            raise answer.error
        assert answer.columns is not None
        return answer.columns

    def end(self) -> None:
        """End the processes; threads that wait for one get an error. Decoded windows stay valid."""
        self.sizes()  # measured once more, so that it can be reported afterwards
        for channel in self._channels:
            channel.end()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:  # one of them waits for a file system
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close files and unmap memory; call it after `end`, when no thread reads any more."""
        for channel in self._channels:
            channel.close()


def _allow_files() -> None:
    """Let this process open more files, because each block of shared memory is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _ended() -> UserError:
    return UserError(
        "a process that decodes data.train has died, perhaps because memory ran out; lower data.num_threads, or set "
        "data.processes=false"
    )


def serve() -> None:
    """Run the process that forks the decoding processes; its arguments: whether a GPU is used, and their sockets."""
    beside_gpu, *files = map(int, sys.argv[1:])
    _allow_files()
    if beside_gpu:
        keep_freed_memory()
    if are_worth_compiling(len(files), True):
        compile_loops()
    gc.collect()
    gc.freeze()
    for file in files:
        if os.fork() == 0:
            try:
                for other in files:
                    if other != file:
                        os.close(other)
                _serve(Channel(socket.socket(fileno=file)))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
    for file in files:
        os.close(file)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(channel: Channel) -> None:
    """Decode requested windows until the other side ends."""
    torch.set_num_threads(1)
    pool = BlockPool(share=True)
    with suppress(*LOST):
        decoder = _Decoder(channel.receive())
        while True:
            window, counts = channel.receive()
            parcel = pack(decoder.answer(window, counts, pool.num_bytes), pool)
            channel.send(parcel, pool)
            del parcel


class _Decoder:
    """Decodes one window after another, and keeps none of them."""

    def __init__(self, work: _Work) -> None:
        # Keeping a row group for its other segments seldom helps: other processes are likely to be asked for those.
        kept = CACHED_ROW_GROUPS if len(work.dataset.row_groups) <= CACHED_ROW_GROUPS else 0
        self._work, self._reader, self._arrays = work, SegmentReader(work.dataset, kept=kept), BlockPool()
        statistics = [IdStatistics(passes_on=True) if counted else None for counted in work.counted]
        ids = [replace(column, statistics=s) for column, s in zip(work.spec.ids, statistics, strict=True)]
        self._counting = replace(work.spec, ids=ids)
        self._statistics = [s for s in statistics if s is not None]
        self._log = _Records()
        logger.addHandler(self._log)
        logger.propagate = False
        self._own_bytes, self._looked_at = 0, 0.0

    def answer(self, window: Window, counts: bool, shared_bytes: int) -> _Answer:
        """Return a decoded window. `counts`: count its ids for the statistics; `shared_bytes`: size of sent windows."""
        columns, error = None, None
        try:
            spec = self._counting if counts else self._work.spec
            columns = load_window(window, self._reader.read, spec, self._arrays, self._work.skip_bad)
        except Exception as wrong:
            error = wrong if isinstance(wrong, UserError | MemoryError) else RuntimeError(traceback.format_exc())
        states = [statistics.take_state() for statistics in self._statistics]
        if time.monotonic() - self._looked_at > _LOOK_S:
            # Pss counts only a share of the pages that are shared with the forking process.
            self._own_bytes, self._looked_at = process_bytes("smaps_rollup", "Pss_Anon") or 0, time.monotonic()
        window_bytes = shared_bytes + self._arrays.num_bytes
        return _Answer(columns, error, states, self._log.take(), window_bytes, self._own_bytes)


class _Records(logging.handlers.QueueHandler):
    """Collects log records, in a form that can be pickled."""

    def __init__(self) -> None:
        self._records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        super().__init__(self._records)

    def take(self) -> list[logging.LogRecord]:
        """Return the records since the last call."""
        return [self._records.get() for _ in range(self._records.qsize())]
