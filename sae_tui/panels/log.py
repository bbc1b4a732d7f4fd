"""The end of a rank's log, updated live."""

from __future__ import annotations

from rich.cells import cell_len
from textual.binding import Binding

from sae_tui.format import fit
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line
from sae_tui.widgets.log_view import HINT, shift


class LogPanel(DetailPanel, can_focus=True):
    """Follows the end of the log, unless the user has scrolled up. Long lines are truncated, not wrapped."""

    BINDINGS = [
        Binding("left", "shift(-1)", show=False),
        Binding("right", "shift(1)", show=False),
    ]
    DEFAULT_CSS = "LogPanel { height: 1fr; }"

    _follows, _left = True, 0

    def title(self, detail: JobDetail) -> Line:
        is_program = kind_of(detail.view.config).is_program
        return (("Log" if is_program else f"Log of rank {detail.log_rank}", "title"),)

    def hint(self) -> str:
        log = self._detail.log[-self.size.height :] if self._detail else ()
        is_cut = any(cell_len(line) >= self.size.width for line in log)
        return HINT if is_cut or self._left else ""

    def lines(self, detail: JobDetail) -> list[Line]:
        width = self.size.width
        none = "no output" if detail.view.state.is_final else "no output yet"
        texts = [line[self._left :] for line in detail.log] or [f"({none})"]
        return [((fit(f" {line}", width), "text"),) for line in texts]

    def action_shift(self, direction: int) -> None:
        """Scroll the lines sideways to show text beyond the edge."""
        self._left = shift(self._left, direction, self._detail.log if self._detail else (), self.size.width)
        self._draw()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Stop following only if the user scrolls up, since a resize or a new line also moves the view off the end."""
        super().watch_scroll_y(old_value, new_value)
        self._follows = new_value >= self.max_scroll_y or (self._follows and new_value > old_value)

    def _draw(self) -> None:
        super()._draw()
        self._go_to_end()
        # Scroll again after the frame is drawn, because the frame takes a row and so moves the end down by one line.
        self.call_after_refresh(self._go_to_end)

    def _go_to_end(self) -> None:
        if self._follows:
            # Force the scroll, because Textual scrolls only if there is a scrollbar, which may not exist yet.
            self.scroll_end(animate=False, immediate=True, force=True)
