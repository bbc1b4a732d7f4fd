"""Every rank's speed, so that a slow one is seen."""

from __future__ import annotations

from sae_tui.format import count, fit, sparkline
from sae_tui.jobs.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.widgets.lines import Line

RATE = "rank_tokens_per_s"


class RanksPanel(DetailPanel):
    """A line per rank: tokens per second now and before, on one axis for all.

    The time a rank waits for the others is left out, so that a slow one shows.
    """

    DEFAULT_CSS = "RanksPanel { height: 1fr; width: 1fr; }"

    def lines(self, detail: JobDetail) -> list[Line]:
        width = self.size.width
        rates = {rank: points for (name, rank), points in detail.series.items() if name == RATE}
        top = max((point.value or 0 for points in rates.values() for point in points), default=None)
        found = [rank_line(rank, [p.value for p in points], top, width) for rank, points in sorted(rates.items())]
        return [((fit(" tokens/s of each rank while it computes", width), "title"),), *(found or [_none(width)])]


def _none(width: int) -> Line:
    return ((fit("  no values yet", width), "dim"),)


def rank_line(rank: int, values: list[float | None], top: float | None, width: int) -> Line:
    newest = count(values[-1] if values else None)
    return (
        (f" rank {rank:<3}", "label"),
        (fit(newest, 8, right=True) + " ", "text"),
        (sparkline(values, max(0, width - 20), top), "spark"),
    )
