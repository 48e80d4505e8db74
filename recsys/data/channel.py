"""Messages between two processes of one machine; arrays in them lie in memory that both processes map."""

import errno
import mmap
import os
import pickle
import socket
import weakref
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from recsys.data.pool import Block, BlockPool, padded

LOST = EOFError, BrokenPipeError, ConnectionResetError  # raised when the other side has ended


class Parcel(NamedTuple):
    """A message: the pickle of a value, and the bounds of its arrays in a block, if there are any."""

    content: bytes
    bounds: list[tuple[int, int]]
    block: Block | None


def pack(value: Any, pool: BlockPool) -> Parcel:
    """Return a value as a parcel; its arrays are copied into a block of a shared pool."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [np.asarray(buffer.raw()) for buffer in buffers]
    if not arrays:
        return Parcel(content, [], None)
    block, bounds = pool.take(sum(padded(array.nbytes) for array in arrays)), []
    for array in arrays:
        start = len(block.used)
        np.copyto(block.array((array.nbytes,), np.uint8), array)
        bounds.append((start, start + array.nbytes))
    return Parcel(content, bounds, block)


class Channel:
    """One end of a connection between two processes. Arrays are not copied: the receiver maps their memory."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._connection = connected, Connection(os.dup(connected.fileno()))
        self._number = 0
        self._sent: dict[int, Block | None] = {}  # blocks that the other side still uses, by number of the message
        self._mapped: dict[int, mmap.mmap] = {}  # memory of the other side, by inode
        self._released: deque[int] = deque()  # numbers of received messages whose arrays are gone

    def send(self, parcel: Parcel, pool: BlockPool) -> None:
        """Send a parcel packed in a pool; its block is not reused before the receiver has dropped its arrays."""
        self._number += 1
        self._sent[self._number] = parcel.block
        file = None if parcel.block is None else parcel.block.file
        released = [self._released.popleft() for _ in range(len(self._released))]
        self._connection.send((self._number, parcel.content, parcel.bounds, file is not None, pool.inodes(), released))
        if file is not None:
            socket.send_fds(self._socket, [b"f"], [file])

    def receive(self) -> Any:
        """Return the next value. Raises EOFError if the other side has ended."""
        number, content, bounds, has_file, inodes, released = self._connection.recv()
        for released_number in released:
            self._sent.pop(released_number, None)
        for inode in self._mapped.keys() - set(inodes):
            del self._mapped[inode]
        if not has_file:
            self._released.append(number)
            return pickle.loads(content)
        byte, files, *_ = socket.recv_fds(self._socket, 1, 1)
        if not files:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) if byte else EOFError
        # All arrays of the message are views of this one, which is made for each message.
        memory = np.frombuffer(self._map(files[0]), np.uint8)
        weakref.finalize(memory, self._released.append, number).atexit = False
        return pickle.loads(content, buffers=[memory[start:stop] for start, stop in bounds])

    def _map(self, file: int) -> mmap.mmap:
        try:
            inode = os.fstat(file).st_ino
            if inode not in self._mapped:
                self._mapped[inode] = mmap.mmap(file, 0)
            return self._mapped[inode]
        finally:
            os.close(file)

    def end(self) -> None:
        """End the connection; threads that wait on either side get an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close files and unmap memory; call it when no thread uses the channel any more."""
        self._connection.close()
        self._socket.close()
        self._sent.clear()
        self._mapped.clear()
