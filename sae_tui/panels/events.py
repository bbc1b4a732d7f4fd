"""What happened to a job, the newest at the bottom."""

from __future__ import annotations

from textual.events import Resize

from sae_tui.format import clock_time, fit
from sae_tui.jobs.watcher import JobDetail
from sae_tui.widgets.lines import LineView

_STYLES = {"info": "text", "warning": "warn", "error": "bad"}


class EventsPanel(LineView):
    """The last events that fit."""

    DEFAULT_CSS = "EventsPanel { height: 1fr; width: 2fr; }"

    def on_mount(self) -> None:
        self._detail: JobDetail | None = None

    def show_detail(self, detail: JobDetail) -> None:
        self._detail = detail
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width, height = self.size
        if self._detail is None or not width:
            return
        shown = self._detail.events[-max(1, height - 1) :]
        self.show(
            [
                ((fit(" events", width), "title"),),
                *(
                    (
                        (f" {clock_time(event.timestamp)} ", "dim"),
                        (fit(event.message, max(0, width - 10)), _STYLES.get(event.level, "text")),
                    )
                    for event in shown
                ),
            ]
        )
