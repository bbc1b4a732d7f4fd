"""Sends supervisor heartbeats that other hosts can see, and keeps the recorded host name up to date."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from sae_tui.jobs.machine import SIGN_EVERY_S
from sae_tui.jobs.supervisor_log import tolerate
from trainer.contract.paths import RunPaths
from trainer.contract.store.job_store import Control

_CHECK_EVERY_S = 5.0


class Sign:
    """Touches the run's lock file, and keeps the host name in the job's row and in its leases up to date."""

    def __init__(self, control: Control, job_id: int, paths: RunPaths, check_others: Callable[[], object]) -> None:
        """Prepare to send heartbeats; `check_others` is called every 5 s to check the other supervisors."""
        self._control, self._job_id, self._file = control, job_id, paths.lock_file
        self._check_others = check_others
        self._host = ""
        self._due = self._check_due = 0.0

    def turn(self) -> None:
        """Touch the file every 30 s; record a changed host name at once, because the job's row and leases use it."""
        host = socket.gethostname()
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + SIGN_EVERY_S
            with contextlib.suppress(OSError):
                os.utime(self._file)
        if time.monotonic() >= self._check_due:
            self._check_due = time.monotonic() + _CHECK_EVERY_S
            self._check_others()
        if self._host != host:
            with tolerate("recording the name of this host"):
                if self._host:
                    self._control.move(self._job_id, host)
                self._host = host
