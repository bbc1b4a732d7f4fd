"""Writes a supervisor's log, and runs actions whose errors are logged and then ignored or retried."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from trainer.contract.errors import UserError


def note(text: str) -> None:
    """Write a line with the current time to stderr. Importing `logging` would use 1 MB in the queue process."""
    # Ignore errors, because the log may be on a full disk.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()


_last = ""
# All retries together take one minute if the store fails immediately, or six minutes if each one waits for a lock.
STORE_TRIES = 60
STORE_PAUSE_S = 1.0

T = TypeVar("T")


@contextlib.contextmanager
def tolerate(action: str) -> Iterator[None]:
    """Within the context, log store errors and continue; the caller retries later.

    Training must not stop because a store is locked, is on a full disk, or has just been replaced.
    """
    try:
        yield
    except UserError as error:
        _note_once(f"{action}: {error}")


def _note_once(error: str) -> None:
    """Log an error unless it repeats the last one.

    Otherwise, a waiting job would log the same error until the disk is full.
    """
    global _last
    previous, _last = _last, error
    if previous != _last:
        note(_last)


def retry(action: str, attempt: Callable[[], T], *, is_useless: Callable[[], bool] = lambda: False) -> T:
    """Call `attempt` until it succeeds, and return its result.

    Store errors are logged, and the call is retried. If `attempt` still fails after at least a minute, or if
    `is_useless` returns True, its error is raised.
    """
    for _ in range(STORE_TRIES - 1):
        try:
            return attempt()
        except UserError as error:
            if is_useless():
                raise
            _note_once(f"{action}: {error}")
            time.sleep(STORE_PAUSE_S)
    return attempt()


@contextlib.contextmanager
def tolerate_disk(action: str) -> Iterator[None]:
    """Within the context, log disk errors, for example if the disk is full or read-only, and continue."""
    try:
        yield
    except OSError as error:
        note(f"{action}: {error}")
