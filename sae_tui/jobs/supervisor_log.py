"""A supervisor's own log, and retries that log their errors."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from trainer.contract.errors import UserError


def note(text: str) -> None:
    """Write one line with the time to stderr; `logging` would cost a waiting supervisor 1 MB."""
    # The log may be on the full disk that the line reports.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()


_last = ""
# With a store that fails at once, all tries take a minute; with a locked store, where each try waits, six minutes.
STORE_TRIES = 60
STORE_PAUSE_S = 1.0

T = TypeVar("T")


@contextlib.contextmanager
def tolerate(action: str) -> Iterator[None]:
    """Log an error of the store and continue: a store that is locked, full or just replaced must not end a training.

    The caller tries again later.
    """
    try:
        yield
    except UserError as error:
        _note_once(f"{action}: {error}")


def _note_once(error: str) -> None:
    """Log an error, unless it repeats the last one: a waiting job would fill the disk with repetitions."""
    global _last
    previous, _last = _last, error
    if previous != _last:
        note(_last)


def retry(action: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it succeeds, and return its result.

    Errors of the store are logged, and the call is tried again for at least a minute; then the error is raised.
    """
    for _ in range(STORE_TRIES - 1):
        try:
            return attempt()
        except UserError as error:
            _note_once(f"{action}: {error}")
            time.sleep(STORE_PAUSE_S)
    return attempt()


@contextlib.contextmanager
def tolerate_disk(action: str) -> Iterator[None]:
    """Log that a disk is full or read-only, and continue without the write."""
    try:
        yield
    except OSError as error:
        note(f"{action}: {error}")
