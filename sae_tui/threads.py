"""Runs calls that may never return, for example to a driver or a hung disk, in separate threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

SLOW_AFTER_S = 2.0
THREAD_NAME = "may-hang"
T = TypeVar("T")


def on_thread(call: Callable[[], T]) -> Future[T]:
    """Start `call`, which may never return, on a new thread; return a future for its result."""
    from concurrent.futures import Future

    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return answer


def is_stuck() -> bool:
    """Return whether a call started by `on_thread` is running; if so, only `os._exit` reliably ends the process."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


@contextlib.contextmanager
def warn_when_slow(warn: Callable[[], None]) -> Iterator[None]:
    """Call `warn` on a thread if the context lasts longer than `SLOW_AFTER_S`."""
    timer = threading.Timer(SLOW_AFTER_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
