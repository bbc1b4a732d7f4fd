"""A limit on how long a program of others may run in this process, in any thread."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator


class TookTooLong(BaseException):
    """What ran has not ended in time; not an `Exception`, which it might catch itself."""


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End the body with `TookTooLong` after so many seconds, at the next instruction of Python.

    A signal could do that in the main thread alone. A single call of C is not interrupted.
    """
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # Once this is held, no exception comes any more.
        with lock:
            is_over = True
