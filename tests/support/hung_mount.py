"""A file system that never responds. As with a hung GPU, a process that reads a file on it cannot be killed."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_INIT, _LAZILY = 26, 2
_REQUEST, _REPLY, _INITIALISED = "<IIQQIII", "<IiQ", "<IIIIHHII36x"
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def hung_mount(folder: Path) -> Iterator[threading.Event]:
    """Mount the file system at a new folder; yield an event that is set once a process is waiting. Unmounting ends the
    wait.

    The waiting process is in state D, so signals do not interrupt it. If mounting is not possible, the test is skipped.
    """
    folder.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error}")
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if _LIBC.mount(b"hung", os.fsencode(folder), b"fuse", 0, options):
        os.close(device)
        pytest.skip(f"this process cannot mount a file system: {os.strerror(ctypes.get_errno())}")
    asked = threading.Event()
    threading.Thread(target=_read_requests, args=(device, asked), daemon=True).start()
    try:
        yield asked
    finally:
        _LIBC.umount2(os.fsencode(folder), 1 | _LAZILY)


def _read_requests(device: int, asked: threading.Event) -> None:
    """Respond only to the kernel's init request, until the file system is unmounted."""
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            break
        _, kind, unique, *_ = struct.unpack_from(_REQUEST, request)
        if kind == _INIT:
            answer = struct.pack(_INITIALISED, 7, 31, 0, 0, 0, 0, 1 << 16, 0)
            os.write(device, struct.pack(_REPLY, 16 + len(answer), 0, unique) + answer)
        else:
            asked.set()
    os.close(device)
