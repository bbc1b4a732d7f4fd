"""A job's events, with the latest at the bottom."""

from __future__ import annotations

import itertools

from sae_tui.format import clock_time, fit, wrap
from sae_tui.jobs.view.postmortem import without_repeats
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line
from trainer.contract.store.rows import Event

_STYLES = {"info": "text", "warning": "warn", "error": "bad"}
_MOST = 50  # no screen has space for more events


class EventsPanel(DetailPanel):
    """Shows as many of the latest events as fit, each in full."""

    DEFAULT_CSS = "EventsPanel { height: 1fr; width: 1fr; }"

    def title(self, detail: JobDetail) -> Line:
        return (("Events", "title"),)

    def lines(self, detail: JobDetail) -> list[Line]:
        width, height = self.size
        events = without_repeats(detail.events[-_MOST:], detail.view.error if detail.postmortem else None)
        space, shown = max(1, height if self.has_title else height - 1), list[Line]()
        for event in reversed(events):
            lines = _event_lines(event, width)
            if shown and len(shown) + len(lines) > space:
                break
            shown = lines[:space] + shown
        return shown


def _event_lines(event: Event, width: int) -> list[Line]:
    """Return an event's time, with the complete message next to it."""
    when, style = f" {clock_time(event.timestamp)} ", _STYLES.get(event.level, "text")
    space = max(10, width - len(when))
    margins = itertools.chain([when], itertools.repeat(" " * len(when)))
    texts = wrap(event.message, space)
    return [((margin, "dim"), (fit(text, space), style)) for margin, text in zip(margins, texts, strict=False)]
