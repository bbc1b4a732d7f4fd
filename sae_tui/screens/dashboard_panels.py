"""Decides which panels the dashboard shows, their heights, and the titles and keys in their frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from textual.screen import Screen
from textual.widget import Widget

from sae_tui.format import duration
from sae_tui.gpu.base import GpuSample
from sae_tui.panels.aggregate import AggregatePanel
from sae_tui.panels.gpu_cards import card_grid
from sae_tui.panels.gpu_map import LEGEND, map_grid
from sae_tui.panels.gpus import GpuPanel, Shape
from sae_tui.panels.jobs import JobsPanel
from sae_tui.screens.dashboard_rows import Contents, Lower, PanelHeights, arrange
from sae_tui.screens.process_list import ProcessList
from sae_tui.screens.processes import why_none
from sae_tui.session import Session
from sae_tui.widgets.frame import entitle, frame_of
from trainer.contract.store.states import RUNNING

if TYPE_CHECKING:
    from sae_tui.screens.dashboard_hosts import DashboardHosts

_GRIDS = {"map": map_grid, "per_gpu": card_grid}
SHAPES: dict[str, Shape] = {"aggregated": "lines", "per_gpu": "cards", "map": "map"}
NO_GPUS = "d: why, and what to do · sae-tui --demo: simulated GPUs"
_TITLES = {"aggregate": "All GPUs", "gpus": "GPUs", "work-processes": "Processes", "finder": "Jobs"}
# The keys in a panel's frame: keys that always work, and keys that work only while the panel has the focus.
_KEYS = {
    "aggregate": ("< > time span", ""),
    "gpus": ("V view · 0…9 one GPU", "⏎ open"),
    "work-processes": ("t all, signals", "⏎ open · / filter · o order"),
    "finder": ("", "/ filter · o order · space mark"),
}
_LOWER = get_args(Lower)
# The widget that gets the focus when its panel has the lower part to itself.
_FOCUSED = {"": "#jobs", "jobs": "#jobs", "processes": "#work-processes ProcessTable", "gpus": "#gpus"}


class DashboardProcesses(ProcessList):
    """The processes on all GPUs, read only while the panel is displayed. Only the full list can send signals."""

    DEFAULT_CSS = "DashboardProcesses { height: auto; }"
    n_rows = 0  # the number of rows without a filter

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action in ("filter", "next_order", "reverse", "fold")

    def show_all(self, samples: Sequence[GpuSample]) -> None:
        """Show the processes on these GPUs, or stop reading them if the panel is hidden."""
        if not self.display:
            self.rest()
            return
        self.show_samples(samples, why_none(samples))
        self.count_rows()

    def count_rows(self) -> bool:
        """Update the row count, and return whether it has changed; while a filter hides rows, keep the count."""
        before = self.n_rows
        if not self.filtering:
            self.n_rows = len(self.table.rows)
        return self.n_rows != before

    def rest(self) -> None:
        """Stop reading the processes' shares of the GPUs."""
        self.session.monitor.want_shares(False)


class DashboardPanels:
    """The panels of the dashboard: their contents, heights, titles and keys."""

    def __init__(self, screen: Screen[None], session: Session, view: str) -> None:
        self._screen, self._session = screen, session
        self.view = view
        self.others: DashboardHosts | None = None  # draws the other hosts, if any are monitored
        self.lower: Lower = ""
        self.rows: PanelHeights | None = None
        self._chosen = False  # True once the user has chosen the view
        self._applied: tuple[PanelHeights, str] | None = None

    def choose_view(self, view: str) -> None:
        """Show the GPUs in this view."""
        self.view, self._chosen = view, True

    def next_view(self, n_gpus: int) -> None:
        """Show the GPUs in the next view."""
        views = list(SHAPES)
        self.choose_view(views[(views.index(self.view_of(n_gpus)) + 1) % len(views)])

    def view_of(self, n_gpus: int) -> str:
        """Return the view to show.

        Until the user chooses a view, use the map if the GPUs need more than twice the available lines.
        """
        if self._chosen:
            return self.view
        contents = Contents(n_gpus, self._n_job_rows, taken=self.others.rows if self.others else 0)
        return self.view if n_gpus <= 2 * arrange(*self._screen.size, contents).gpus else "map"

    def next_lower(self, n_gpus: int) -> None:
        """Give the lower part to the next panel: processes, jobs, GPUs, or all of them; focus that panel."""
        contents, size = self._contents(n_gpus), self._screen.size
        now = arrange(*size, contents, self.lower)
        places = [*_LOWER, *_LOWER][_LOWER.index(self.lower) + 1 :]
        # Skip choices that look like the current one, as some do in a small window.
        self.lower = next(place for place in places if arrange(*size, contents, place) != now or place == self.lower)
        self.apply(n_gpus)
        self._screen.query_one(_FOCUSED[self.lower]).focus()

    def apply(self, n_gpus: int) -> PanelHeights:
        """Compute the number of rows for each panel, and set it if the layout has changed."""
        contents = self._contents(n_gpus)
        rows, view = arrange(*self._screen.size, contents, self.lower), self.view_of(n_gpus)
        if (rows, view) != self._applied:
            self.rows, self._applied = rows, (rows, view)
            self._screen.set_class(rows.is_side_by_side, "-side-by-side")
            heights = {"aggregate": rows.totals, "gpus": rows.gpus, "work-processes": rows.processes}
            for name, inside in (heights | {"preview": rows.preview}).items():
                panel: Widget = self._screen.query_one(f"#{name}")
                panel.display = inside > 0
                panel.styles.height = "1fr" if name == "preview" and rows.is_side_by_side else inside + rows.chrome
            self._screen.query_one("#work").display = rows.jobs > 0
            self._leave_hidden()
        return rows

    def _leave_hidden(self) -> None:
        """Move the focus out of a panel that has just been hidden."""
        focused = self._screen.focused
        if focused is not None and not _is_displayed(focused):
            widgets = map(self._screen.query_one, _FOCUSED.values())
            self._screen.set_focus(next(filter(_is_displayed, widgets), None))

    def forget(self) -> None:
        """Make the next `apply` set all heights again."""
        self._applied = None

    def _contents(self, n_gpus: int) -> Contents:
        view, (width, height) = self.view_of(n_gpus), self._screen.size
        inside = width - 2 * (frame_of(width, height) == "framed")
        panel = self._screen.query_one(GpuPanel)
        jobs = [*self._session.jobs, *(self.others.jobs if self.others else ())]
        return Contents(
            n_gpus=_GRIDS[view](n_gpus, inside, height).bands if n_gpus and view in _GRIDS else n_gpus,
            n_jobs=self._n_job_rows,
            n_active=sum(not (job.state.is_final or job.held) for job in jobs),
            is_running=any(job.evaluation or job.state in RUNNING for job in jobs),
            n_processes=self._screen.query_one(DashboardProcesses).n_rows,
            is_card_view=view == "per_gpu",
            tiles=view == "map",
            previews=self._screen.query_one(JobsPanel).previewed is not None,
            words=len(panel.wrapped(self.why_no_gpus()[0], inside)),
            taken=self.others.rows if self.others else 0,
        )

    @property
    def _n_job_rows(self) -> int:
        n_rows = self.others.n_job_rows if self.others else len(self._session.jobs)
        return n_rows - self._screen.query_one(JobsPanel).n_folded

    def why_no_gpus(self) -> tuple[str, str]:
        """Return text explaining why there are no GPUs and what to do, and its style."""
        problem = self._session.monitor.problem
        return (f"{problem[:1].upper()}{problem[1:]}.\n{NO_GPUS}", "warn") if problem else (NO_GPUS, "text")

    def entitle(self, stored_s: int | None) -> None:
        """Write the titles, with each history's time span; `stored_s` is the span read from the store."""
        plotted_s = self._screen.query_one(AggregatePanel).n_columns * self._session.monitor.interval_s
        spans_s = {"aggregate": stored_s or plotted_s, "gpus": stored_s}
        for name, title in (_TITLES | (self.others.titles if self.others else {})).items():
            span = f" · last {duration(spans_s[name])}" if spans_s.get(name) else ""
            panel = self._screen.query_one(f"#{name}")
            entitle(panel, title + span, self._keys(panel))
        for panel in self._screen.query("#hosts"):
            entitle(panel, "Other hosts")

    def _keys(self, panel: Widget) -> str:
        """Return the keys that act on the panel, and the legend of a map; without GPUs, their keys do nothing."""
        is_empty = panel.id == "gpus" and not self._session.monitor.latest()
        always, focused = ("", "") if is_empty else _KEYS.get(panel.id or "", ("", ""))
        is_map = panel.id == "gpus" and self._applied is not None and self._applied[1] == "map"
        is_lower = self.rows is not None and panel.id == self._lowest()
        parts = [
            LEGEND if is_map else "",
            focused if panel.has_class("-focus-within") else "",
            always,
            "z next panel" if is_lower else "",
        ]
        return " · ".join(filter(None, parts))

    def _lowest(self) -> str:
        rows = self.rows
        return "" if rows is None else "finder" if rows.jobs else "work-processes" if rows.processes else "gpus"


def _is_displayed(widget: Widget) -> bool:
    return all(one.display for one in widget.ancestors_with_self)
