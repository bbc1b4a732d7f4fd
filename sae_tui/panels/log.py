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

    def on_mount(self) -> None:
        super().on_mount()
        self._follows = True

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Only who scrolls up leaves the end: a window that shrinks or a line that comes moves the end away itself."""
        super().watch_scroll_y(old_value, new_value)
        self._follows = new_value >= self.max_scroll_y or (self._follows and new_value > old_value)

    def _draw(self) -> None:
        super()._draw()
        if self._follows:
            # By force, since the scrollbar that allows it may not be there yet.
            self.scroll_end(animate=False, immediate=True, force=True)
