"""An example of a new panel on a job's screen: widget, style and content in one file."""

from __future__ import annotations

from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line


class ToyPanel(DetailPanel):
    """Shows the number of tokens that a job has processed."""

    DEFAULT_CSS = "ToyPanel { height: 1fr; width: 1fr; }"

    def lines(self, detail: JobDetail) -> list[Line]:
        return [((f"{detail.view.tokens} tokens seen", "text"),)]
