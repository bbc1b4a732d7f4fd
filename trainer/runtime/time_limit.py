"""Limits the run time of foreign code in this process, in any thread."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator


class TookTooLong(BaseException):
    """The code did not end in time. This is no `Exception`, since the code might catch that."""


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the body of the context after this time, at the next Python instruction.

    A call of C code is not interrupted. A signal would work only in the main thread.
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
        # Once `is_over` is set under the lock, the timer cannot raise the exception any more.
        with lock:
            is_over = True
