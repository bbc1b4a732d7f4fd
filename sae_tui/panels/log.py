"""The tail of a rank's log, following what is written."""

from __future__ import annotations

from sae_tui.format import fit
from sae_tui.jobs.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line


class LogPanel(DetailPanel, can_focus=True):
    """Follows the end while it is in view; scrolled up, it stays where it is."""

    DEFAULT_CSS = "LogPanel { height: 1fr; }"
    fixed_lines = 1

    def lines(self, detail: JobDetail) -> list[Line]:
        width = self.size.width
        heading: Line = ((fit(f" log of rank {detail.log_rank}", width), "title"),)
        return [heading, *(((fit(f" {line}", width), "text"),) for line in detail.log or ("(nothing yet)",))]

    def _draw(self) -> None:
        at_end = self.scroll_y >= self.max_scroll_y
        super()._draw()
        if at_end:
            self.scroll_end(animate=False)
