"""What a supervisor writes into its own log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from trainer.contract.errors import UserError


def note(text: str) -> None:
    """Write one line with the time to stderr; `logging` would cost a waiting supervisor 1 MB."""
    # The log may lie on the full disk that the line reports.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()


_last = ""
# A store that fails at once is tried for a minute, one that is locked, and waited for at each try, for six.
STORE_TRIES = 60
STORE_PAUSE_S = 1.0

T = TypeVar("T")


@contextlib.contextmanager
def tolerate(action: str) -> Iterator[None]:
    """Note an error of the store, and go on: one that is locked, full or just replaced must not end a training.

    The caller tries again later.
    """
    try:
        yield
    except UserError as error:
        _note_once(f"{action}: {error}")


def _note_once(error: str) -> None:
    """Write down an error, unless it is the last one again: a waiting job would fill the disk with it."""
    global _last
    previous, _last = _last, error
    if previous != _last:
        note(_last)


def retry(action: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it succeeds and return its result.

    An error of the store is noted and tried again for a minute or more; then it is raised.
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
    """Note that a disk is full or read-only, and go on without what was to be written."""
    try:
        yield
    except OSError as error:
        note(f"{action}: {error}")
