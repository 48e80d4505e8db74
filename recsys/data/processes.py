"""Windows decoded by processes of their own, which leave this process's Python lock to the thread that trains.

Each operator that trains lets go of the lock for a moment; with a dozen threads that decode beside it, it then waits
for one of them, some hundred times a step, and the GPU with it. One process is started, imports and forks the others.
What they have decoded stays where it is, in memory that both map.
"""

import gc
import logging
import logging.handlers
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from recsys.data.dataset import Dataset
from recsys.data.decode import CACHED_ROW_GROUPS, SegmentReader
from recsys.data.order import Window
from recsys.data.pool import Block, BlockPool, padded
from recsys.data.spec import BatchSpec
from recsys.data.window import Columns, load_window
from recsys.errors import UserError
from recsys.ids import IdStatistics
from recsys.runtime.environment import keep_freed_memory, process_bytes
from recsys.runtime.launch import environment_of_one_process
from recsys.runtime.loops import compile_loops

logger = logging.getLogger("recsys")
_PROGRAM = "from recsys.data.processes import serve; serve()"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # also since it is to fork
_ENDING_S = 10  # for windows that are being decoded
_LOOK_S = 1  # from one look at its memory to the next, which takes some milliseconds
# A launcher, or a terminal, may send these to all processes: those that decode end when the one that trains does.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Parcel(NamedTuple):
    """A value on its way: its pickle, whose arrays lie between these bounds of a block, if it has any."""

    content: bytes
    bounds: list[tuple[int, int]]
    block: Block | None


def _pack(value: Any, pool: BlockPool) -> _Parcel:
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [np.asarray(buffer.raw()) for buffer in buffers]
    if not arrays:
        return _Parcel(content, [], None)
    block, bounds, start = pool.take(sum(padded(array.nbytes) for array in arrays)), [], 0
    for array in arrays:
        np.copyto(block.array((array.nbytes,), np.uint8), array)
        bounds.append((start, start + array.nbytes))
        start += padded(array.nbytes)
    return _Parcel(content, bounds, block)


class _Channel:
    """One end of what two processes tell each other. Arrays are not copied: the other side maps their memory."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._connection = connected, Connection(os.dup(connected.fileno()))
        self._number = 0
        self._sent: dict[int, Block | None] = {}  # what the other side has not given back, by number
        self._mapped: dict[int, mmap.mmap] = {}  # its memory, by inode
        self._let_go: deque[int] = deque()  # numbers of what came from there and nobody holds any more

    def send(self, parcel: _Parcel, pool: BlockPool) -> None:
        """Send what has been packed in memory of a pool, which is not used again before the other side lets go."""
        self._number += 1
        self._sent[self._number] = block = parcel.block
        let_go = [self._let_go.popleft() for _ in range(len(self._let_go))]
        has_file = block is not None and block.file is not None
        self._connection.send((self._number, parcel.content, parcel.bounds, has_file, pool.inodes(), let_go))
        if has_file:
            assert block is not None and block.file is not None
            socket.send_fds(self._socket, [b"f"], [block.file])

    def receive(self) -> Any:
        """Return the next value; EOFError: the other side has ended."""
        number, content, bounds, has_file, inodes, let_go = self._connection.recv()
        for each in let_go:
            self._sent.pop(each, None)
        for inode in self._mapped.keys() - set(inodes):
            del self._mapped[inode]
        if not has_file:
            self._let_go.append(number)
            return pickle.loads(content)
        # All arrays refer to this one, which is new each time.
        memory = np.frombuffer(self._map(socket.recv_fds(self._socket, 1, 1)[1][0]), np.uint8)
        weakref.finalize(memory, self._let_go.append, number).atexit = False
        return pickle.loads(content, buffers=[memory[start:stop] for start, stop in bounds])

    def _map(self, file: int) -> mmap.mmap:
        try:
            inode = os.fstat(file).st_ino
            if inode not in self._mapped:
                self._mapped[inode] = mmap.mmap(file, 0)
            return self._mapped[inode]
        finally:
            os.close(file)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits here, or there, goes on
        self._connection.close()
        self._socket.close()


class _Work(NamedTuple):
    """What a process that decodes is told at first: what to read, which of the features' ids to count, and how."""

    dataset: Dataset
    spec: BatchSpec
    counted: list[bool]
    skip_bad: bool


class _Answer(NamedTuple):
    """A window, or what is wrong with it.

    Attributes:
        counts: for each feature that is counted, what `IdStatistics.add_state` takes. records: of the log.
        window_bytes: of the memory that the process has for windows. own_bytes: beside the windows that it has sent.
    """

    columns: Columns | None
    error: Exception | None
    counts: list[np.ndarray]
    records: list[logging.LogRecord]
    window_bytes: int
    own_bytes: int


class DecodingProcesses:
    """Processes that decode windows; a thread that asks takes one that is idle, or waits for one.

    Args:
        number: of processes. beside_gpu: whether memory that was used once may be kept.
    """

    def __init__(self, number: int, dataset: Dataset, spec: BatchSpec, skip_bad: bool, beside_gpu: bool) -> None:
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
        self._channels, self._idle = [_Channel(ours) for ours, _ in pairs], queue.SimpleQueue[_Channel]()
        self._sizes, self._forking_bytes = dict[_Channel, tuple[int, int]](), 0
        for _, theirs in pairs:
            theirs.close()
        try:
            parcel = _pack(work, self._pool)
            for channel in self._channels:
                channel.send(parcel, self._pool)
                self._idle.put(channel)
        except OSError as error:
            self.close()
            raise _ended() from error

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the memory for windows, and of what the processes take beside those of them sent here."""
        self._forking_bytes = process_bytes("smaps_rollup", "Pss_Anon", self._process.pid) or self._forking_bytes
        sizes = list(self._sizes.values())
        return sum(windows for windows, _ in sizes), sum((own for _, own in sizes), self._forking_bytes)

    def read(self, window: Window, counts: bool) -> Columns:
        """Return a window, decoded; `counts`: its ids go into the statistics. Errors as of `load_window`."""
        channel = self._idle.get()
        try:
            channel.send(_pack((window, counts), self._pool), self._pool)
            answer: _Answer = channel.receive()
        except (EOFError, OSError) as error:
            raise _ended() from error
        finally:
            self._idle.put(channel)
        self._sizes[channel] = answer.window_bytes, answer.own_bytes
        for record in answer.records:
            logger.handle(record)
        for statistics, state in zip(self._statistics, answer.counts, strict=False):
            statistics.add_state(state)
        if answer.error is not None:
            raise answer.error
        assert answer.columns is not None
        return answer.columns

    def close(self) -> None:
        """End the processes; who still waits for one gets an error. What has been decoded stays where it is."""
        self.sizes()  # to be told afterwards
        for channel in self._channels:
            channel.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:  # one of them waits for a file system
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _ended() -> UserError:
    return UserError(
        "a process that decodes data.train has ended, as where memory has run out; lower data.num_threads, or set "
        "data.processes=false"
    )


def serve() -> None:
    """Be the process that forks those that decode; its arguments are whether a GPU is used, and their sockets."""
    for each in _IGNORED:
        signal.signal(each, signal.SIG_IGN)
    beside_gpu, *files = map(int, sys.argv[1:])
    if beside_gpu:
        keep_freed_memory()
    compile_loops()
    gc.collect()
    gc.freeze()
    for file in files:
        if os.fork() == 0:
            try:
                for other in files:
                    if other != file:
                        os.close(other)
                _serve(_Channel(socket.socket(fileno=file)))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
    for file in files:
        os.close(file)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(channel: _Channel) -> None:
    """Decode what is asked for, until the other side ends."""
    torch.set_num_threads(1)
    pool = BlockPool(share=True)
    with suppress(EOFError, OSError):
        decoder = _Decoder(channel.receive())
        while True:
            window, counts = channel.receive()
            parcel = _pack(decoder.answer(window, counts, pool.num_bytes), pool)
            channel.send(parcel, pool)
            del parcel


class _Decoder:
    """Decodes one window after another; of one that has been packed, nothing stays."""

    def __init__(self, work: _Work) -> None:
        # What one process keeps of a row group that is read in parts, another is likely to be asked for.
        kept = CACHED_ROW_GROUPS if len(work.dataset.row_groups) <= CACHED_ROW_GROUPS else 0
        self._work, self._reader, self._arrays = work, SegmentReader(work.dataset, kept=kept), BlockPool()
        counted = [IdStatistics(passes_on=True) if counted else None for counted in work.counted]
        ids = [replace(part, statistics=each) for part, each in zip(work.spec.ids, counted, strict=True)]
        self._counting = replace(work.spec, ids=ids)
        self._statistics = [each for each in counted if each is not None]
        self._log = _Records()
        logger.addHandler(self._log)
        logger.propagate = False
        self._own_bytes, self._looked_at = 0, 0.0

    def answer(self, window: Window, counts: bool, shared_bytes: int) -> _Answer:
        """Return a window; `counts`: its ids go into the statistics; `shared_bytes`: of windows that were sent."""
        columns, error = None, None
        try:
            spec = self._counting if counts else self._work.spec
            columns = load_window(window, self._reader.read, spec, self._arrays, self._work.skip_bad)
        except Exception as wrong:
            error = wrong if isinstance(wrong, UserError | MemoryError) else RuntimeError(traceback.format_exc())
        states = [each.take_state() for each in self._statistics]
        if time.monotonic() - self._looked_at > _LOOK_S:
            # Of pages shared with the process that forked this one, each has its share.
            self._own_bytes, self._looked_at = process_bytes("smaps_rollup", "Pss_Anon") or 0, time.monotonic()
        window_bytes = shared_bytes + self._arrays.num_bytes
        return _Answer(columns, error, states, self._log.take(), window_bytes, self._own_bytes)


class _Records(logging.handlers.QueueHandler):
    """Keeps what is logged, in a form that can be sent."""

    def __init__(self) -> None:
        self._kept: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        super().__init__(self._kept)

    def take(self) -> list[logging.LogRecord]:
        """Return what has been kept since the last call."""
        return [self._kept.get() for _ in range(self._kept.qsize())]
