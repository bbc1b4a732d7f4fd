"""A panel of a job's screen as a person would add one: a file with its widget, its look and what it draws."""

from __future__ import annotations

from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line


class ToyPanel(DetailPanel):
    """Draws how many tokens a job has seen."""

    DEFAULT_CSS = "ToyPanel { height: 1fr; width: 1fr; }"

    def lines(self, detail: JobDetail) -> list[Line]:
        return [((f"{detail.view.tokens} tokens seen", "text"),)]
