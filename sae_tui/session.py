"""The state shared by all screens: current GPUs and jobs, the settings, and the actions on jobs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from textual.app import App

from sae_tui.actions import Actions, Navigation
from sae_tui.alerts.watch import AlertWatcher
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.monitor import Monitor
from sae_tui.host import Host
from sae_tui.jobs.evaluation import request
from sae_tui.jobs.gpus import availability
from sae_tui.jobs.gpus.availability import GpuChoice, Holders
from sae_tui.jobs.gpus.locks import HolderReader, lock_folder, lock_problem
from sae_tui.jobs.loaded_model import LoadedModel
from sae_tui.jobs.upkeep.storage import store_warning
from sae_tui.jobs.view.reader import JobView
from sae_tui.jobs.view.watcher import JobDetail, Watcher
from sae_tui.panels.status import StatusContent, summary
from sae_tui.settings import Settings
from trainer.contract.paths import DataDir

if TYPE_CHECKING:
    from sae_tui.hosts.hosts import Hosts


class Session:
    """Provides the current GPUs, jobs and settings to the screens; monitor and watcher threads keep them up to date."""

    place = ""  # follows a job's number to name its host, like " of gpu1"; "" for this host
    go: Navigation  # set by the app once the router exists, because the router needs the session

    def __init__(
        self,
        data: DataDir,
        monitor: Monitor,
        watcher: Watcher,
        settings: Settings,
        alerts: AlertWatcher,
        app: App[None],
        *,
        readonly: bool = False,
        hosts: Hosts | None = None,
        given: Mapping[str, str] | None = None,
    ) -> None:
        self.data = data
        # Maps each setting overridden by a flag or the terminal in this run to a description of the override.
        self.given = given or {}
        self.readonly = readonly
        self.hosts = hosts
        self.monitor = monitor
        self.watcher = watcher
        self.settings = settings
        self.alerts = alerts
        self.actions = Actions(self, app)
        self.host = Host()
        self.model = LoadedModel(data, lambda job: request.idle_gpu(data, job, self.choices(), monitor.source_name))
        self._warning = store_warning(data) or lock_problem(data, monitor.source_name)
        # The data folder's disk may hang, so a thread reads the locks stored there. A lock folder outside the data
        # folder is in memory, where reads cannot hang.
        locks = lock_folder(data, monitor.source_name)
        self._locks = HolderReader(locks) if locks.is_relative_to(data.root) else locks

    @property
    def jobs(self) -> tuple[JobView, ...]:
        return self.watcher.jobs

    @property
    def detail(self) -> JobDetail | None:
        """The details of the job followed by the watcher."""
        return self.watcher.detail

    @property
    def cuda(self) -> bool:
        """Whether jobs can use the displayed GPUs."""
        return self.monitor.cuda

    def choices(self) -> tuple[GpuChoice, ...]:
        """Return each GPU and whether it is available to a new job."""
        samples = self.monitor.latest()
        return availability.choices(samples, self._holders(samples))

    def holders(self, samples: Sequence[GpuSample]) -> list[tuple[str, str]]:
        """Return a short description of each GPU's use, with its style name."""
        return [availability.describe_use(choice) for choice in availability.choices(samples, self._holders(samples))]

    def status(self) -> StatusContent:
        """Return the status line content: the host, a summary, and any problem."""
        views = self.hosts.views if self.hosts else ()
        words = summary(
            self.monitor.latest(), self.jobs, opening=self.monitor.opening, hidden=self.monitor.hidden, others=views
        )
        words = f"read-only · {words}" if self.readonly else words
        # If this machine has no GPUs, the GPU panel explains why in full.
        has_none = not self.monitor.latest() and not self.monitor.opening
        problem = self.watcher.problem or (not has_none and self.monitor.problem) or self._warning
        return StatusContent(socket.gethostname(), words, problem, self.host.load(), len(self.alerts.active))

    def _holders(self, samples: Sequence[GpuSample]) -> Holders:
        return availability.with_other_users(self.watcher.holders, self._locks, samples)
