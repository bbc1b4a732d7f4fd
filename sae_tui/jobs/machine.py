"""Determines which machine a job runs on.

Host names do not identify machines: a laptop may change its name, a recreated container may use the same volume under
another name, and two hosts that share a data folder may have the same name.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from typing import Any, NamedTuple

from trainer.contract.errors import UserError
from trainer.contract.mounts import network_file_system
from trainer.contract.paths import DataDir
from trainer.contract.process import boot_id, is_of_this_boot, machine_id
from trainer.contract.runs.lock import is_held
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration

# The interval at which a supervisor updates the modification time of its run's lock file.
SIGN_EVERY_S = 30.0
# The clocks on two hosts may differ by a minute, so a supervisor is regarded as silent only after this time.
SILENT_S = 180.0


def this_machine() -> dict[str, Any]:
    """Return the job row columns that identify this machine."""
    return {"host": socket.gethostname(), "boot_id": boot_id(), "machine_id": machine_id()}


def is_here(job: Job) -> bool:
    """Return whether a job is on this machine, even if the machine's name has changed.

    A job with the current boot id is on this machine. If the boot ids differ, the host names are compared, unless
    different machine ids show that another machine has the same name. Equal machine ids prove nothing: machines created
    from the same image have the same id.
    """
    if is_of_this_boot(job.boot_id or ""):
        return True
    if job.machine_id and machine_id() not in ("", job.machine_id):
        return False
    return job.host == socket.gethostname()


class Silence(NamedTuple):
    """How recently a job on another machine was active, as seen from this machine."""

    is_held: bool | None  # Whether a process of the run holds the run's lock, or None if this is unknown.
    age_s: float  # The seconds since the run's files last changed, or infinity if there are no files.
    is_local: bool = False  # Whether the files are on a local disk on this machine, inaccessible to other hosts.

    @property
    def is_certain(self) -> bool:
        """True if none of the run's processes can be alive on any machine."""
        return self.is_local and self.is_held is False

    @property
    def is_long(self) -> bool:
        return not self.is_held and (self.age_s > SILENT_S or self.is_certain)

    @property
    def words(self) -> str:
        """A predicate like `has been silent for 12 min` or `was active 5 s ago`."""
        if self.is_held:
            return "is alive"
        if math.isinf(self.age_s):
            return "has never been active"
        ago = duration(max(0.0, self.age_s))
        return f"has been silent for {ago}" if self.is_long else f"was active {ago} ago"


def silence(data: DataDir, job: Job) -> Silence:
    """Return how recently a job on another machine was active, judging by its lock and file ages."""
    paths = data.run(job.id)
    signs = [paths.lock_file, paths.metrics_db, paths.metrics_db.with_name("metrics.db-wal"), paths.record_file]
    newest = -math.inf
    for file in signs:
        with contextlib.suppress(OSError):
            newest = max(newest, file.stat().st_mtime)
    return Silence(is_held(paths.lock_file), time.time() - newest, network_file_system(data.root) is None)


def elsewhere(data: DataDir, job: Job) -> str:
    """Describe the host of an active job on another machine; return "" for any other job.

    Example: `its host gpu7 has been silent for 12 min; if gpu7 is gone, `sae-tui repair --host gpu7` ends the job`
    """
    if job.state.is_final or is_here(job):
        return ""
    heard = silence(data, job)
    if math.isinf(heard.age_s):
        # The job has no files, so no modification time can show whether its host is silent.
        return ""
    # Import the module here because the queue process does not need it.
    import shlex

    way = f"`sae-tui repair --host {shlex.quote(job.host)}` ends the job"
    return f"its host {job.host} {heard.words}; if {job.host} is gone, {way}"


def refuse_if_silent(data: DataDir, job: Job) -> None:
    """Raise `UserError` if an active job is on another machine that has long been silent and cannot serve a request."""
    if (why := elsewhere(data, job)) and silence(data, job).is_long:
        raise UserError(f"job {job.id} is on another host, so nothing was done: {why}")
