"""The dashboard's panel for other hosts: their GPUs, their jobs, and the actions on those jobs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from textual.screen import Screen

from sae_tui.format import celsius, visible
from sae_tui.gpu.aggregate import aggregate
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.past import BLANK, RecentHistory
from sae_tui.hosts.hosts import Hosts
from sae_tui.hosts.view import HostView
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.aggregate import Total, totals
from sae_tui.panels.far_gpus import FarGpus, FarHost
from sae_tui.panels.far_jobs import parse_key
from sae_tui.panels.finder import JobsFinder
from sae_tui.panels.gpu_row import GpuRow
from sae_tui.panels.jobs import JobsPanel
from sae_tui.screens.far_actions import FarActions
from sae_tui.screens.offers import offers_for
from sae_tui.session import Session
from sae_tui.widgets.frame import FRAMES, frame_of

# The actions that are possible on another host's job, as named by `offers_for`.
_VERBS = frozenset({"open", "stop", "pause", "continue", "log", "clone"})
# The offset between the GPU indices of consecutive hosts, to keep the indices unique.
_APART = 1_000_000
_TOTALS, _PANELS, _SOME_JOBS = 4, 4, 8
# Do not show a GPU in use by others as a warning.
_STYLES = {"warn": "text"}
_FEWEST_LINES = 3  # minimum number of panel lines; below this, the panel scrolls
_SHARE = 2  # other hosts' GPUs take at most half of the window's rows


class DashboardHosts:
    """Draws other hosts on the dashboard, and runs commands on them."""

    def __init__(self, screen: Screen[None], session: Session, hosts: Hosts) -> None:
        self._screen, self._session, self._hosts = screen, session, hosts
        # The histories drawn for the totals, reused for the lines below.
        self._pasts: dict[str, RecentHistory] = {}

    @property
    def titles(self) -> dict[str, str]:
        """The panel titles used only while other hosts are shown, as a dict by panel id."""
        return {"gpus": f"GPUs on {visible(socket.gethostname())}"}

    @property
    def _space(self) -> int:
        """The number of lines inside the remote GPU panel's frame: half the window, or fewer if fewer lines remain.

        Totals, this host's GPUs and some jobs take precedence over remote GPUs, but not over the names of remote hosts.
        """
        views, height = self._hosts.views, self._screen.size.height
        first = _TOTALS + len(self._session.monitor.latest()) + 1 + min(_SOME_JOBS, self.n_job_rows)
        left = height - 2 - first - _PANELS * FRAMES[frame_of(*self._screen.size)]
        most = height // _SHARE - 2
        return min(max(_FEWEST_LINES, most), self._screen.query_one(FarGpus).lines_of(views, min(left, most)))

    @property
    def n_job_rows(self) -> int:
        """The number of rows in the jobs table, including remote jobs and one heading per host."""
        return 1 + len(self._session.jobs) + sum(1 + len(view.jobs) for view in self._hosts.views)

    @property
    def jobs(self) -> list[JobView]:
        """The jobs on the other hosts."""
        return [job for view in self._hosts.views for job in view.jobs]

    @property
    def rows(self) -> int:
        """The number of rows in the remote GPU panel, including its frame."""
        return self._space + FRAMES[frame_of(*self._screen.size)]

    def show_gpus(self, chrome: int) -> None:
        """Draw the latest samples from the other hosts."""
        panel = self._screen.query_one(FarGpus)
        panel.styles.height = self._space + chrome
        panel.show_hosts([self._host(view) for view in self._hosts.views], self._space)

    def totals(self, samples: Sequence[GpuSample], past: RecentHistory, *, live: bool) -> list[Total]:
        """Return the totals over the GPUs on all hosts; the arguments are this host's samples and history.

        Other hosts report only current values, so a longer history (not `live`) covers this host only.
        """
        every, slots, limits_w = list(samples), dict(past.slots), dict(past.power_limits_w)
        place_of = {sample.index: "" for sample in samples}
        for place, view in enumerate(self._hosts.views, start=1):
            theirs = self._pasts[view.name] = self._past(view)
            blank = [BLANK] * len(next(iter(past.slots.values()), ()))
            for gpu in view.gpus:
                if gpu.index in theirs.slots:
                    index = _APART * place + gpu.index
                    every.append(replace(gpu.sample(view.since), index=index))
                    slots[index] = theirs.slots[gpu.index] if live else blank
                    limits_w[index] = theirs.power_limits_w[gpu.index]
                    place_of[index] = f" on {view.name}"
        history = RecentHistory(slots, limits_w, past.is_period)
        found = totals(every, history, self._session.settings)
        hottest = aggregate(every).hottest
        if hottest and (host := place_of[hottest.index]):
            found[-1] = replace(found[-1], text=f"{celsius(hottest.temperature_c)} GPU {hottest.index % _APART}{host}")
        return found

    def _past(self, view: HostView) -> RecentHistory:
        return self._hosts.past(view.name, self._screen.size.width, self._session.settings.sampling_interval_s)

    def show_jobs(self) -> None:
        """Pass the remote jobs to the jobs table."""
        self._screen.query_one(JobsFinder).show_far(self._hosts.views)

    def _host(self, view: HostView) -> FarHost:
        past = self._pasts.pop(view.name, None) or self._past(view)
        known = past.slots.keys()
        rows = tuple(
            GpuRow(
                gpu.sample(view.since),
                gpu.holder,
                _STYLES.get(gpu.use, gpu.use),
                partial(past.column, gpu.index),
                settings=self._session.settings,
            )
            for gpu in view.gpus
            if gpu.index in known
        )
        return FarHost(view, rows)

    @property
    def selected(self) -> tuple[HostView, JobView] | None:
        """The host and the job under the cursor, if it is a remote job."""
        at = parse_key(self._screen.query_one(JobsPanel).cursor)
        view = next((view for view in self._hosts.views if at and view.name == at[0]), None)
        job = view and at and view.job(at[1])
        return (view, job) if view and job else None

    def offers(self) -> Mapping[str, str]:
        """Return the actions on the job under the cursor if it is a remote job."""
        if (at := self.selected) is None:
            return {}
        offered = offers_for(at[1], readonly=self._session.readonly)
        return {verb: word for verb, word in offered.items() if verb in _VERBS}

    def open(self, then: str = "") -> bool:
        """Open the job under the cursor, and call its screen's action `then` once the job has been read.

        Return False for a local job or an empty list.
        """
        if (at := self.selected) is None:
            return False
        from sae_tui.screens.far_job import open_far_job

        marked = sorted(self._screen.query_one(JobsPanel).marked)
        open_far_job(self._screen.app, self._session, self._hosts, at[0].name, at[1], marked, then)
        return True

    def open_log(self) -> bool:
        """Open the log of the job under the cursor; return False for a local job or an empty list."""
        if (at := self.selected) is None:
            return False
        from sae_tui.screens.far_log import FarLogScreen

        self._screen.app.push_screen(FarLogScreen(self._session, self._hosts, at[0].name, at[1]))
        return True

    def act(self, verb: str) -> bool:
        """Stop, pause or resume the job under the cursor; return False for a local job or an empty list."""
        if (at := self.selected) is None:
            return False
        view, job = at
        FarActions(self._session, view.name, self._screen.app).act(verb, job)
        return True
