"""The line at the top: which box, how many GPUs and jobs, and what is degraded."""

from __future__ import annotations

from dataclasses import dataclass

from textual.events import Resize

from sae_tui.format import fit
from sae_tui.widgets.lines import LineView


@dataclass(frozen=True, slots=True)
class Status:
    """`problem` is empty while all is well."""

    host: str
    summary: str
    problem: str = ""


class StatusLine(LineView):
    """One line; a problem takes the place of the summary."""

    DEFAULT_CSS = "StatusLine { height: 1; background: $panel; }"

    def on_mount(self) -> None:
        self._status = Status("", "")

    def show_status(self, status: Status) -> None:
        self._status = status
        self._draw()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.size.width
        if not width:
            return
        head = f" sae-tui · {self._status.host} "
        problem = self._status.problem
        text, style = (f"⚠ {problem}", "warn") if problem else (self._status.summary, "dim")
        self.show(
            [
                (
                    (fit(head, min(width, len(head))), "title"),
                    (fit(text, max(0, width - len(head) - 1), right=True), style),
                )
            ]
        )
