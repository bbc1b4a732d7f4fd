"""Where ranks of one machine meet, and the memory that the first of them gives to the others."""

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

# The first rank is met under this and a random number: in no folder, so that nothing is left of ranks that are killed.
DOOR, NUMBER_BYTES, INDEX_BYTES = "\0sae-ranks-", 16, 4
ENDED = "the connection to another rank was lost (its process has ended)"
# Other ranks mostly are as fast as this one.
AWAKE_S = 500e-6


class Line:
    """Where processes meet, by way of the first: a byte from each, and one for each when all are there."""

    def __init__(self, connections: list[socket.socket], timeout_s: float, *, is_first: bool) -> None:
        self._connections, self._timeout_s, self._is_first = connections, timeout_s, is_first
        for connection in connections:
            connection.setblocking(False)

    def meet(self) -> None:
        """Until all are here; raises `PeerLost` where one has ended or does not come in time."""
        with losing_peers():
            if self._is_first:
                self._hear()
                self._tell()
            else:
                self._tell()
                self._hear()

    def send_to_first(self, content: memoryview) -> None:
        """Between two meetings; for `receive_from` by the first."""
        with self._patient(self._connections[0]) as connection:
            connection.sendall(content)

    def receive_from(self, rank: int, into: memoryview) -> None:
        """By the first: the next of what this one sends, which is as long."""
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
                # What was sent to the first is still on its way.
                with self._patient(connection):
                    connection.sendall(b".")

    def _hear(self) -> None:
        for connection in self._connections:
            if not self._byte_of(connection):
                raise PeerLost(ENDED)

    def _byte_of(self, connection: socket.socket) -> bytes:
        """Ask again and again at first: who sleeps is woken 50 µs late."""
        until = time.perf_counter() + AWAKE_S
        while time.perf_counter() < until:
            with contextlib.suppress(BlockingIOError):
                return connection.recv(1)
            os.sched_yield()
        # Not by select, which knows no descriptor above 1,023: shards take one each.
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(1000 * self._timeout_s):
            raise PeerLost(f"another rank did not answer within {self._timeout_s:,.0f} s")
        return connection.recv(1)


def joined(store: Store, size: int, index: int, n_bytes: int, timeout_s: float) -> tuple[Line, mmap.mmap] | None:
    """A line of so many ranks and so much memory of all; None where one of them is elsewhere or has no room.

    They find each other by a store that nobody else writes to.
    """
    if index == 0:
        return _opened(store, size, n_bytes, timeout_s)
    return _joined(store, size, index, timeout_s)


def _opened(store: Store, size: int, n_bytes: int, timeout_s: float) -> tuple[Line, mmap.mmap] | None:
    """By the first rank. The memory has no name, so nothing is left of it."""
    with contextlib.ExitStack() as stack:
        door, number = stack.enter_context(socket.socket(socket.AF_UNIX)), secrets.token_hex(NUMBER_BYTES)
        memory = _prepared(door, DOOR + number, n_bytes, stack)
        connecting = stack.enter_context(_letting_in(door, size - 1))
        store.set("number", number)
        if not _all_are_here(store, size, 0, memory is not None) or memory is None:
            return None
        with losing_peers():
            connections = sorted(connecting.result(timeout_s), key=_index_of)
            for connection in connections:
                socket.send_fds(connection, [b"."], [memory.fileno()])
        return Line(connections, timeout_s, is_first=True), mmap.mmap(memory.fileno(), 0)


def _prepared(door: socket.socket, name: str, n_bytes: int, stack: contextlib.ExitStack) -> BinaryIO | None:
    """The memory; None where this machine has no room for it."""
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
    """The connections of so many ranks, which are let in meanwhile: strangers would fill the queue in front of them."""
    with ThreadPoolExecutor(1, thread_name_prefix="door") as porter:
        try:
            yield porter.submit(_all_connected, door, n_others)
        finally:
            # Ends the wait for those who do not come.
            door.shutdown(socket.SHUT_RDWR)


def _all_connected(door: socket.socket, n_others: int) -> list[socket.socket]:
    """Those of the other ranks; anybody on this machine may knock."""
    found: list[socket.socket] = []
    while len(found) < n_others:
        connection, _ = door.accept()
        if _is_of_this_user(connection):
            found.append(connection)
        else:
            connection.close()
    return found


def _index_of(connection: socket.socket) -> int:
    """Which rank it is of, as that says first."""
    return int.from_bytes(connection.recv(INDEX_BYTES))


def _joined(store: Store, size: int, index: int, timeout_s: float) -> tuple[Line, mmap.mmap] | None:
    number, connection = store.get("number").decode(), socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        _connect(connection, DOOR + number, timeout_s)
        is_here = _is_of_this_user(connection)
        connection.send(index.to_bytes(INDEX_BYTES))
    except OSError:
        # Of another machine.
        is_here = False
    if not _all_are_here(store, size, index, is_here):
        connection.close()
        return None
    with losing_peers():
        _, given, _, _ = socket.recv_fds(connection, 1, 1)
        if not given:
            raise ConnectionResetError("its process has ended")
    with os.fdopen(given[0], "r+b") as memory:
        return Line([connection], timeout_s, is_first=False), mmap.mmap(memory.fileno(), 0)


def _connect(connection: socket.socket, name: str, timeout_s: float) -> None:
    """Raise `OSError` where nobody is behind that door."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return connection.connect(name)
        except BlockingIOError:
            # Strangers stand in the queue, which the first rank sends away.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _is_of_this_user(connection: socket.socket) -> bool:
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


@contextlib.contextmanager
def losing_peers() -> Iterator[None]:
    """Tell a failed connection as the loss of a peer."""
    try:
        yield
    except OSError as error:
        raise PeerLost(f"the connection to another rank was lost ({error})") from error


def _all_are_here(store: Store, size: int, index: int, is_here: bool) -> bool:
    """Whether each of them can do it, as all of them learn."""
    store.set(f"here {index}", str(is_here))
    return all([store.get(f"here {rank}") == b"True" for rank in range(size)])
