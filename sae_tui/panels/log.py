"""The tail of a rank's log, following what is written."""

from __future__ import annotations

from textual.events import Resize

from sae_tui.format import fit
from sae_tui.jobs.watcher import JobDetail
from sae_tui.widgets.lines import LineView


class LogPanel(LineView, can_focus=True):
    """Follows the end while it is in view; scrolled up, it stays where it is."""

    DEFAULT_CSS = "LogPanel { height: 1fr; }"
    fixed_lines = 1

    def on_mount(self) -> None:
        self._detail: JobDetail | None = None

    def show_detail(self, detail: JobDetail) -> None:
        self._detail = detail
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.size.width
        if self._detail is None or not width:
            return
        at_end = self.scroll_y >= self.max_scroll_y
        lines = self._detail.log or ("(nothing yet)",)
        heading = ((fit(f" log of rank {self._detail.log_rank}", width), "title"),)
        self.show([heading, *(((fit(" " + line, width), "text"),) for line in lines)])
        if at_end:
            self.scroll_end(animate=False)
