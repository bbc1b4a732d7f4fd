"""Connects the ranks on one machine; the first rank creates memory that all ranks share."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from torch.distributed import Store

from trainer.parallel.group import PeerLost

# The prefix of the first rank's socket name; it is followed by a random number. The socket is abstract (outside the
# file system), so that killed ranks leave no file behind.
DOOR, NUMBER_BYTES, INDEX_BYTES = "\0sae-ranks-", 16, 4
ENDED = "the connection to another rank was lost (its process has ended)"
# The time to poll before sleeping, in seconds. Polling usually suffices, because ranks tend to be equally fast.
AWAKE_S = 500e-6


class ProcessBarrier:
    """A barrier for processes: each one sends a byte to the first rank, which replies once all bytes have arrived.

    If there are only two ranks, the first one need not wait before it replies.
    """

    def __init__(self, connections: list[socket.socket], timeout_s: float, *, is_first: bool) -> None:
        self._connections, self._timeout_s, self._is_first = connections, timeout_s, is_first
        for connection in connections:
            connection.setblocking(False)

    def meet(self) -> None:
        """Wait until all ranks arrive; raise `PeerLost` if a rank has exited or does not arrive in time."""
        with losing_peers():
            if self._is_first and len(self._connections) > 1:
                self._hear()
                self._tell()
            else:
                self._tell()
                self._hear()

    def send_to_first(self, content: memoryview) -> None:
        """Send bytes to the first rank, which must call `receive_from` before its next `meet`."""
        with self._patient(self._connections[0]) as connection:
            connection.sendall(content)

    def receive_from(self, rank: int, into: memoryview) -> None:
        """On the first rank, fill `into` with the next bytes from `rank`; it must send the same number of bytes."""
        with self._patient(self._connections[rank - 1]) as connection:
            while into:
                n_bytes = connection.recv_into(into)
                if not n_bytes:
                    raise PeerLost(ENDED)
                into = into[n_bytes:]

    @contextlib.contextmanager
    def _patient(self, connection: socket.socket) -> Iterator[socket.socket]:
        connection.settimeout(self._timeout_s)
        with losing_peers():
            yield connection
        connection.setblocking(False)

    def _tell(self) -> None:
        for connection in self._connections:
            try:
                connection.send(b".")
            except BlockingIOError:
                # The send buffer is still full of data from `send_to_first`.
                with self._patient(connection):
                    connection.sendall(b".")

    def _hear(self) -> None:
        for connection in self._connections:
            if not self._byte_of(connection):
                raise PeerLost(ENDED)

    def _byte_of(self, connection: socket.socket) -> bytes:
        """Receive a byte; poll before sleeping, because waking up a sleeping process takes 50 µs."""
        until = time.perf_counter() + AWAKE_S
        while time.perf_counter() < until:
            with contextlib.suppress(BlockingIOError):
                return connection.recv(1)
            os.sched_yield()
        # `select.select` fails for descriptors above 1,023, which occur because each shard keeps a file open.
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(1000 * self._timeout_s):
            raise PeerLost(f"another rank did not respond within {self._timeout_s:,.0f} s")
        return connection.recv(1)


def join(
    store: Store, size: int, index: int, n_bytes: int, timeout_s: float
) -> tuple[ProcessBarrier, mmap.mmap] | None:
    """Return a barrier for `size` ranks and `n_bytes` of shared memory.

    Return None if a rank is on another machine or the memory cannot be created. The ranks find each other through
    `store`; no other code may use this store.
    """
    if index == 0:
        return _open_line(store, size, n_bytes, timeout_s)
    return _join_line(store, size, index, timeout_s)


def _open_line(store: Store, size: int, n_bytes: int, timeout_s: float) -> tuple[ProcessBarrier, mmap.mmap] | None:
    """On the first rank, create the barrier and the memory, which has no name and is freed when the ranks exit."""
    with contextlib.ExitStack() as stack:
        door, number = stack.enter_context(socket.socket(socket.AF_UNIX)), secrets.token_hex(NUMBER_BYTES)
        memory = _make_memory(door, DOOR + number, n_bytes, stack)
        connecting = stack.enter_context(_letting_in(door, size - 1))
        store.set("number", number)
        if not _all_are_here(store, size, 0, memory is not None) or memory is None:
            return None
        with losing_peers():
            connections = sorted(connecting.result(timeout_s), key=_index_of)
            for connection in connections:
                socket.send_fds(connection, [b"."], [memory.fileno()])
        return ProcessBarrier(connections, timeout_s, is_first=True), mmap.mmap(memory.fileno(), 0)


def _make_memory(door: socket.socket, name: str, n_bytes: int, stack: contextlib.ExitStack) -> BinaryIO | None:
    """Bind the socket and return the shared memory, or None if the system refuses the socket or the memory."""
    try:
        door.bind(name)
        door.listen()
        memory = stack.enter_context(os.fdopen(os.memfd_create("ranks"), "r+b"))
        memory.truncate(n_bytes)
    except OSError:
        return None
    return memory


@contextlib.contextmanager
def _letting_in(door: socket.socket, n_others: int) -> Iterator[Future[list[socket.socket]]]:
    """Accept connections from `n_others` ranks in the background, and yield a future for them.

    Accepting must start before all ranks are ready, because connections from other users could fill the socket's queue.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="door") as porter:
        try:
            yield porter.submit(_accept_all, door, n_others)
        finally:
            # Shutting down the socket stops the wait for missing ranks.
            door.shutdown(socket.SHUT_RDWR)


def _accept_all(door: socket.socket, n_others: int) -> list[socket.socket]:
    """Accept connections until all other ranks are connected; close connections from other users."""
    connections: list[socket.socket] = []
    while len(connections) < n_others:
        connection, _ = door.accept()
        if _is_of_this_user(connection):
            connections.append(connection)
        else:
            connection.close()
    return connections


def _index_of(connection: socket.socket) -> int:
    """Receive the index of the rank at the other end of a connection; each rank sends its index first."""
    return int.from_bytes(connection.recv(INDEX_BYTES))


def _join_line(store: Store, size: int, index: int, timeout_s: float) -> tuple[ProcessBarrier, mmap.mmap] | None:
    """Connect to the first rank; return the barrier and the shared memory, or None if a rank cannot join."""
    number, connection = store.get("number").decode(), socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        _connect(connection, DOOR + number, timeout_s)
        is_here = _is_of_this_user(connection)
        connection.send(index.to_bytes(INDEX_BYTES))
    except OSError:
        # The first rank is on another machine.
        is_here = False
    if not _all_are_here(store, size, index, is_here):
        connection.close()
        return None
    with losing_peers():
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise ConnectionResetError("its process has ended")
    with os.fdopen(descriptors[0], "r+b") as memory:
        return ProcessBarrier([connection], timeout_s, is_first=False), mmap.mmap(memory.fileno(), 0)


def _connect(connection: socket.socket, name: str, timeout_s: float) -> None:
    """Connect to the socket with this name; raise `OSError` if there is no such socket."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return connection.connect(name)
        except BlockingIOError:
            # Connections from other users may fill the queue until the first rank closes them.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _is_of_this_user(connection: socket.socket) -> bool:
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


@contextlib.contextmanager
def losing_peers() -> Iterator[None]:
    """Convert connection errors to `PeerLost`."""
    try:
        yield
    except OSError as error:
        raise PeerLost(f"the connection to another rank was lost ({error})") from error


def _all_are_here(store: Store, size: int, index: int, is_here: bool) -> bool:
    """Return whether every rank can join; the result is the same on all ranks."""
    store.set(f"here {index}", str(is_here))
    return all([store.get(f"here {rank}") == b"True" for rank in range(size)])
