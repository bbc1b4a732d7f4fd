"""What the panels of a job's screen share: they redraw their lines when the job or the size changes."""

from __future__ import annotations

from abc import abstractmethod

from textual.events import Resize

from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.widgets.lines import Line, LineView


class DetailPanel(LineView):
    """Draws the lines that a subclass makes of a job's detail."""

    _detail: JobDetail | None = None

    @abstractmethod
    def lines(self, detail: JobDetail) -> list[Line]:
        """Return the lines for the size that the panel has now."""

    def title(self, detail: JobDetail) -> Line:
        """Return what its frame says; nothing for a view without a frame of its own."""
        return ()

    def hint(self) -> str:
        """Return what the foot of its frame says of its keys."""
        return ""

    def show_detail(self, detail: JobDetail) -> None:
        """Draw what is known of the job now."""
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
