"""Restarts missing supervisors for queued jobs, for example after a reboot.

`python -m sae_tui.jobs.revive DATA_DIR` starts the supervisors one at a time, in queue order. The command runs in
the background so that other commands need not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sae_tui.jobs import detach
from sae_tui.jobs.background import go_on
from sae_tui.jobs.queue.order import in_order
from sae_tui.jobs.reconcile import has_lost_its_place, reconcile
from sae_tui.jobs.store_access import open_control
from sae_tui.jobs.supervisor_log import note
from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir, umask_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job

# A process retries starting missing supervisors after this many seconds.
AGAIN_S = 60.0
_COMMAND = (sys.executable, "-P", "-m", "sae_tui.jobs.revive")
_again_at = 0.0


def reconcile_and_revive(data: DataDir) -> list[int]:
    """Correct the rows of jobs whose supervisor has exited, and restart the supervisors of queued jobs.

    Return the ids of the jobs whose state has changed. A supervisor must not call this function: it kills all its
    descendants, which would include the new processes.
    """
    return reconcile(data, revive)


def revive(data: DataDir) -> None:
    """Start the missing supervisors in the background; each process does this at most once per minute."""
    global _again_at
    if time.monotonic() < _again_at:
        return
    _again_at = time.monotonic() + AGAIN_S
    # Ignore errors because the log contains the reason, and the next command retries.
    with contextlib.suppress(UserError):
        detach.start_detached([*_COMMAND, str(data.root)], data.root / "revive.log", "the queue")


def start_all(data: DataDir, start: Callable[[DataDir, int], None] = detach.start) -> list[int]:
    """Start the missing supervisors of this user's queued jobs, in queue order; return the ids of these jobs.

    Only one process per host does this at a time; others return [].
    """
    if not data.control_db.exists():
        return []
    lock = FileLock(data.locks / f"revive-{data.host_word}.lock")
    if not lock.acquire():
        return []
    with open_control(data) as control:
        mine = [job for job in in_order(control.active_jobs()) if has_lost_its_place(data, job)]
        revived = [job.id for job in mine if _start(data, control, job, start)]
    lock.release()
    return revived


def _start(data: DataDir, control: Control, job: Job, start: Callable[[DataDir, int], None]) -> bool:
    try:
        start(data, job.id)
    except UserError as error:
        reason = f"its supervisor cannot be started again: {error}"
        note(f"job {job.id}: {reason}")
        if reason != job.waits_for:
            control.update(job.id, waits_for=reason)
        return False
    control.add_event(
        job.id, "queued-again", f"is queued again on {socket.gethostname()}: its supervisor was restarted"
    )
    return True


def main(arguments: Sequence[str]) -> int:
    """Fork a process that starts the missing supervisors."""
    data = DataDir(Path(arguments[0]))

    def begin() -> Callable[[], None]:
        os.umask(umask_of(data.root))
        return rest

    def rest() -> None:
        start_all(data)

    return go_on(begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
