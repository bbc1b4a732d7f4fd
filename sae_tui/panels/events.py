"""What happened to a job, the newest at the bottom."""

from __future__ import annotations

from sae_tui.format import clock_time, fit
from sae_tui.jobs.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line
from trainer.contract.records import Event

_STYLES = {"info": "text", "warning": "warn", "error": "bad"}


class EventsPanel(DetailPanel):
    """The last events that fit."""

    DEFAULT_CSS = "EventsPanel { height: 1fr; width: 2fr; }"

    def lines(self, detail: JobDetail) -> list[Line]:
        width, height = self.size
        shown = detail.events[-max(1, height - 1) :]
        return [((fit(" events", width), "title"),), *(_event_line(event, width) for event in shown)]


def _event_line(event: Event, width: int) -> Line:
    when = f" {clock_time(event.timestamp)} "
    return ((when, "dim"), (fit(event.message, max(0, width - len(when))), _STYLES.get(event.level, "text")))
