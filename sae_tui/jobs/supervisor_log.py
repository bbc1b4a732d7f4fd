"""A supervisor's own log, and retries whose errors are logged."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from trainer.contract.errors import UserError


def note(text: str) -> None:
    """Write one line with the time to stderr; `logging` would cost a waiting supervisor 1 MB."""
    # The log itself may be on the full disk that the line reports.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()


_last = ""
# If the store fails immediately, all attempts take a minute; if it is locked, so that each attempt waits, they take
# six.
STORE_TRIES = 60
STORE_PAUSE_S = 1.0

T = TypeVar("T")


@contextlib.contextmanager
def tolerate(action: str) -> Iterator[None]:
    """Log a store error and continue: a locked, full or just replaced store must not end a training.

    The caller tries again later.
    """
    try:
        yield
    except UserError as error:
        _note_once(f"{action}: {error}")


def _note_once(error: str) -> None:
    """Log an error unless it repeats the last one, since a waiting job would fill the disk with repetitions."""
    global _last
    previous, _last = _last, error
    if previous != _last:
        note(_last)


def retry(action: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it succeeds, and return its result.

    Store errors are logged and the call is retried for at least a minute; then the error is raised.
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
    """Log that a disk is full or read-only, and continue without writing."""
    try:
        yield
    except OSError as error:
        note(f"{action}: {error}")
