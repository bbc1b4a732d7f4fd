"""What a supervisor writes into its own log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from trainer.contract.errors import UserError


def note(text: str) -> None:
    """One line with the time; `logging` would cost a waiting supervisor 1 MB."""
    # Its disk may be the full one that is to be told of.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()


_last = ""


@contextlib.contextmanager
def tolerated(action: str) -> Iterator[None]:
    """A store that is locked, full or just replaced must not end a training: it is noted, and tried again later."""
    global _last
    try:
        yield
    except UserError as error:
        # Said once of what lasts: a job in line would fill the disk with it.
        told, _last = _last, f"{action}: {error}"
        if told != _last:
            note(_last)


@contextlib.contextmanager
def tolerated_disk(action: str) -> Iterator[None]:
    """A disk that is full or read-only is noted; what was to be written can be told without."""
    try:
        yield
    except OSError as error:
        note(f"{action}: {error}")
