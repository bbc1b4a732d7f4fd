"""Starts the queue process again if it is gone while jobs are queued, for example after a reboot.

`python -m sae_tui.jobs.revive DATA_DIR` does this in the background; the user service runs it at boot.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sae_tui.jobs.reconcile import reconcile
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir

# The minimum time in seconds between a process's attempts to start the queue process.
AGAIN_S = 60.0
_again_at = 0.0


def reconcile_and_revive(data: DataDir) -> list[int]:
    """Correct the rows of jobs whose supervisor has exited, and start a missing queue process.

    Return the ids of the jobs whose state has changed. A supervisor must not call this function: it kills all its
    descendants, which would include the new process.
    """
    return reconcile(data, revive)


def revive(data: DataDir) -> None:
    """Start the queue process; each process tries this at most once per minute."""
    global _again_at
    if time.monotonic() < _again_at:
        return
    _again_at = time.monotonic() + AGAIN_S
    from sae_tui.jobs import detach

    # Ignore errors because the log contains the reason, and the next command retries.
    with contextlib.suppress(UserError):
        detach.start_queue(data)


def main(arguments: Sequence[str]) -> int:
    """Start the queue process if there are queued jobs."""
    reconcile_and_revive(DataDir(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
