"""Tells which machine a job is on.

The machine counts, not its name: a laptop gets another name, a container is made again on the same volume, and two
hosts that share a data folder may have the same name.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from typing import Any, NamedTuple

from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.process import boot_id, is_of_this_boot, machine_id
from trainer.contract.runs.lock import is_held
from trainer.contract.store.database import network_file_system
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration

# A supervisor touches the run's lock file every `SIGN_EVERY_S`. Clocks of two hosts may differ by a minute.
SIGN_EVERY_S = 30.0
SILENT_S = 180.0


def this_machine() -> dict[str, Any]:
    """Return the columns of a job's row that say which machine it is on."""
    return {"host": socket.gethostname(), "boot_id": boot_id(), "machine_id": machine_id()}


def is_here(job: Job) -> bool:
    """Tell whether a job is on this machine, whatever name the machine had then.

    Within one boot that is certain. After a restart the name decides, unless the machine's id shows that another
    machine has the same name. An equal id alone proves nothing: machines made from one image share it.
    """
    if is_of_this_boot(job.boot_id or ""):
        return True
    if job.machine_id and machine_id() not in ("", job.machine_id):
        return False
    return job.host == socket.gethostname()


class Silence(NamedTuple):
    """What this machine can tell of a job on another one."""

    is_held: bool | None  # whether a process of the run is known to hold its lock
    age_s: float  # since its files last changed; infinite where there are none
    is_local: bool = False  # whether its files are on a disk of this machine, which no other host can share

    @property
    def is_certain(self) -> bool:
        """Whether no process of the run can be alive anywhere."""
        return self.is_local and self.is_held is False

    @property
    def is_long(self) -> bool:
        return not self.is_held and (self.age_s > SILENT_S or self.is_certain)

    @property
    def words(self) -> str:
        """Write it as `has not been heard of for 12 min`, or `was heard of 5 s ago`."""
        if self.is_held:
            return "is alive"
        if math.isinf(self.age_s):
            return "has never been heard of"
        ago = duration(max(0.0, self.age_s))
        return f"has not been heard of for {ago}" if self.is_long else f"was heard of {ago} ago"


def silence(data: DataDir, job: Job) -> Silence:
    """Return how long nothing has been heard of a job that is on another machine; this starts a process (2 ms)."""
    paths = data.run(job.id)
    signs = [paths.lock_file, paths.metrics_db, paths.metrics_db.with_name("metrics.db-wal"), paths.record_file]
    newest = -math.inf
    for file in signs:
        with contextlib.suppress(OSError):
            newest = max(newest, file.stat().st_mtime)
    return Silence(is_held(paths.lock_file), time.time() - newest, network_file_system(data.root) is None)


def elsewhere(data: DataDir, job: Job) -> str:
    """Return what to know of an active job on another machine; "" for any other job.

    `its host gpu7 has not been heard of for 12 min; if gpu7 is gone, `sae-tui repair --host gpu7` ends the job`
    """
    if job.state.is_final or is_here(job):
        return ""
    heard = silence(data, job)
    if math.isinf(heard.age_s):
        # Nothing of it is there that could have changed.
        return ""
    # Imported only here: a waiting supervisor does not need it.
    import shlex

    way = f"`sae-tui repair --host {shlex.quote(job.host)}` ends the job"
    return f"its host {job.host} {heard.words}; if {job.host} is gone, {way}"


def refuse_if_silent(data: DataDir, job: Job) -> None:
    """Raise `UserError` for an active job on a machine that has been silent for so long that nothing would happen."""
    if (why := elsewhere(data, job)) and silence(data, job).is_long:
        raise UserError(f"job {job.id} is not here, and nothing was done: {why}")
