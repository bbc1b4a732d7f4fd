"""Every rank's speed, so that a slow one is seen."""

from __future__ import annotations

from textual.events import Resize

from sae_tui.format import count, fit, sparkline
from sae_tui.jobs.watcher import JobDetail
from sae_tui.widgets.lines import Line, LineView

RATE = "rank_tokens_per_s"


class RanksPanel(LineView):
    """A line per rank: tokens per second now and before, on one axis for all."""

    DEFAULT_CSS = "RanksPanel { height: 1fr; width: 1fr; }"

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
        heading: Line = ((fit(" tokens/s per rank", width), "title"),)
        rates = {rank: points for (name, rank), points in self._detail.series.items() if name == RATE}
        top = max((point.value or 0 for points in rates.values() for point in points), default=None)
        lines = [rank_line(rank, [p.value for p in points], top, width) for rank, points in sorted(rates.items())]
        self.show([heading, *(lines or [((fit("  no values yet", width), "dim"),)])])


def rank_line(rank: int, values: list[float | None], top: float | None, width: int) -> Line:
    newest = count(values[-1] if values else None)
    return (
        (f" rank {rank:<3}", "label"),
        (fit(newest, 8, right=True) + " ", "text"),
        (sparkline(values, max(0, width - 20), top), "spark"),
    )
