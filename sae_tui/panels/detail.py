"""The base class of the panels on a job's screen: redraws the lines when the job or panel size changes."""

from __future__ import annotations

from abc import abstractmethod

from textual.events import Resize

from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.widgets.lines import Line, LineView


class DetailPanel(LineView):
    """Draws the lines created by a subclass from a job's details."""

    _detail: JobDetail | None = None

    @abstractmethod
    def lines(self, detail: JobDetail) -> list[Line]:
        """Return the lines for the panel's current size."""

    def title(self, detail: JobDetail) -> Line:
        """Return the title in the frame, or an empty line for a panel without a frame."""
        return ()

    def hint(self) -> str:
        """Return the key hint at the bottom of the frame."""
        return ""

    def show_detail(self, detail: JobDetail) -> None:
        """Draw the current state of the job."""
        self._detail = detail
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._detail and self.size.width:
            self._redraw(self._detail)

    def _redraw(self, detail: JobDetail) -> None:
        title = self.title(detail)
        self.set_class(bool(title), "panel")
        if title:
            self.show_titled(title, self.lines(detail), self.hint())
        else:
            self.show(self.lines(detail))
