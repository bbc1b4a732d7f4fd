"""An immutable snapshot of another host."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from sae_tui.hosts.protocol import RemoteGpu
from sae_tui.jobs.view.reader import JobView


class ConnectionStage(StrEnum):
    """The state of a connection.

    SILENT: connected, but no messages arrive. CUT: was connected. FAILED: has never been connected.
    """

    CONNECTING = "connecting"
    CONNECTED = "connected"
    SILENT = "silent"
    CUT = "cut"
    FAILED = "failed"


class HostView(msgspec.Struct, frozen=True):
    """A host with its latest GPUs and jobs.

    `sentence` explains why the host is not connected, worded to follow the host's name. `since` (seconds since the
    epoch) is the time when the stage began; for SILENT, it is the time when data last arrived. `problem` and
    `jobs_problem` are reported by the host.
    """

    name: str
    stage: ConnectionStage = ConnectionStage.CONNECTING
    sentence: str = ""
    since: float = 0.0
    gpus: tuple[RemoteGpu, ...] = ()
    jobs: tuple[JobView, ...] = ()
    more: int = 0
    problem: str = ""
    jobs_problem: str = ""

    @property
    def is_connected(self) -> bool:
        return self.stage is ConnectionStage.CONNECTED

    def job(self, job_id: int) -> JobView | None:
        return next((job for job in self.jobs if job.id == job_id), None)
